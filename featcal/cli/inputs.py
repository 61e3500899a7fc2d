"""The models and samples that options name, all checked before any work.

Base and experts come from options, a recipe or the record of the merged folder.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from featcal.card import RECORD, read_record
from featcal.cli import options
from featcal.cli.output import note
from featcal.errors import BadFile, BadPlan, BadSetting, FeatCalError, MissingPath, UnknownKey
from featcal.files import read_json, write_json
from featcal.interchange.mergekit import WRITTEN, Recipe, read_recipe, recipe_in
from featcal.models.checkpoint import is_adapter, modules_of, require_config
from featcal.settings import require

if TYPE_CHECKING:
    from torch import Tensor

    from featcal.data.batches import Draw, DrawnBatches
    from featcal.data.places import Location
    from featcal.models.plan import BlockPlan

T = TypeVar("T")
PROMPT = ["a photo of a {}."]
CONFIGURATION = ["*.json", "*.txt", "*.model", "*.jinja", "*.yml", "README.md"]
CONFIGURATION += ["*.spm", "bpe.codes"]  # tokenizers of Marian and XLM
HUB_MODEL = re.compile(r"(?P<name>(?!\.)[\w.-]+/(?!\.)[\w.-]+)(@(?P<revision>[\w./-]+))?")


class MistakeCollector:
    """Collect the mistakes of several arguments; a call that makes one returns None."""

    def __init__(self) -> None:
        self.mistakes: list[FeatCalError] = []

    def __call__(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T | None:  # noqa: D102
        try:
            return function(*arguments, **named)
        except FeatCalError as mistake:
            self.mistakes.append(mistake)
            return None

    def report(self) -> None:
        """Raise the mistakes, if there are any."""
        if self.mistakes:
            raise FeatCalError("\n".join(dict.fromkeys(map(str, self.mistakes))))


@dataclass(frozen=True)
class Inputs:
    """Folders of models, and samples by expert; `adapter_bases` are the models of LoRA experts."""

    merged: Path
    base: Path
    experts: Mapping[str, Path]
    adapter_bases: Mapping[str, Path] = field(default_factory=dict)
    data: "Mapping[str, Location]" = field(default_factory=dict)

    @property
    def configured(self) -> dict[str, Path]:
        """Return the folders with the experts' config.json, by the name that errors use."""
        return {f"expert {n!r}": self.adapter_bases.get(n, f) for n, f in self.experts.items()}

    @property
    def folders(self) -> list[Path]:
        """Return every folder and file that is read."""
        models = [self.merged, self.base, *self.experts.values(), *self.adapter_bases.values()]
        sources = (location.source for location in self.data.values())
        return models + [source for source in sources if isinstance(source, Path)]


def model_folder(named_by: str, name: str, near: Path | None = None, weights: bool = True) -> Path:
    """Return a model's folder, from `near`, here or the hub; without `weights` its configuration."""
    require(isinstance(name, str), named_by, name, "must name a model")  # in a record
    folder = Path(os.path.expanduser(name))  # no shell does; Path.expanduser raises for ~nobody
    require(not folder.is_file(), named_by, str(folder), "names a file; give the folder of it")
    if near is not None and (near / folder).is_dir():
        folder = Path(os.path.relpath((near / folder).resolve()))
    if folder.is_dir():
        modules_of(folder)  # names an old layout, whose config.json is in a sub-folder
        require_config(folder, named_by)
        return folder
    searched = f"searched {f'in {near} and ' if near else ''}in the current folder"
    if (hub := HUB_MODEL.fullmatch(str(name))) is None:
        way_out = "check the path; a model of the hub is owner/name or owner/name@revision"
        raise MissingPath(folder, f"given with {named_by}; {searched}", way_out)
    from huggingface_hub import snapshot_download

    from featcal.data.places import reaching

    files = CONFIGURATION + (["*.safetensors"] if weights else [])
    with reaching(hub["name"], hub["revision"], f"; given with {named_by}; {searched} before"):
        return Path(snapshot_download(hub["name"], revision=hub["revision"], allow_patterns=files))


def named(option: str, pairs: options.Pairs, form: str, find: Callable[..., T]) -> dict[str, T]:
    """Return `find(option, value)` of each `name=value` argument by name, without None."""
    values = options.pairs_by_name(option, pairs, form).items()
    return {name: result for name, value in values if (result := find(option, value)) is not None}


