"""What a calibration or a training stops at."""

from featcal.errors.base import FeatCalError


class SingularGram(FeatCalError):
    """The left side of a ridge system has no Cholesky factor."""

    def __init__(self, site: str, ridge: float, width: int):
        super().__init__(
            f"{site}: the Gram matrix of {width} features has no Cholesky factor at ridge={ridge:g}.\n"
            f"  - raise calibrate.ridge (paper: 0.05 for CLIP, 1e-5 for T5 and Llama-3B, 3.0 for Llama-8B), or\n"
            f"  - draw more calibration samples, or\n"
            f"  - look for activations that overflow: a factor is also missing when the features hold NaN or Inf."
        )


class BadBatches(FeatCalError):
    """Calibration data that do not fit the experts or the model."""

    def __init__(self, task: str, problem: str):
        super().__init__(f"batches[{task!r}]: {problem}.")


class TaskMismatch(FeatCalError):
    """An expert without batches, or batches without an expert."""

    def __init__(self, task: str, lacks: str, known: list[str]):
        from difflib import get_close_matches

        near = get_close_matches(task, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(known)) or 'none'}."
        super().__init__(f"task {task!r} has no {lacks}; {hint}\n  - experts and batches must have the same task names.")


class TrainingDiverged(FeatCalError):
    """A loss that became NaN or infinite while an expert was fine-tuned."""

    def __init__(self, task: str, step: int, lr: float):
        super().__init__(
            f"fine-tuning {task!r}: the loss is not finite at step {step} (lr {lr:g}).\n"
            f"  - lower fine_tune.lr in the suite file, or\n"
            f"  - if this is step 0, look for NaN in the base or in the images of this task"
        )


class TooManyRanks(FeatCalError):
    """More processes than tasks: a task is not split over processes."""

    def __init__(self, ranks: int, tasks: int):
        super().__init__(
            f"{ranks} processes for {tasks} task{'s' * (tasks != 1)}: every process takes whole tasks, at least one.\n"
            f"  - start at most {tasks} (torchrun --nproc-per-node {tasks}), or\n"
            f"  - run several experiments side by side, each on its own GPUs (CUDA_VISIBLE_DEVICES)"
        )


class RankLostError(FeatCalError):
    """Another process of the run that is gone or out of reach."""

    def __init__(self, reason: object):
        said = str(reason).strip().split("\n")[0].split("] ", 1)[-1]  # without torch's place in its own sources
        super().__init__(
            f"another process of this run ended before its time or cannot be reached ({said}).\n"
            f"  - what it said of itself stands above; one that was killed without a word was probably short of memory:\n"
            f"    start fewer processes (torchrun --nproc-per-node), or take smaller batches"
        )


class LostProcess(FeatCalError):
    """A job's process that ended without a result."""

    def __init__(self, job: str, code: int | None):
        super().__init__(
            f"{job}: its process ended without a result (exit code {code}).\n"
            f"  - without a message above it was probably short of memory: set `workers: 1` in the suite file, or\n"
            f"  - take fewer samples"
        )


class OutOfMemory(FeatCalError):
    """A command that asked for more memory, of the GPU or of the machine, than there is."""

    def __init__(self, command: str, reason: object):
        said = str(reason).strip().split(" Of the allocated memory")[0].rstrip(".") or "no more memory"
        super().__init__(
            f"{command}: not enough memory ({said}); nothing of it is left half-written.\n"
            f"  - lower `batch`, on the command line or in this experiment's group of params.yaml, or\n"
            f"  - end what else is on that GPU (nvidia-smi lists it), or\n"
            f"  - compute on the CPU: `device: cpu` in the suite file, or --device cpu"
        )


class RemoteRankError(FeatCalError):
    """What went wrong in another process of the run; that one tells it, so that it is told once."""


class AdapterDiverged(FeatCalError):
    """A loss that became NaN or infinite while adapters were trained."""

    def __init__(self, method: str, task: str, step: int, lr: float):
        super().__init__(
            f"{method} {task!r}: the loss is not finite at step {step} (lr {lr:g}).\n"
            f"  - lower {method}.lr (paper: 1e-3), or\n"
            f"  - if this is step 0, look for NaN in the features: the merged model, the expert, or the samples of this task"
        )


class MergeDiverged(FeatCalError):
    """A loss that became NaN or infinite while a merging method took its steps."""

    def __init__(self, method: str, place: str, step: int, key: str, value: float):
        super().__init__(
            f"{method}: the loss of {place} is not finite at step {step}.\n"
            f"  - lower {key} ({value:g}), or\n"
            f"  - if this is step 0, look for overflowing numbers in the experts or in the data"
        )


class SingularSum(FeatCalError):
    """Gram matrices of features whose sum over tasks cannot be inverted."""

    def __init__(self, method: str, place: str, width: int):
        super().__init__(
            f"{method}: the summed Gram matrix of {place} ({width} features) cannot be inverted.\n"
            f"  - give more samples, or\n"
            f"  - lower merge.off_diagonal below 1; if a feature is zero everywhere, no samples help: use the method lot instead"
        )


class CannotFence(FeatCalError):
    """Programs under test that cannot be run behind limits on this system."""

    def __init__(self, reason: str):
        super().__init__(
            f"programs that a model wrote: {reason}.\n"
            f"  - the scores that run programs (humaneval_plus, mbpp_plus) need Linux; WSL or a container will do"
        )


class NoHarness(FeatCalError):
    """What lm-evaluation-harness or one of its tasks needs and this environment lacks; told before any model runs."""

    def __init__(self, problems: list[str], ways_out: list[str]):
        super().__init__(";\n".join(problems) + "." + "".join(f"\n  - {way}" for way in ways_out))
