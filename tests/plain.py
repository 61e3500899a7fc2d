"""Algorithm 1 for CLIP's vision tower written out in numpy, as the paper prints it: features are
columns (d, n).

Nothing is shared or streamed: every linear has its own Gram matrix, every token is interpolated,
matrices are inverted.
"""

import numpy as np

ATTENTION = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out"))
LINEARS = (*ATTENTION, "mlp.fc1", "mlp.fc2")
NORMS = ("layer_norm1", "layer_norm2")
# in forward order
PARTS = (NORMS[:1], LINEARS[:3], LINEARS[3:4], NORMS[1:], LINEARS[4:5], LINEARS[5:])
EPS = 1e-5  # CLIP's LayerNorm


def parameters(model):
    """Name -> float64 array."""
    return {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}


def unit(x):
    """LN₀ over the last axis."""
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS)


def block(p, index, x, heads=4):
    """Inputs of every module of one block by name, and its output; x (images, tokens, d)."""
    seen = {}  # inputs of modules; what an output is added to, by "to" and the linear

    def module(name):
        return p[f"encoder.layers.{index}.{name}.weight"], p[f"encoder.layers.{index}.{name}.bias"]

    def linear(name, x):
        seen[name] = x
        W, b = module(name)
        return x @ W.T + b

    def norm(name, x):
        seen[name] = x
        gain, shift = module(name)
        return unit(x) * gain + shift

    def split(x):
        images, tokens, d = x.shape
        return x.reshape(images, tokens, heads, d // heads).transpose(0, 2, 1, 3)

    h = norm("layer_norm1", x)
    q, k, v = (split(linear(f"self_attn.{n}_proj", h)) for n in "qkv")
    scores = np.exp(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1]))
    mixed = (scores / scores.sum(-1, keepdims=True)) @ v
    seen["to self_attn.out_proj"] = x
    x = x + linear("self_attn.out_proj", mixed.transpose(0, 2, 1, 3).reshape(x.shape))
    seen["to mlp.fc2"] = x
    h = linear("mlp.fc1", norm("layer_norm2", x))
    return seen, x + linear("mlp.fc2", h / (1 + np.exp(-1.702 * h)))


def token_weights(name, shape, last):
    """0.01 for patches of the last block, except where keys and values read them."""
    w = np.ones(shape)
    if last and name not in ("self_attn.k_proj", "self_attn.v_proj"):
        w[:, 1:] = 0.01
    return w.ravel() / w.sum()


def linear(tasks, merged, base, s):
    """Eqs. 10-17 and 51-55 for one linear; tasks: [(X_cal (d, n), X_exp (d, n), p (n,), W_i, b_i,
    lag (o, n))].

    Beyond the paper: lag is added to the expert's output.
    """
    blend = [
        s.anchor_blend * m + (1 - s.anchor_blend) * b for m, b in zip(merged, base, strict=True)
    ]
    left, right = s.ridge * np.eye(len(tasks[0][0])), s.ridge * blend[0]
    total, gaps, own, shares = s.ridge, s.ridge * blend[1], 0, []
    for X_cal, X_exp, p, W, b, lag in tasks:
        X_tgt = s.interpolation * X_exp + (1 - s.interpolation) * X_cal
        Y = W @ X_tgt + s.interpolation * lag  # (o, n)
        G = (X_cal * p) @ X_cal.T
        omega = 1 / np.linalg.norm(G) if s.task_weights == "gram" else 1.0
        left, right = left + omega * G, right + omega * (Y * p) @ X_cal.T
        total, own = total + omega, own + omega * np.outer(b, X_cal @ p)
        shares.append((omega, X_cal @ p, b + Y @ p))
    if s.affine == "joint":
        means = sum(omega * mean_cal for omega, mean_cal, _ in shares)
        ys = gaps + sum(omega * y for omega, _, y in shares)
        both = np.block([[left, means[:, None]], [means[None], np.array([[total]])]])
        found = np.hstack([right + own, ys[:, None]]) @ np.linalg.inv(both)
        return found[:, :-1], found[:, -1]
    W_star = right @ np.linalg.inv(left)
    for omega, mean_cal, mean_target in shares:
        gaps = gaps + omega * (mean_target - W_star @ mean_cal)
    return W_star, gaps / total if s.bias else merged[1]


def norm(tasks, merged, base, s):
    """Eqs. 56-59, feature by feature; tasks: [(X_cal (d, n), p (n,), γ_i, β_i)]."""
    if not s.norm:
        return merged
    gain, shift = (
        s.anchor_blend * m + (1 - s.anchor_blend) * b for m, b in zip(merged, base, strict=True)
    )
    solved = []
    for k in range(len(gain)):
        left, right = s.ridge * np.eye(2), s.ridge * np.array([gain[k], shift[k]])
        for X_cal, p, gain_i, shift_i in tasks:
            Z = np.stack([unit(X_cal.T).T[k], np.ones(X_cal.shape[1])])
            left, right = left + (Z * p) @ Z.T, right + (Z * p) @ (gain_i[k] * Z[0] + shift_i[k])
        solved.append(np.linalg.solve(left, right))
    return tuple(np.array(solved).T)


def lag_of(name, beta, student, teacher):
    """Return β (r_exp − r_cal) of the residual stream that a linear writes into, (o, n); else 0."""
    to, rows = f"to {name}", student[name].shape[:2]
    lag = beta * (teacher[to] - student[to]) if to in student else np.zeros((*rows, 1))
    return lag.reshape(-1, lag.shape[-1]).T


def calibrate(merged, base, experts, hidden, settings, depth=2):
    """Parameters of the calibrated model; hidden: per task the (student, teacher) features before
    the first block.
    """
    result, merged, base = parameters(merged), parameters(merged), parameters(base)
    experts = {task: parameters(model) for task, model in experts.items()}
    hidden, s = {task: list(pair) for task, pair in hidden.items()}, settings
    for index in range(depth):
        last = index + 1 == depth
        teacher = {t: block(experts[t], index, hidden[t][1]) for t in hidden}
        # of the merged block, for the stale order
        stale = {t: block(result, index, hidden[t][0])[1] for t in hidden}
        for part in PARTS if s.order == "sites" else [sum(PARTS, ())]:
            student = {t: block(result, index, hidden[t][0])[0] for t in hidden}
            solved = {}
            for name in part:
                key = f"encoder.layers.{index}.{name}"
                pair, tasks = [f"{key}.weight", f"{key}.bias"], []
                for t in hidden:
                    seen = [student[t], teacher[t][0]] if name in LINEARS else [student[t]]
                    p = token_weights(name, student[t][name].shape[:2], last)
                    features = [x[name].reshape(-1, x[name].shape[-1]).T for x in seen]
                    more = [lag_of(name, s.residual, *seen)] if name in LINEARS else []
                    tasks.append((*features, p, *(experts[t][k] for k in pair), *more))
                solve = linear if name in LINEARS else norm
                both = solve(tasks, tuple(merged[k] for k in pair), tuple(base[k] for k in pair), s)
                solved.update(zip(pair, both, strict=True))
            result.update(solved)
        for t, (x, _) in hidden.items():
            onward = stale[t] if s.order == "stale" else block(result, index, x)[1]
            hidden[t] = [onward, teacher[t][1]]
    return result
