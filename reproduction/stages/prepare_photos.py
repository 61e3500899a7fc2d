"""Stage `prepare_photos`: the real images of every task."""

from featcal.files import atomic_folder
from reproduction.engine.context import load_context
from reproduction.prepare.photos import write_photos


def run() -> None:
    """Write outputs/<suite>/photos/."""
    context = load_context()
    photos, out = context.suite.photos, context.layout.outputs / "photos"
    with context.recorded("prepare_photos", None):
        if not photos.roles:
            context.not_run("prepare_photos", out)
            return
        with atomic_folder(out) as folder:
            tasks = max(photos.pools.values(), key=len)
            write_photos(context.layout.root / photos.folder, tasks, folder)