def named_data(pairs: options.Pairs, collect: MistakeCollector) -> "dict[str, Location]":
    """Return the `--data` arguments: files, folders or datasets of the hub."""
    if not pairs:
        return {}
    from featcal.data.places import location_of

    return collect(named, "--data", pairs, "NAME=PATH", partial(collect, location_of)) or {}


def read_inputs(
    merged: str | None,
    base: str | None,
    expert: options.Pairs,
    data: options.Pairs = None,
    recipe: Path | None = None,
    *,
    weights: bool = True,  # False if the configuration of models on the hub is enough
    needs_base: bool = True,  # False if the merged model can replace a base that is not known
    named_by: str = "--merged",
    collect: MistakeCollector | None = None,  # may hold mistakes already
) -> Inputs:
    """Return the inputs of a command. Raises: one FeatCalError with all mistakes."""
    collect = collect or MistakeCollector()
    find = partial(collect, partial(model_folder, weights=weights))
    folder = find(named_by, merged) if merged else None
    origin = find("--base", base) if base else None
    experts = collect(named, "--expert", expert, "NAME=MODEL", find) or {}
    datasets = named_data(data, collect)
    adapter_bases: dict[str, Path] = {}
    to_read = recipe or (folder and not (base and expert))
    names = collect(names_in, folder, recipe) if to_read else None
    if names is not None:
        recorded = partial(find, str(names.file), near=names.file.parent)
        if origin is None and names.base:
            origin = recorded(names.base)
        elif origin is None and needs_base:
            way_out = "save the model they were fine-tuned from and name it with --base FOLDER"
            collect.mistakes.append(BadFile(names.file, names.no_base, way_out))
        if not expert:
            for name, (*model, last) in names.experts.items():
                experts[name] = recorded(last)
                for adapted in model:
                    adapter_bases[name] = recorded(adapted)
    elif not collect.mistakes:
        needed = (("--base", base or not needs_base), ("--expert", expert))
        if missing := [option for option, value in needed if not value]:
            problem = f"must be given: {merged} holds no featcal.json or recipe that names them"
            way_out = f"name them, or put mergekit's recipe there as {WRITTEN}"
            collect.mistakes.append(FeatCalError(", ".join(missing), problem, way_out))
    collect.report()
    if folder and origin and records_models(origin) and not records_models(folder):
        note(f"{origin} was merged itself, {folder} may not be: are base and merged model swapped?")
    origin = origin or folder
    assert origin is not None
    adapter_bases = {n: origin for n, f in experts.items() if is_adapter(f)} | adapter_bases
    if names is not None:
        shown = ", ".join(f"{name}={path}" for name, path in experts.items())
        note(f"{names.file}{' and options' * bool(base or expert)}: base {origin}; experts {shown}")
    inputs = Inputs(folder or origin, origin, experts, adapter_bases, datasets)
    for model in dict.fromkeys((inputs.base, inputs.merged, *inputs.configured.values())):
        collect(check_config, model)
    for what, sources in {"the weights": experts, "samples": datasets}.items():
        for source in dict.fromkeys(sources.values()):
            if len(same := [name for name in sources if sources[name] == source]) > 1:
                note(f"{', '.join(same)}: {what} of all come from {source.name}")
    if data:
        collect.mistakes += [UnknownKey("--data", n, experts) for n in datasets if n not in experts]
        if lacking := [f"--data {name}=PATH" for name in experts if name not in datasets]:
            expected = f"must name samples of every expert: add {', '.join(lacking)}"
            collect.mistakes.append(BadSetting("--data", ", ".join(datasets) or None, expected))
    collect.report()
    return inputs


def read_compared(
    model: Iterable[str],
    base: str | None,
    expert: options.Pairs,
    data: Iterable[str],
    recipe: Path | None,
) -> tuple[dict[str, Path], Inputs]:
    """Return models by name, any of which may record base and experts, and inputs of the first."""
    collect = MistakeCollector()
    models = collect(named, "--model", model, "NAME=MODEL", partial(collect, model_folder)) or {}
    first = next(iter(models.values()), None)
    recording = next(filter(records_models, models.values()), first)
    arguments: Any = recording and str(recording), base, expert, data, recipe
    inputs = read_inputs(*arguments, needs_base=False, collect=collect)
    for folder in sorted({*models.values()} - {inputs.base, inputs.merged}):  # these are checked
        check_config(folder)
    if inputs.base == recording:  # taken for the base, which is not known
        reason = ", ".join(f"{name!r} is a LoRA adapter of it" for name in inputs.adapter_bases)
        sizes = {f"model {n!r}": f for n, f in models.items()} | inputs.configured
        if not reason and base is None and (listed := differing_vocabularies(sizes)):
            reason = f"vocabularies differ in size ({listed})"
        if reason:
            raise BadSetting("--base", None, f"must be given: {reason}")
    return models, replace(inputs, merged=first)


