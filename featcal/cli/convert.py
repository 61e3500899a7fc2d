"""`featcal convert`: convert a CLIP model folder between transformers and open_clip."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from featcal.cli import options
from featcal.cli.inputs import model_folder
from featcal.cli.output import new_folder, require_space, say, say_json, stored_bytes
from featcal.errors import BadFile, TensorsDiffer
from featcal.files import atomic_folder, read_json
from featcal.settings import require

CLIP = "Whole CLIP that provides the text tower, if MODEL is a vision model only."
TOKENIZERS = ("tokenizer.json", "vocab.json")
EPILOG = """Examples:

featcal convert open_clip_folder --out transformers_folder

featcal convert calibrated --clip base --out open_clip_folder"""


def convert(
    model: Annotated[str, Argument(**options.MODEL, help="Folder of transformers or open_clip.")],
    out: Annotated[Path, Option(help="Folder to write, in the other format.")],
    clip: Annotated[str | None, Option(**options.MODEL, help=CLIP)] = None,
    as_json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Convert a CLIP model between transformers and open_clip, in float32 and without rounding."""
    source, clip_folder = model_folder("MODEL", model), clip and model_folder("--clip", clip)
    new_folder(out, force, [source, clip_folder] if clip_folder else [source])
    require_space("--out", out, stored_bytes(source))
    from featcal.interchange.open_clip import CONFIG, processor_of, read_open_clip, write_open_clip
    from featcal.models.load import load_clip, load_vision, save_model

    is_open_clip, is_transformers = ((source / name).is_file() for name in (CONFIG, "config.json"))
    if is_open_clip and is_transformers:
        way_out = f"use it as it is, or give a folder with only one of {CONFIG} and config.json"
        raise BadFile(source, "already holds both open_clip's and transformers' form", way_out)
    form, more = ("transformers" if is_open_clip else "open_clip"), ""
    if is_open_clip:
        expected = "is not needed: an open_clip folder has both towers"
        require(clip_folder is None, "--clip", clip, expected)
        clip_model: Any = read_open_clip(source)
        preprocess = read_json(source / CONFIG).get("preprocess_cfg") or {}
        size = clip_model.config.vision_config.image_size
        processor = processor_of(preprocess, size, source / CONFIG)
        with atomic_folder(out) as folder:
            save_model(clip_model, folder, like=source)
            processor.save_pretrained(folder)
        if not any((out / name).is_file() for name in TOKENIZERS):
            more = "; it has no tokenizer, and featcal evaluate needs CLIP's tokenizer files in it"
    else:
        clip_model = load_clip(clip_folder or source)
        if clip_folder is not None:  # its vision tower is replaced
            vision = load_vision(source)
            widths = [part.config.hidden_size for part in (vision, clip_model.vision_model)]
            if widths[0] != widths[1]:
                raise TensorsDiffer("vision width", source, widths[0], clip_folder, widths[1])
            clip_model.vision_model, clip_model.config.vision_config = vision, vision.config
        with atomic_folder(out) as folder:  # which replaces models of either form
            write_open_clip(clip_model, folder, like=clip_folder or source)
        more = f'; load it: open_clip.create_model("local-dir:{out}")'
    if as_json:
        say_json({"folder": str(out), "form": form})
    else:
        say(f"{form} folder: {out}{more}")
