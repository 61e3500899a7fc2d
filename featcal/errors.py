"""The mistakes a user can make, one class per way out. Any other exception is a bug of ours."""

import copyreg
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any

LOG = logging.getLogger("featcal")
warn_once = cache(LOG.warning)  # of each message


class FeatCalError(Exception):
    """Report a user's mistake in one message. The command line exits with code 2.

    Args:
        location: file, key, tensor or model; the whole message if no problem is given.
        problem: what is wrong there, and what was expected.
        ways_out: what to do, one line each.
    """

    def __init__(self, location: object, problem: str = "", *ways_out: str):
        end = "" if problem.endswith((".", "?")) else "."
        first = f"{location}: {problem}{end}" if problem else str(location)
        super().__init__("\n  - ".join([first, *ways_out]))

    def __reduce__(self) -> tuple[Any, tuple[type, str]]:
        """Pickle class and message only, as subclasses take other arguments."""
        return copyreg.__newobj__, (type(self), str(self))  # type: ignore[attr-defined]


def nearest(word: str, known: Collection[str]) -> str:
    """Return a sentence that suggests the closest known word, or lists all if none is close."""
    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known)) or 'none'}."


def one_line(error: BaseException, most: int = 200) -> str:
    """Return another library's error message on one line, shortened, or its class if it is empty."""
    text = repr(error) if isinstance(error, KeyError) else str(error)  # else the key alone
    return shorten(" ".join(text.split()) or type(error).__name__, most)


@contextmanager
def as_bad_file(file: object, problem: str, *ways_out: str) -> Iterator[None]:
    """Raise another library's error inside the `with` as BadFile, with its message."""
    try:
        yield
    except (FeatCalError, MemoryError):
        raise
    except Exception as error:  # there are many kinds, for all that a file may hold
        raise BadFile(file, f"{problem} ({one_line(error, 300)})", *ways_out) from None


def shorten(text: str, most: int) -> str:
    """Leave out the middle of a text that has more than `most` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


def list_of(names: Iterable[object]) -> str:
    """Return names separated by commas, without the middle of a long list."""
    return shorten(", ".join(map(str, names)), 200) or "nothing"


def counted(count: int, noun: str) -> str:
    """Return "1 task", "2 tasks" and so on."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def optional_package(name: str, extra: str, files: object, or_else: str = "") -> Any:
    """Import a package that reads certain files. Raises: BadEnvironment with its pip line."""
    try:
        return import_module(name)
    except ImportError:
        problem = f"the package that reads {files} is not installed"
        install = f"install it: pip install 'featcal[{extra}]'{or_else}"
        raise BadEnvironment(name.partition(".")[0], problem, install) from None


# Settings and arguments
class BadSetting(FeatCalError):
    """Reject the value of a setting, argument or option, or its absence."""

    def __init__(self, key: str, value: object, expected: str):
        self.key, self.value, self.expected = key, value, expected
        problem = "nothing is given" if value is None else f"{value!r} cannot be used"
        super().__init__(key, f"{problem}; it {expected}")


class UnknownKey(FeatCalError):
    """Reject a key that does not exist, and suggest the closest one that does."""

    def __init__(self, location: str, key: str, known: Collection[str]):
        super().__init__(f"{location}: {key!r} is not known here; {nearest(key, known)}")


class BadBatches(FeatCalError):
    """Reject calibration batches that do not fit the experts or the model."""

    def __init__(self, task: str, problem: str):
        super().__init__(f"batches[{task!r}]", problem)


class BadEnvironment(FeatCalError):
    """Report a package or device that this machine lacks, before any model runs."""


# Files, folders and the hub
class MissingPath(FeatCalError):
    """Report a file or folder that does not exist."""

    def __init__(self, path: object, what: str, way_out: str):
        super().__init__(path, f"no such file or folder ({what})", way_out)


class DiskFull(FeatCalError):
    """Report a full disk; the unfinished file or folder has been removed."""

    def __init__(self, path: object, needed: int | None = None):
        self.path, self.needed = path, needed
        size = f"; it needs {needed:,} bytes" if needed else ""
        problem = f"no space left on the disk{size}. The unfinished copy has been removed"
        super().__init__(path, problem, "free some space and run the same command again")


class TruncatedFile(FeatCalError):
    """Report a file that ends early or is damaged."""

    def __init__(self, path: object, reason: object):
        problem = f"cannot be read, it is cut short or damaged ({reason})"
        super().__init__(path, problem, "delete it and make or download it (git lfs pull) again")


class BadFile(FeatCalError):
    """Report a readable file or folder whose content is not what is needed."""


