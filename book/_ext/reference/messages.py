"""Every message of featcal.errors, made by the very class that is raised, with an example in its place holders."""

import ast
from pathlib import Path

from featcal import errors
from reference.markdown import block, escaped

# What a message of each class may be about. A test asks for an example of every class.
EXAMPLES: dict[str, tuple[object, ...]] = {
    "MissingPath": ("models/mrged", "the merged model", "check the path, or make the model with featcal merge"),
    "NoSafetensors": ("models/mnist", ["config.json", "pytorch_model.bin"]),
    "TruncatedFile": ("models/mnist/model.safetensors", "header larger than the file"),
    "BadFile": ("params.yaml", "not valid YAML (found a tab)", "mend that line; blanks, not tabs, show what belongs to what"),
    "BadData": ("images/mnist (train)", "row 17 cannot be decoded", "remove that picture or save it again"),
    "DiskFull": ("models/calibrated", 12_884_901_888),
    "HubUnreachable": ("tanganke/dtd", "main", "offline mode is on"),
    "NotOnHub": ("tanganke/dtdd", None, "404"),
    "NoRevision": ("tanganke/dtd", "0123456789abcdef0123456789abcdef01234567", "404"),
    "Gated": ("meta-llama/Llama-3.2-3B-Instruct", None, "403"),
    "WrongPin": ("suites/paper.pins.json", "tanganke/dtd", "0123456789abcdef0123456789abcdef01234567"),
    "ChangedFile": ("suites/paper.pins.json", "tanganke/dtd", "model.safetensors", "9f86d081884c7d65", "2c26b46b68ffc68f"),
    "MissingOption": ("--base", "the recipe names no base_model; name it on the command line"),
    "UnknownKey": ("calibrate", "ancor_blend", ["ridge", "anchor_blend", "interpolation"]),
    "BadSetting": ("calibrate.interpolation", 1.3, "must lie in [0, 1]"),
    "TaskMismatch": ("mnits", "samples", ["mnist", "dtd"]),
    "BadBatches": ("mnist", "is empty; at least one batch with at least one sample is needed"),
    "TensorsDiffer": (
        "layers.0.mlp.fc1.weight", "models/base/model.safetensors", "(3072, 768)", "models/dtd/model.safetensors", "(4096, 1024)",
    ),
    "TypesDiffer": (
        "post_layernorm.bias", "models/base/model.safetensors", "torch.float32", "models/dtd/model.safetensors", "torch.float16",
    ),
    "NotFloating": ("models/code/model.safetensors", "model.layers.0.mlp.up_proj.weight", "int8"),
    "NotFinite": ("models/dtd/model.safetensors", "layers.3.mlp.fc2.weight"),
    "MissingTensor": ("models/dtd/model.safetensors", "layers.0.mlp.fc1.bias", ["layers.0.mlp.fc1.weight"]),
    "WrongKeys": ("models/dtd", "CLIPVisionModel", ["layers.5.mlp.fc1.weight"], ["classifier.weight"], []),
    "UnknownModelClass": ("models/dtd", ["MyModel"], "a class of transformers is needed there"),
    "UnknownInput": ("CLIPModel", "", True),
    "BadPlan": ("MyModel", "several lists of blocks (encoder.layers, decoder.layers); one must be chosen"),
    "BadCapture": (["q_proj"], "ran twice in one pass"),
    "ReplayDiffers": ("MyModel", "encoder.layers", 0.0312),
    "AdapterMisfit": ("adapters/mnist", "their width", 128, 512),
    "SingularGram": ("layers.3.mlp.fc2", 1e-6, 3072),
    "SingularSum": ("regmean", "layers.3.mlp.fc2", 3072),
    "MergeDiverged": ("adamerging", "all tasks", 12, "merge.rate", 10.0),
    "TrainingDiverged": ("mnist", 40, 0.1),
    "AdapterDiverged": ("surgery", "mnist", 40, 10.0),
    "OutOfMemory": ("featcal calibrate", "CUDA out of memory"),
    "TooManyRanks": (4, 2),
    "RankLostError": ("connection closed by peer",),
    "LostProcess": ("sweep clip_b32-8", -9),
    "CannotFence": ("this system has no limits of processes",),
    "NoHarness": (["lm-evaluation-harness is not installed"], ["pip install 'featcal[language]'"]),
    "BadPage": ("table01.ipynb", "310000 bytes, more than the 300000 a page may have", "show less on it"),
}  # fmt: skip
SILENT = ("FeatCalError", "RemoteRankError")  # the parent of all, and one that only ends a process quietly
GROUPS = {
    "files": "Files, folders and the hub",
    "settings": "Settings and arguments",
    "models": "Models that do not fit",
    "runs": "While it runs",
}


def text(root: Path) -> str:
    """All messages by the file that defines them, as MyST."""
    parts = []
    for module, title in GROUPS.items():
        parts.append(f"## {title}\n\n")
        source = ast.parse((root / "featcal" / "errors" / f"{module}.py").read_text("utf-8"))
        for node in source.body:
            if isinstance(node, ast.ClassDef) and node.name not in SILENT:
                meaning = escaped((ast.get_docstring(node) or "").splitlines()[0])
                parts.append(f"### {node.name}\n\n{meaning}\n\n{block(message(node.name))}\n")
    return "".join(parts)


def message(name: str) -> str:
    """The example's message, as the command line prints it."""
    return f"featcal: {getattr(errors, name)(*EXAMPLES[name])}"
