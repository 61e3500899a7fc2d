"""Files, folders, data sets and the hub: missing, damaged, not what they should be."""

from featcal.errors.base import FeatCalError


class MissingPath(FeatCalError):
    """A file or folder that should be there and is not."""

    def __init__(self, path: object, what: str, way_out: str):
        super().__init__(f"{path}: no such file or folder ({what}).\n  - {way_out}")


class DiskFull(FeatCalError):
    """The disk filled up while a file or folder was being written; nothing of it is left behind."""

    def __init__(self, path: object, needed: int | None = None):
        self.path, self.needed = path, needed
        wants = f"; it needs {needed:,} bytes" if needed else ""
        super().__init__(
            f"{path}: no space left on the disk while writing it{wants}. What was written of it has been removed.\n"
            f"  - free some space (dvc gc -w removes unused cached files) and run the same command again"
        )


class NoSafetensors(FeatCalError):
    """A checkpoint folder without safetensors weights."""

    def __init__(self, folder: object, found: list[str], wanted: str = "model.safetensors"):
        pickled = [n for n in found if n.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        there = ", ".join(found[:8]) or "nothing"
        way_out = (
            f"{pickled[0]} is a pickle, which can run code when opened and is not read here; load it where you trust it and "
            "write it with save_pretrained(folder), or its state dict with safetensors.torch.save_file"
            if pickled
            else f"give the folder that holds {wanted}, or shards with their index where transformers wrote it"
        )
        super().__init__(f"{folder}: no {wanted} in this folder (found: {there}).\n  - {way_out}")


class TruncatedFile(FeatCalError):
    """A file that ends early or is not what its name says."""

    def __init__(self, path: object, reason: object):
        super().__init__(
            f"{path}: cannot be read, it is cut short or damaged ({reason}).\n"
            f"  - delete it and make or download it again; a stage of this project does so with `dvc repro -f <stage>`"
        )


class BadFile(FeatCalError):
    """A text file (results, prompts, configuration) that cannot be read as what it should be."""

    def __init__(self, path: object, problem: str, way_out: str):
        super().__init__(f"{path}: {problem}.\n  - {way_out}")


class BadData(FeatCalError):
    """Images or labels that cannot be used."""

    def __init__(self, place: object, problem: str, way_out: str):
        super().__init__(f"{place}: {problem}.\n  - {way_out}")


class HubUnreachable(FeatCalError):
    """A hub checkpoint or dataset that is neither in the local cache nor downloadable."""

    def __init__(self, name: str, revision: str | None, reason: object):
        at = f"@{revision}" if revision else ""
        super().__init__(
            f"{name}{at}: not in the local Hugging Face cache, and downloading it failed ({reason}).\n"
            f"  - run again with network access (what was downloaded before is kept), or\n"
            f"  - copy a filled cache here and set HF_HOME to it (HF_HUB_OFFLINE=1 then forbids any connection)"
        )


class NotOnHub(FeatCalError):
    """A repository or revision that the hub does not have, or does not show to who is not logged in."""

    def __init__(self, name: str, revision: str | None, reason: object):
        at = f"@{revision}" if revision else ""
        super().__init__(
            f"{name}{at}: the hub has no such repository or revision, or does not give it to you ({reason}).\n"
            f"  - check owner, name and revision on its page at https://huggingface.co, and\n"
            f"  - where it is private or has terms to accept, accept them there and run `hf auth login`"
        )