class BadData(FeatCalError):
    """Report images, texts, labels or features that are unusable or do not fit the model."""


class HubUnreachable(FeatCalError):
    """Report a hub repository that is neither cached nor downloadable."""


class NotOnHub(FeatCalError):
    """Report a hub repository that does not exist, or needs a login or accepted terms."""


class NoRevision(NotOnHub):
    """Report a hub repository without the branch, tag or commit asked for."""


# Models and checkpoints that do not fit: each other, their configuration, a block plan
class MissingTensor(FeatCalError):
    """Report a tensor that a checkpoint or model lacks, with the closest names it has."""

    def __init__(self, location: object, name: str, known: Collection[str]):
        near = ", ".join(get_close_matches(name, known, n=3, cutoff=0.0))
        problem = f"no tensor named {name!r}{f'; nearest names: {near}' if near else ''}"
        way_out = "give models of one base and class (config.json), saved without a wrapper's names"
        super().__init__(location, problem, way_out)


class TensorsDiffer(FeatCalError):
    """Report a tensor whose shape, dtype or value must be equal in two models and is not."""

    def __init__(
        self, name: str, here: object, this: object, there: object, that: object, way_out: str = ""
    ):
        default = "all experts must be fine-tuned from this base, same architecture, same dtype"
        super().__init__(name, f"{this} in {here}, but {that} in {there}", way_out or default)


class WrongKeys(FeatCalError):
    """Report a checkpoint whose tensors are not those of the configured model."""

    def __init__(self, folder: object, model: str, *names: list[str]):
        """names: the tensors that are missing, surplus and misshapen."""
        kinds = zip(("missing", "not part of it", "of another shape"), names, strict=True)
        parts = [f"{len(n)} {kind}: {', '.join(n[:3])}" for kind, n in kinds if n]
        problem = f"the weights do not fit {model} ({'; '.join(parts)})"
        super().__init__(folder, problem, "check the configuration")


class NotFinite(FeatCalError):
    """Report NaN or infinite values in a tensor."""

    def __init__(self, location: object, name: str):
        way_out = "make this checkpoint again; its training may have diverged"
        super().__init__(location, f"{name} holds NaN or infinite values", way_out)


class BadPlan(FeatCalError):
    """Report a block plan that does not fit the model, or a model without an inferable plan."""

    def __init__(self, model: str, problem: str, way_out: str = ""):
        self.problem = problem
        default = "name its list of blocks: --set stack=PATH, or in Python "
        default += "plan=featcal.BlockPlan(featcal.Stack('name', blocks='PATH'))"
        super().__init__(model, problem, f"{way_out or default}.")


class BadCapture(FeatCalError):
    """Report module inputs that cannot be trusted: never seen, seen twice, or overwritten."""

    def __init__(self, modules: Sequence[str], problem: str):
        self.modules, self.problem = modules, f"{', '.join(modules)}: {problem}"
        way_out = "what is solved must run once per pass, with its input as first positional "
        way_out += "argument; the settings modules (linears) and norm choose what is solved."
        super().__init__(", ".join(modules), problem, way_out)


# While it runs
class SingularGram(FeatCalError):
    """Report a site whose linear system has no finite solution."""

    def __init__(self, site: str, ridge: float, width: int, *ways_out: str):
        default = (
            "leave the settings out, so that they are chosen on held-out samples, or",
            "use more samples, or a larger ridge, or",
            "look for activations that overflow: NaN or infinite features have this effect too.",
        )
        problem = f"the sums over {width} features have no finite solution at ridge={ridge:g}"
        super().__init__(site, problem, *(ways_out or default))


class Diverged(FeatCalError):
    """Report a training loss that became NaN or infinite."""

    def __init__(self, location: str, step: int, key: str, value: float, look: str):
        problem = f"the loss is not finite at step {step}"
        ways_out = f"lower {key} ({value:g}), or", f"if this is step 0, look for {look}"
        super().__init__(location, problem, *ways_out)


class RankLostError(FeatCalError):
    """Report another process of the run that ended early or cannot be reached."""

    def __init__(self, reason: object):
        # torch puts the location in its own sources before "] "
        text = str(reason).strip().split("\n")[0].split("] ", 1)[-1]
        problem = "another process of this run ended before its time or cannot be reached"
        cause = "see its own message above; without one it was probably killed for lack of memory:"
        way_out = "start fewer processes (torchrun --nproc-per-node), or use smaller batches"
        super().__init__(f"{problem} ({text}).", "", cause, way_out)


class RemoteRankError(FeatCalError):
    """Stop this process without a message because another one has failed and reports it."""
