"""Every mistake a user can make: one class per way out, each with its text; anything else is a
fault of ours.
"""

from collections.abc import Collection
from difflib import get_close_matches


class FeatCalError(Exception):
    """A mistake outside this package: one message that names the place, what was expected, and what
    to do. Exit code 2.

    place:     file, key, tensor or model; the whole message where nothing follows.
    problem:   what is wrong there, and what was expected.
    ways_out:  what to do, one line each.
    """

    def __init__(self, place: object, problem: str = "", *ways_out: str):
        super().__init__(
            "\n  - ".join([f"{place}: {problem}." if problem else str(place), *ways_out])
        )

    def __reduce__(
        self,
    ) -> tuple[type, tuple[str]]:  # from a worker process only the message comes back
        return FeatCalError, (str(self),)


# Settings and arguments


class BadSetting(FeatCalError):
    """A value, key or section of the settings, or an option, that cannot be used or is not
    there.
    """

    def __init__(self, key: str, value: object, expected: str):
        self.key, self.value, self.expected = key, value, expected
        super().__init__(
            key,
            f"{'nothing is given' if value is None else f'{value!r} cannot be used'}; it {expected}",
        )


class UnknownKey(FeatCalError):
    """A key that no setting has, with the nearest one that exists."""

    def __init__(self, place: str, key: str, known: Collection[str]):
        super().__init__(f"{place}: {key!r} is not known here; {nearest(key, known)}")


def nearest(word: str, known: Collection[str]) -> str:
    """A sentence with the known word that comes nearest, or all of them where none is near."""
    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known)) or 'none'}."


class BadBatches(FeatCalError):
    """Calibration data that do not fit the experts or the model."""

    def __init__(self, task: str, problem: str):
        super().__init__(f"batches[{task!r}]", problem)


class BadEnvironment(FeatCalError):
    """What this machine or its Python environment lacks; raised before any model runs."""


# Files, folders and the hub


class MissingPath(FeatCalError):
    """A file or folder that should be there and is not."""

    def __init__(self, path: object, what: str, way_out: str):
        super().__init__(path, f"no such file or folder ({what})", way_out)


class DiskFull(FeatCalError):
    """The disk filled up while a file or folder was being written; nothing of it is left behind."""

    def __init__(self, path: object, needed: int | None = None):
        self.path, self.needed = path, needed
        wants = f"; it needs {needed:,} bytes" if needed else ""
        super().__init__(
            path,
            f"no space left on the disk while writing it{wants}. What was written of it has been removed",
            "free some space and run the same command again",
        )


class TruncatedFile(FeatCalError):
    """A file that ends early or is not what its name says."""

    def __init__(self, path: object, reason: object):
        super().__init__(
            path,
            f"cannot be read, it is cut short or damaged ({reason})",
            "delete it and make or download it again",
        )


class BadFile(FeatCalError):
    """A file or folder that is there and whole, but holds something else than is needed."""


class BadData(FeatCalError):
    """Images, texts, labels or features that cannot be used, or that this model does not take."""


class HubUnreachable(FeatCalError):
    """A hub checkpoint or dataset that is neither in the local cache nor downloadable."""


class NotOnHub(FeatCalError):
    """A repository that the hub does not have, or does not give to who is not logged in or has not
    accepted its terms.
    """


class NoRevision(NotOnHub):
    """A repository of the hub that is there, but has no such branch, tag or commit."""


# Models and checkpoints that do not fit: each other, their configuration, a block plan


class MissingTensor(FeatCalError):
    """A tensor that a checkpoint or model should have and has not."""

    def __init__(self, place: object, name: str, known: Collection[str]):
        near = ", ".join(get_close_matches(name, known, n=3, cutoff=0.0))
        super().__init__(
            place,
            f"no tensor named {name!r}{near and f'; nearest names: {near}'}",
            "check that the models share one architecture",
        )


class TensorsDiffer(FeatCalError):
    """One tensor that two models should share differs in shape, dtype or value."""

    def __init__(
        self, name: str, here: object, this: object, there: object, that: object, way_out: str = ""
    ):
        default = "all experts must be fine-tuned from this base, same architecture, same dtype"
        super().__init__(name, f"{this} in {here}, but {that} in {there}", way_out or default)


class WrongKeys(FeatCalError):
    """A checkpoint whose tensors are not those of the model its configuration describes."""

    def __init__(
        self,
        folder: object,
        model: str,
        missing: list[str],
        unexpected: list[str],
        misshapen: list[str],
    ):
        kinds = {"missing": missing, "not part of it": unexpected, "of another shape": misshapen}
        parts = [
            f"{len(names)} {kind}: {', '.join(names[:3])}" for kind, names in kinds.items() if names
        ]
        super().__init__(
            folder,
            f"the weights do not fit {model} ({'; '.join(parts)})",
            "check the configuration",
        )


class NotFinite(FeatCalError):
    """NaN or infinity where only numbers make sense."""

    def __init__(self, place: object, name: str):
        super().__init__(
            place,
            f"{name} holds NaN or infinite values",
            "make this checkpoint again; its training may have diverged",
        )


class BadPlan(FeatCalError):
    """A block plan that does not fit the model, or a model no plan can be inferred for."""

    def __init__(self, model: str, problem: str, way_out: str = ""):
        default = "name its list of blocks with plan=featcal.BlockPlan(featcal.Stack('name', blocks='path.to.the.ModuleList'))"
        super().__init__(model, problem, f"{way_out or default}.")


class BadCapture(FeatCalError):
    """Inputs of a block's modules that cannot be trusted: never seen, seen twice, or overwritten
    afterwards.
    """

    def __init__(self, modules: list[str], problem: str):
        way_out = "calibration needs every linear of a block to run once per pass with its input as first positional argument."
        super().__init__(", ".join(modules), problem, way_out)


# While it runs


class SingularGram(FeatCalError):
    """Gram matrices of features, of one task or their sum, whose system cannot be solved."""

    def __init__(self, site: str, ridge: float, width: int, *ways_out: str):
        default = (
            "raise calibrate.ridge (paper: 0.05 for CLIP, 1e-5 for T5 and Llama-3B, 3.0 for Llama-8B), or",
            "draw more calibration samples, or",
            "look for activations that overflow: a factor is also missing when the features hold NaN or Inf.",
        )
        problem = f"the Gram matrix of {width} features has no Cholesky factor at ridge={ridge:g}"
        super().__init__(site, problem, *(ways_out or default))


class Diverged(FeatCalError):
    """A loss that became NaN or infinite while an expert, adapters or a merging method's
    coefficients were trained.
    """

    def __init__(self, place: str, step: int, key: str, value: float, look: str):
        super().__init__(
            place,
            f"the loss is not finite at step {step}",
            f"lower {key} ({value:g}), or",
            f"if this is step 0, look for {look}",
        )


class OutOfMemory(FeatCalError):
    """More memory, of the GPU or of the machine, was asked for than there is."""


class RankLostError(FeatCalError):
    """Another process of the run that is gone or out of reach."""

    def __init__(self, reason: object):
        said = (
            str(reason).strip().split("\n")[0].split("] ", 1)[-1]
        )  # without torch's place in its own sources
        super().__init__(
            f"another process of this run ended before its time or cannot be reached ({said}).\n"
            f"  - what it said of itself stands above; one that was killed without a word was probably short of memory:\n"
            f"    start fewer processes (torchrun --nproc-per-node), or take smaller batches"
        )


class RemoteRankError(FeatCalError):
    """What went wrong in another process of the run; that one says it, so that it is said once."""
