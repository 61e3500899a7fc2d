"""Stage `gather`: copies the small files of one study into results/, which is in git.

A study's own files never vary between two runs; seconds and machine go to <key>.<study>.run.json beside them.
"""

from featcal.errors import UnknownKey
from featcal.storage.atomic import atomic_path
from featcal.storage.results import digests, read_json, write_json
from reproduction.experiments.studies import STUDIES
from reproduction.stages.context import load_context, pick


def run(name: str) -> None:
    """For `samples-clip_b32-8`: every file of outputs/<suite>/samples/clip_b32-8/ as results/<suite>/clip_b32-8.<file>."""
    kind, _, key = name.partition("-")
    if kind not in STUDIES:
        raise UnknownKey("study", kind, list(STUDIES))
    context = load_context()
    pick(kind, context.experiments.studies[kind], key)
    layout = context.layout
    copies = {file: layout.results / f"{key}.{file.name}" for file in sorted(layout.study(kind, key).iterdir())}
    for file, copy in copies.items():
        with atomic_path(copy) as hidden:
            hidden.write_bytes(file.read_bytes())
    record = read_json(layout.run(kind, key)) | {"files": digests(copies.values())}
    write_json(layout.results / f"{key}.{kind}.run.json", record)
