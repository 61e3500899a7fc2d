"""Models and checkpoints that do not fit: each other, their configuration, a block plan."""

from featcal.errors.base import FeatCalError


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


class UnknownInput(FeatCalError):
    """A model class that is given something else than pictures or text."""

    def __init__(self, model: str, takes: object, both: bool):
        problem = "takes pictures and text together" if both else f"takes {takes}"
        super().__init__(
            f"{model}: it {problem}; what is read from files is pictures for a vision model or text for a language model.\n"
            f"  - give one of its towers as a model of its own, or\n"
            f"  - call featcal.calibrate from Python, where batches are whatever the model's forward takes"
        )


class NotFloating(FeatCalError):
    """A weight stored as whole numbers, as quantised checkpoints have them."""

    def __init__(self, place: object, name: str, dtype: object):
        super().__init__(
            f"{place}: {name} is stored as {dtype}, but weights must be floating-point numbers; is this a quantised checkpoint?\n"
            f"  - give the checkpoint it was made from, or write its values as float32, float16 or bfloat16"
        )


class TypesDiffer(TensorsDiffer):
    """One tensor that two models should share is stored in two types."""

    def __init__(self, name: str, here: object, this: object, there: object, that: object):
        short = str(this).removeprefix("torch.")
        FeatCalError.__init__(
            self,
            f"{name}: {this} in {here}, but {that} in {there}; models are merged in one type.\n"
            f"  - save the second one again in the type of the first, with its own class of transformers:\n"
            f"    model = CLIPVisionModel.from_pretrained(folder, dtype={short!r}); model.save_pretrained(new_folder)",
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


class AdapterMisfit(FeatCalError):
    """An adapter whose size is not that of the features, or not what its record says."""

    def __init__(self, place: object, name: str, found: object, expected: object):
        super().__init__(
            f"{place}: {name} is {found}, but {expected} is expected.\n"
            f"  - use adapters with the merged model they were trained behind; rank and width stand in their adapters.json"
        )
