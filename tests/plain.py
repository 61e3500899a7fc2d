"""Algorithm 1 for any family in numpy, from whole forwards: nothing replayed, shared or streamed.

Block by block, student and experts run from end to end and hooks keep what reaches the block's
modules. Padding is dropped row by row. Every linear has its own Gram matrix, every token is
interpolated, matrices are inverted; norms are solved by least squares with the ridge as extra rows.
"""

import copy

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

# CLIP's parts of a block in forward order, and the norm that reads what an output is added to
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkv")
PARTS = (("layer_norm1",), ATTENTION, ("self_attn.out_proj",))
PARTS += (("layer_norm2",), ("mlp.fc1",), ("mlp.fc2",))
STREAMS = {"self_attn.out_proj": "layer_norm1", "mlp.fc2": "layer_norm2"}


def inputs(model, batch, name):
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, a: seen.append(a[0]))
    with torch.no_grad():
        model(**batch)
    hook.remove()
    return seen[-1]


def kept(model, batch, name, x, last):
    """Return features (n, d) of the tokens that are no padding, and the weight of each row."""
    if "pixel_values" in batch and "text_model" not in name:
        p = np.ones(x.shape[:2])
        class_token = "Siglip" not in type(model).__name__
        if last and class_token and not name.endswith(("k_proj", "v_proj")):
            p[:, 1:] = 0.01
        return x.flatten(0, 1).numpy(), p.ravel()
    of_encoder = ("EncDecAttention.k", "EncDecAttention.v")
    labelled = name.startswith("decoder") and not name.endswith(of_encoder) and "labels" in batch
    mask = batch["labels"] != -100 if labelled else batch["attention_mask"] == 1
    if x.dim() == 2:
        x = x.view(*mask.shape, -1)
    elif "Gemma3" in type(model).__name__ and name.endswith(("q_norm", "k_norm")):
        x = x.transpose(1, 2)  # (batch, heads, tokens, d)
    x = x[mask].flatten(0, -2).numpy()
    return x, np.ones(len(x))


def features(model, batches, name, last):
    """Return the rows of all batches of one module (n, d), and their weights, which add up to 1."""
    rows = [kept(model, batch, name, inputs(model, batch, name), last) for batch in batches]
    p = np.concatenate([p for _, p in rows])
    return np.concatenate([x for x, _ in rows]), p / p.sum()


def weight(module):
    """(o, d), and the bias or zeros."""
    W = module.weight.detach().numpy()
    W = W.T if isinstance(module, Conv1D) else W
    return W, np.zeros(len(W)) if module.bias is None else module.bias.detach().numpy()


def unit(module, x):
    """Normalised rows, without scale and shift."""
    if isinstance(module, torch.nn.LayerNorm):
        return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + module.eps)
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return x / np.sqrt((x * x).mean(1, keepdims=True) + eps)


def affine(module, offset):
    """Scale and, where there is one, shift."""
    pair = [module.weight.detach().numpy() + offset]
    return pair if getattr(module, "bias", None) is None else [*pair, module.bias.detach().numpy()]


def linear(tasks, merged, base, s):
    """Eqs. 10-17 and 51-55 for one linear; tasks: [(X_cal (d, n), X_exp (d, n), p (n,), W_i, b_i,
    lag (o, n))], where lag is added to the expert's output, beyond the paper."""
    rho = s.anchor_blend
    blend = [rho * m + (1 - rho) * b for m, b in zip(merged, base, strict=True)]
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


def solved_linear(name, student, merged, base, experts, batches, s, last):
    tasks = []
    merged, base = (weight(model.get_submodule(name)) for model in (merged, base))
    streams = (name.removesuffix(w) + norm for w, norm in STREAMS.items() if name.endswith(w))
    stream = next(streams, "")
    for task, expert in experts.items():
        (x_cal, p), (x_exp, _) = (features(m, batches[task], name, last) for m in (student, expert))
        lag = 0.0
        if s.residual and stream:
            ours, theirs = (features(m, batches[task], stream, last)[0] for m in (student, expert))
            lag = s.residual * (theirs - ours).T
        W, b = weight(expert.get_submodule(name))
        tasks.append((x_cal.T, x_exp.T, p, W, b, lag))
    return linear(tasks, merged, base, s)


def solved_norm(name, student, merged, base, experts, batches, s, last, offset):
    """Return scale and shift (or None) of one norm, feature by feature, by least squares."""
    own, theirs = (affine(model.get_submodule(name), offset) for model in (merged, base))
    rho = s.anchor_blend
    anchors = [rho * m + (1 - rho) * b for m, b in zip(own, theirs, strict=True)]
    data = []
    for task, expert in experts.items():
        x, p = features(student, batches[task], name, last)
        module = expert.get_submodule(name)
        data.append((unit(module, x), np.sqrt(p), affine(module, offset)))
    solved, root = [], np.sqrt(s.ridge)
    for k in range(len(anchors[0])):
        left, right = [root * np.eye(len(anchors))], [root * np.array([a[k] for a in anchors])]
        for z, weights, pair in data:
            columns = np.stack([z[:, k], np.ones(len(z))][: len(anchors)], 1) * weights[:, None]
            left.append(columns)
            right.append(columns @ np.array([part[k] for part in pair]))
        solved.append(np.linalg.lstsq(np.concatenate(left), np.concatenate(right), rcond=None)[0])
    return [*np.array(solved).T, None][:2]


def store(module, W, b, offset):
    W = W.T if isinstance(module, Conv1D) else W - offset
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(np.ascontiguousarray(W)))
        if b is not None and getattr(module, "bias", None) is not None:
            module.bias.copy_(torch.from_numpy(b))


def calibrate(merged, base, experts, batches, settings, paths, offset=0):
    """Return the calibrated model; paths: where its stacks are, in forward order."""
    result = copy.deepcopy(merged)
    student = merged if settings.order == "stale" else result
    for path in paths:
        depth = len(result.get_submodule(path))
        for index in range(depth):
            place = f"{path}.{index}"
            given = student, merged, base, experts, batches, settings, index + 1 == depth
            chosen = tuple(f".{end}" for end in settings.modules or ())
            modules = dict(result.get_submodule(place).named_modules(prefix=place))
            parts = [[f"{place}.{name}" for name in part] for part in PARTS]
            of_clip = parts[0][0] in modules  # of other families one part is solved at a time
            for part in parts if settings.order == "sites" and of_clip else [modules]:
                solved = {}
                for name in part:
                    if isinstance(modules[name], torch.nn.Linear | Conv1D):
                        if not settings.modules or name.endswith(chosen):
                            solved[name] = *solved_linear(name, *given), 0
                    elif "Norm" in type(modules[name]).__name__ and settings.norm:
                        solved[name] = *solved_norm(name, *given, offset), offset
                for name, values in solved.items():
                    store(modules[name], *values)
    return result
