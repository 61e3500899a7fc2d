"""`featcal convert`: convert a CLIP model folder between transformers and open_clip."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from featcal.cli import options
from featcal.cli.inputs import FOLDER
from featcal.cli.output import new_folder, require_space, say, say_json, stored_bytes
from featcal.settings import require

MODEL = "Model folder of transformers or open_clip."
CLIP = "Whole CLIP that provides the text tower, if MODEL is a vision model only."
TOKENIZERS = ("tokenizer.json", "vocab.json")
EPILOG = """Examples:

featcal convert open_clip_folder --out transformers_folder

featcal convert calibrated --clip base --out open_clip_folder"""


def convert(
    source: Annotated[Path, Argument(**FOLDER, help=MODEL)],
    out: Annotated[Path, Option(help="Folder to write, in the other format.")],
    clip: Annotated[Path | None, Option(**FOLDER, help=CLIP)] = None,
    as_json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Convert a CLIP model between transformers and open_clip. A round trip is bit-exact."""
    new_folder(out, force, [source] if clip is None else [source, clip])
    require_space("--out", out, stored_bytes(source))
    from featcal.interchange.open_clip import is_open_clip, to_open_clip, to_transformers

    form = "transformers" if is_open_clip(source) else "open_clip"
    if form == "open_clip":
        to_open_clip(source, out, clip)
        more = f'; load it: open_clip.create_model("local-dir:{out}")'
    else:
        expected = "is not needed: an open_clip folder has both towers"
        require(clip is None, "--clip", str(clip), expected)
        to_transformers(source, out)
        lacks = "; it has no tokenizer, and featcal evaluate needs CLIP's tokenizer files in it"
        more = "" if any((out / name).is_file() for name in TOKENIZERS) else lacks
    if as_json:
        say_json({"folder": str(out), "form": form})
    else:
        say(f"{form} folder: {out}{more}")
