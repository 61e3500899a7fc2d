"""Every class of featcal.errors with an example message, made by the class itself."""

import ast
from pathlib import Path

from featcal import errors
from reference.markdown import block, escaped

# arguments of one example per class; a test requires an example of every class
EXAMPLES: dict[str, tuple[object, ...]] = {
    "BadSetting": ("calibrate.interpolation", 1.3, "must be less than or equal to 1"),
    "UnknownKey": ("calibrate", "ancor_blend", ["ridge", "anchor_blend", "interpolation"]),
    "BadBatches": ("mnist", "is empty; at least one batch with at least one sample is needed"),
    "BadEnvironment": ("peft", "the package that reads LoRA adapters is not installed", "install it: pip install 'featcal[lora]'"),
    "MissingPath": ("models/mrged", "the merged model", "check the path, or make the model with featcal merge"),
    "DiskFull": ("models/calibrated", 12_884_901_888),
    "TruncatedFile": ("models/mnist/model.safetensors", "header larger than the file"),
    "BadFile": ("params.yaml", "not valid YAML (found a tab)", "fix that line; blanks, not tabs, show what belongs to what"),
    "BadData": ("images/mnist (train)", "row 17 cannot be decoded", "remove that picture or save it again"),
    "HubUnreachable": (
        "tanganke/dtd@main",
        "not in the local Hugging Face cache, and downloading it failed (offline mode is on)",
        "check the name or path, or run again with network access, or",
        "copy a filled cache here and set HF_HOME to it (HF_HUB_OFFLINE=1 then forbids any connection)",
    ),
    "NotOnHub": (
        "meta-llama/Llama-3.2-3B-Instruct",
        "the hub gives this repository only to those who have accepted its terms (GatedRepoError)",
        "open its page at https://huggingface.co, log in, accept the terms and wait until access is granted,",
        "then run `hf auth login` on this machine, with a token that may read gated repositories (or set HF_TOKEN), or",
        "leave its role out: write `null` for it in the suite file",
    ),
    "NoRevision": ("tanganke/dtd@v2", "the hub has no such branch, tag or commit", "check the revision on the repository's page"),
    "MissingTensor": ("models/dtd/model.safetensors", "layers.0.mlp.fc1.bias", ["layers.0.mlp.fc1.weight"]),
    "TensorsDiffer": (
        "layers.0.mlp.fc1.weight", "models/base/model.safetensors", "(3072, 768)", "models/dtd/model.safetensors", "(4096, 1024)",
    ),
    "WrongKeys": ("models/dtd", "CLIPVisionModel", ["layers.5.mlp.fc1.weight"], ["classifier.weight"], []),
    "NotFinite": ("models/dtd/model.safetensors", "layers.3.mlp.fc2.weight"),
    "BadPlan": ("MyModel", "several lists of blocks (encoder.layers, decoder.layers); one must be chosen"),
    "BadCapture": (["q_proj"], "ran twice in one pass"),
    "SingularGram": ("layers.3.mlp.fc2", 1e-6, 3072),
    "Diverged": ("adamerging", 12, "merge.rate", 10.0, "overflowing numbers in the experts or the data"),
    "RankLostError": ("connection closed by peer",),
}  # fmt: skip
SILENT = (
    "FeatCalError",
    "RemoteRankError",
)  # the base class, and one that ends a process quietly


def text(root: Path) -> str:
    """Return all classes as MyST; comment lines in featcal/errors.py become the headings."""
    source = (root / "featcal" / "errors.py").read_text("utf-8")
    titles = {
        number: line[2:]
        for number, line in enumerate(source.splitlines(), 1)
        if line.startswith("# ")
    }
    parts = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name in SILENT:
            continue
        above = [number for number in titles if number < node.lineno]
        parts += [f"## {titles.pop(number)}\n\n" for number in above]
        meaning = escaped((ast.get_docstring(node) or "").splitlines()[0])
        parts.append(f"### {node.name}\n\n{meaning}\n\n{block(message(node.name))}\n")
    return "".join(parts)


def message(name: str) -> str:
    """Return the example message as the command line prints it."""
    return f"featcal: {getattr(errors, name)(*EXAMPLES[name])}"
