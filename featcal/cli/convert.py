"""`featcal convert`: a CLIP model folder of transformers to open_clip's form, or the other way
round.
"""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from featcal.cli import options
from featcal.cli.evaluate import TOKENIZERS
from featcal.cli.options import existing_folder, new_folder, require_space, stored_bytes
from featcal.cli.terminal import Json, Quiet, say, say_json

EPILOG = """Examples:

featcal convert open_clip_folder --out transformers_folder

featcal convert calibrated --clip base --out open_clip_folder"""


def convert(
    source: Annotated[
        Path,
        Argument(
            help="Folder with config.json (transformers) or open_clip_config.json (open_clip)."
        ),
    ],
    out: Annotated[Path, Option(help="Folder to write, in the other form.")],
    clip: Annotated[
        Path | None,
        Option(
            help="To open_clip, where SOURCE is a vision model: the whole CLIP that lends its text tower."
        ),
    ] = None,
    force: options.Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rewrite a CLIP between transformers' and open_clip's form; the weights stay the same to the
    bit.
    """
    existing_folder("SOURCE", source)
    whole = None if clip is None else existing_folder("--clip", clip)
    new_folder(out, force, [source] if whole is None else [source, whole])
    require_space("--out", out, stored_bytes(source))
    from featcal.errors import BadSetting
    from featcal.interchange.open_clip import is_open_clip, to_open_clip, to_transformers

    if not is_open_clip(source):
        to_open_clip(source, out, whole)
        if as_json:
            return say_json({"folder": str(out), "form": "open_clip"})
        return say(
            f'in open_clip\'s form: {out}; open_clip.create_model("local-dir:{out}") loads it'
        )
    if whole is not None:
        raise BadSetting(
            "--clip",
            str(clip),
            "is of no use here: SOURCE is in open_clip's form and has both towers",
        )
    to_transformers(source, out)
    if as_json:
        return say_json({"folder": str(out), "form": "transformers"})
    say(f"in transformers' form: {out}")
    if not any((out / name).is_file() for name in TOKENIZERS):
        say(
            "no tokenizer lay beside it; featcal evaluate needs CLIP's tokenizer files in the folder"
        )
