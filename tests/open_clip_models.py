"""Tiny CLIPs of open_clip and their folders."""

import json

import open_clip
import torch
from safetensors.torch import save_file

from featcal.interchange.open_clip import CONFIG, WEIGHTS

VISION = {"image_size": 32, "layers": 3, "width": 32, "head_width": 8, "patch_size": 8}
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 24, "heads": 4, "layers": 2}
CFG = {"embed_dim": 16, "quick_gelu": True, "vision_cfg": VISION, "text_cfg": TEXT}


def theirs(cfg=CFG, seed=0):
    """Return a CLIP of open_clip in which every parameter is random: no bias 0, no gain 1."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = open_clip.CLIP(**cfg).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def folder_of(model, folder, cfg=CFG, preprocess=None):
    """Write a folder as open_clip's own hub upload does."""
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"model_cfg": cfg, "preprocess_cfg": preprocess or {}}))
    return folder


def changed(section, **values):
    """Return CFG with other values in one section."""
    return CFG | {section: CFG[section] | values}