def names_in(folder: Path | None, recipe: Path | None = None) -> Recipe | None:
    """Return base and experts as the recipe names them, else as the folder records them."""
    if folder and not recipe:
        record, recipe = read_record(folder), recipe_in(folder)
        if "experts" in record and "base" in record:
            experts = {task: (model,) for task, model in record["experts"].items()}
            return Recipe(folder / RECORD, record["base"], experts)
    return read_recipe(recipe) if recipe else None


def records_models(folder: Path) -> bool:
    """Return whether a merged folder says what it was merged from."""
    return "experts" in read_record(folder) or recipe_in(folder) is not None


def check_config(folder: Path) -> None:
    """Check that config.json names a class and no quantisation; note code that is not run."""
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    named = isinstance(config, dict) and isinstance(config.get("architectures"), list)
    special = not (named and config["architectures"]) or config.get("auto_map")
    if not special and "quantization_config" not in str(config):
        return  # without the import of transformers
    from featcal.models.load import model_class, refuse_code

    kind = model_class(folder)  # raises if there is none
    if code := refuse_code(folder):
        used = f"transformers' own {kind.__name__} is used"
        note(f"{path}: auto_map names {code[0]}, which is not run; {used}")


def differing_vocabularies(folders: Mapping[str, Path]) -> str:
    """Return the number of tokens that each model's config.json states; "" if all agree."""
    stated = {n: read_json(f / "config.json").get("vocab_size") for n, f in folders.items()}
    sizes = {name: size for name, size in stated.items() if isinstance(size, int)}
    listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return listed if len(set(sizes.values())) > 1 else ""


@dataclass(frozen=True)
class Request:
    """Models and samples of one command; `draw` says how samples are drawn."""

    inputs: Inputs
    keys: options.SamplingAndBlocks
    draw: "Draw"
    device: str
    classes: Mapping[str, list[str]]  # by task, those that are given

    @cached_property
    def student(self) -> Any:
        """Return the merged model without weights."""
        from featcal.models.stored import skeleton

        return skeleton(self.inputs.merged)

    @cached_property
    def plan(self) -> "BlockPlan":
        """Return the blocks to calibrate."""
        return plan_with(self.student, self.keys.stack)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return how many samples each task has; the data are read once."""
        from featcal.data.batches import samples_at
        from featcal.data.texts import input_of

        inputs, collect = input_of(self.student), MistakeCollector()
        load = partial(collect, samples_at, inputs=inputs, draw=self.draw)
        counts = {task: len(load(location) or ()) for task, location in self.inputs.data.items()}
        collect.report()
        return counts

    def labels(self, experts: Mapping[str, Path]) -> "dict[str, Tensor]":
        """Return vectors (K, d) of the given classes, by the expert or a CLIP's text tower."""
        if not self.classes:
            return {}
        from featcal.data.texts import input_of, reader_for
        from featcal.evaluation.accuracy import TextModel, answer_method, vectors, zero_shot_head
        from featcal.models.load import load_clip, load_model, load_tokenizer
        from featcal.models.sentences import Sentences

        merged, base, model_input = self.inputs.merged, self.inputs.base, input_of(self.student)
        if model_input.kind == "pictures":
            expected = "must be the whole CLIP, whose text tower makes the vectors of --classes"
            clip_folder = whole_clip([merged, base], "--base", str(base), expected)
            clip, tokenizer = load_clip(clip_folder), load_tokenizer(clip_folder)
            P = clip.visual_projection.weight.detach()  # (p, d)
            classes = self.classes.items()
            return {t: zero_shot_head(clip, tokenizer, names, PROMPT) @ P for t, names in classes}
        expected = "is for encoders; this model has a head, whose answers are compared"
        require(answer_method(self.student) == "vectors", "--classes", [*self.classes], expected)
        labels = {}
        for task in experts.keys() & self.classes.keys():
            folder = experts[task]
            reader = reader_for([base, merged], model_input, self.draw.tokens, folder)
            model, sentences = load_model(folder), Sentences.or_mean(folder)
            encoder = TextModel(model, reader, self.draw.batch, sentences)
            labels[task] = vectors(encoder, self.classes[task])
        return labels

    def draws(self, samples: int | None) -> "dict[str, Draw]":
        """Return each task's draw of so many samples, else of the default or all there are."""
        if samples:
            return dict.fromkeys(self.inputs.data, self.draw)
        first, most = self.draw.skip, options.DEFAULT_SAMPLES
        return {task: self.rest(task, first, most) for task in self.inputs.data}

    def rest(self, task: str, skip: int | None, most: int, least: int = 1, tip: str = "") -> "Draw":
        """Return the draw of at most `most` samples after the first `skip`. Raises: BadSetting."""
        count, source, out = self.counts[task], str(self.inputs.data[task].source), skip or 0
        expected = f"must have {out + least} samples or more, {out} to leave out; it has {count}"
        require(count - out >= least, f"--data {task}", source, expected + tip)
        return replace(self.draw, skip=skip, samples=min(most, count - out))

    def record(self, out: Path, draws: "Mapping[str, Draw]", **more: Any) -> None:
        """Record which samples made a folder, and how many there were."""
        record = read_record(out) | more | {"seed": self.draw.seed, "split": self.draw.split}
        record["samples"] = {task: draw.samples for task, draw in sorted(draws.items())}
        record["rows"] = dict(sorted(self.counts.items()))
        write_json(out / RECORD, dict(sorted(record.items())))

    def batches(self, draws: "Mapping[str, Draw]", *models: Path) -> "dict[str, DrawnBatches]":
        """Return the batches of each draw; `models` may also have the processor or tokenizer."""
        from featcal.data.batches import draw_batches

        folders, collect = (self.inputs.base, self.inputs.merged, *models), MistakeCollector()
        batches: dict[str, DrawnBatches] = {}
        for task, draw in sorted(draws.items()):
            locations = {task: self.inputs.data[task]}
            task_draw = replace(draw, expert=self.inputs.experts[task])
            batches |= collect(draw_batches, self.student, folders, locations, task_draw) or {}
        collect.report()
        return batches


