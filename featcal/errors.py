"""Every mistake a user can make, one class each, with its text and the way out; anything else is a fault of ours."""


class FeatCalError(Exception):
    """A mistake outside this package: one message that names the place, what was expected, and what to do. Exit code 2."""

    def __reduce__(self) -> tuple[type, tuple[str]]:  # from a worker process only the message comes back
        return FeatCalError, (str(self),)


class BadSetting(FeatCalError):
    """A value, key or section of a settings file that cannot be used."""

    def __init__(self, key: str, value: object, expected: str):
        self.key, self.value, self.expected = key, value, expected
        super().__init__(f"{key}: {value!r} cannot be used; it {expected}.")


class UnknownKey(FeatCalError):
    """A key that no setting has, with the nearest one that exists."""

    def __init__(self, place: str, key: str, known: list[str]):
        from difflib import get_close_matches

        near = get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known)) or 'none'}."
        super().__init__(f"{place}: {key!r} is not known here; {hint}")


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


class MissingTensor(FeatCalError):
    """A tensor that a checkpoint or model should have and has not."""

    def __init__(self, place: object, name: str, nearest: list[str]):
        near = f"; nearest names: {', '.join(nearest)}" if nearest else ""
        super().__init__(f"{place}: no tensor named {name!r}{near}.\n  - check that the models share one architecture")


class NotFinite(FeatCalError):
    """NaN or infinity where only numbers make sense."""

    def __init__(self, place: object, name: str):
        super().__init__(
            f"{place}: {name} holds NaN or infinite values.\n  - make this checkpoint again; its training may have diverged"
        )


class TensorsDiffer(FeatCalError):
    """One tensor that two models should share differs in shape, dtype or value."""

    def __init__(self, name: str, here: object, this: object, there: object, that: object):
        super().__init__(
            f"{name}: {this} in {here}, but {that} in {there}.\n"
            f"  - all experts must be fine-tuned from this base, same architecture, same dtype"
        )


class WrongKeys(FeatCalError):
    """A checkpoint whose tensors are not those of the model its configuration describes."""

    def __init__(self, folder: object, model: str, missing: list[str], unexpected: list[str], misshapen: list[str]):
        kinds = {"missing": missing, "not part of it": unexpected, "of another shape": misshapen}
        parts = [f"{len(names)} {kind}: {', '.join(names[:3])}" for kind, names in kinds.items() if names]
        super().__init__(f"{folder}: the weights do not fit {model} ({'; '.join(parts)}).\n  - check the configuration")


class UnknownModelClass(FeatCalError):
    """A config.json that does not say which model class the folder holds, or one that transformers lacks."""

    def __init__(self, folder: object, architectures: object, expected: str):
        super().__init__(f"{folder}/config.json: architectures is {architectures!r}, but {expected}.")


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
            f"{name}{at}: not in the local Hugging Face cache and the hub cannot be reached ({reason}).\n"
            f"  - run once with network access, or\n"
            f"  - copy a filled cache here and set HF_HOME to it (HF_HUB_OFFLINE=1 then forbids any connection)"
        )


class SingularGram(FeatCalError):
    """The left side of a ridge system has no Cholesky factor."""

    def __init__(self, site: str, ridge: float, width: int):
        super().__init__(
            f"{site}: the Gram matrix of {width} features has no Cholesky factor at ridge={ridge:g}.\n"
            f"  - raise calibrate.ridge (paper: 0.05 for CLIP, 1e-5 for T5 and Llama-3B, 3.0 for Llama-8B), or\n"
            f"  - draw more calibration samples, or\n"
            f"  - look for activations that overflow: a factor is also missing when the features hold NaN or Inf."
        )


class BadPlan(FeatCalError):
    """A block plan that does not fit the model, or a model no plan can be inferred for."""

    def __init__(self, model: str, problem: str, way_out: str = ""):
        default = "pass plan=featcal.BlockPlan(featcal.Stack('name', blocks='path.to.the.ModuleList'))"
        super().__init__(f"{model}: {problem}.\n  - {way_out or default}.")


class BadCapture(FeatCalError):
    """Inputs of a block's modules that cannot be trusted: never seen, seen twice, or overwritten afterwards."""

    def __init__(self, modules: list[str], problem: str):
        super().__init__(
            f"{', '.join(modules)}: {problem}.\n"
            f"  - calibration needs every linear of a block to run once per pass with its input as first positional argument."
        )


class ReplayDiffers(FeatCalError):
    """Running the blocks one by one does not give what the model's own forward gives."""

    def __init__(self, model: str, blocks: str, difference: float):
        super().__init__(
            f"{model}: replaying {blocks!r} block by block differs from the model's own forward by {difference:.3g}.\n"
            f"  - the blocks exchange something a block plan cannot express, or the model is in training mode (dropout);\n"
            f"  - call model.eval(), or name another ModuleList with plan=featcal.BlockPlan(...)."
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


class BadPage(FeatCalError):
    """A page of the report that cannot be kept as it was executed."""

    def __init__(self, page: object, problem: str, way_out: str):
        super().__init__(f"{page}: {problem}.\n  - {way_out}.")
