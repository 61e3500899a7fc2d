"""Algorithm 1 for any family, from whole forwards of the models: no replay, no carried arguments,
nothing fed on by hand.

Block by block, student and experts run from end to end and hooks keep what reaches the block's
modules. Padding is dropped row by row; linears are solved by `plain.linear`, norms by least squares
with the ridge as extra rows.
"""

import copy

import numpy as np
import plain
import torch
from transformers.pytorch_utils import Conv1D


def inputs(model, batch, name):
    """Return what reaches the named module in one whole forward."""
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, a: seen.append(a[0]))
    with torch.no_grad():
        model(**batch)
    hook.remove()
    return seen[-1]


def kept(batch, name, x, last, swapped):
    """Return features (n, d) of the tokens that are no padding, and the weight of each row."""
    if "pixel_values" in batch and "text_model" not in name:
        p = np.ones(x.shape[:2])
        class_token = name.startswith(("vision_model.", "layers.", "encoder.layer."))  # not SigLIP
        if last and class_token and not name.endswith(("k_proj", "v_proj")):
            p[:, 1:] = 0.01
        return x.flatten(0, 1).numpy(), p.ravel()
    of_encoder = ("EncDecAttention.k", "EncDecAttention.v")
    decoder = name.startswith("decoder") and not name.endswith(of_encoder)
    labelled = decoder and "labels" in batch
    mask = batch["labels"] != -100 if labelled else batch["attention_mask"] == 1
    if x.dim() == 2:
        x = x.view(*mask.shape, -1)
    elif swapped:
        x = x.transpose(1, 2)
    x = x[mask].flatten(0, -2).numpy()
    return x, np.ones(len(x))


def features(model, batches, name, last):
    """Return the rows of all batches of one module (n, d), and their weights, which add up to 1."""
    # (batch, heads, tokens, d)
    swapped = "Gemma3" in type(model).__name__ and name.endswith(("q_norm", "k_norm"))
    rows = [kept(batch, name, inputs(model, batch, name), last, swapped) for batch in batches]
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


def solved_linear(name, student, merged, base, experts, batches, s, last):
    """Return weight and bias of one linear."""
    tasks = []
    merged, base = (weight(model.get_submodule(name)) for model in (merged, base))
    for task, expert in experts.items():
        x_cal, p = features(student, batches[task], name, last)
        x_exp, _ = features(expert, batches[task], name, last)
        W, b = weight(expert.get_submodule(name))
        tasks.append((x_cal.T, x_exp.T, p, W, b, 0.0))  # nothing beyond the paper
    return plain.linear(tasks, merged, base, s)


def solved_norm(name, student, merged, base, experts, batches, s, last, offset):
    """Return scale and shift (None without one) of one norm, feature by feature, by least
    squares.
    """
    own, theirs = (affine(model.get_submodule(name), offset) for model in (merged, base))
    anchors = [
        s.anchor_blend * m + (1 - s.anchor_blend) * b for m, b in zip(own, theirs, strict=True)
    ]
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
    """Numbers back into a module."""
    W = W.T if isinstance(module, Conv1D) else W - offset
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(np.ascontiguousarray(W)))
        if b is not None and getattr(module, "bias", None) is not None:
            module.bias.copy_(torch.from_numpy(b))


def calibrate(merged, base, experts, batches, settings, paths, offset=0):
    """Return the calibrated model; paths: where its stacks are, in forward order."""
    student = copy.deepcopy(merged)
    for path in paths:
        depth = len(student.get_submodule(path))
        for index in range(depth):
            place = f"{path}.{index}"
            given = student, merged, base, experts, batches, settings, index + 1 == depth
            results = {}
            for name, module in student.get_submodule(place).named_modules(prefix=place):
                chosen = tuple(f".{end}" for end in settings.modules or ())
                if isinstance(module, torch.nn.Linear | Conv1D):
                    if not chosen or name.endswith(chosen):
                        results[name] = *solved_linear(name, *given), 0
                elif "Norm" in type(module).__name__ and settings.norm:
                    results[name] = *solved_norm(name, *given, offset), offset
            for name, result in results.items():
                store(student.get_submodule(name), *result)
    return student