def whole_clip(folders: Iterable[Path], option: str, value: object, expected: str) -> Path:
    """Return the first CLIP with both towers. Raises: BadSetting."""
    for folder in folders:
        if read_json(folder / "config.json").get("architectures") == ["CLIPModel"]:
            return folder
    raise BadSetting(option, value, expected)


@contextmanager
def whole_experts(inputs: Inputs, work: Path, mine: Collection[str]) -> Iterator[dict[str, Path]]:
    """Yield the experts' folders, with LoRA experts among `mine` as whole models in `work`.

    They are removed afterwards, unless `work` holds finished blocks of a run that can continue.
    """
    from featcal.calibration.scratch import holds_blocks
    from featcal.models.lora import dense_folder

    numbered = enumerate(inputs.adapter_bases)  # a name may hold a slash
    dense = {name: work / "experts" / str(number) for number, name in numbered if name in mine}
    try:
        for name, folder in dense.items():
            note(f"{name}: adding the adapter to {inputs.adapter_bases[name]}")
            dense_folder(inputs.adapter_bases[name], inputs.experts[name], folder)
        yield {**inputs.experts, **dense}
    finally:
        if dense and not holds_blocks(work):
            for folder in dense.values():
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # another process needs it
                (work / "experts").rmdir()
                work.rmdir()


def plan_with(model: Any, paths: Sequence[str] | None) -> "BlockPlan":
    """Return the model's plan, or one of the named lists of blocks."""
    from torch.nn import ModuleList

    from featcal.models.plan import BlockPlan, Stack, blocks_of, plan_for

    try:
        stacks = (Stack(path.replace(".", "_"), path) for path in paths or ())
        plan = BlockPlan(*stacks) if paths else plan_for(model)
        for stack in plan.stacks:
            blocks_of(model, stack)
    except BadPlan as error:
        lists = [n for n, part in model.named_modules() if isinstance(part, ModuleList) and part]
        listed = ", ".join(lists) or "there is none"
        choices = f"name one with featcal calibrate --set stack=PATH: {listed}"
        raise BadPlan(type(model).__name__, error.problem, choices) from None
    return plan
