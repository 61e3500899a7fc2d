"""Keeps the book free of the network: drops the launcher that names a CDN, and puts what pages link to inside the site."""

import shutil
from pathlib import Path


def drop_launcher(app, pagename, templatename, context, doctree):
    """Leave out the scripts of thebe, which would start a live kernel from a CDN."""

    def kept(script):
        body = str((getattr(script, "attributes", None) or {}).get("body", ""))
        return "thebe" not in f"{getattr(script, 'filename', script)} {body}".lower()

    context["script_files"] = [script for script in context["script_files"] if kept(script)]


def copy_linked_files(app, error):
    """Copy result files and notebook sources beside the pages, so that their links work wherever the site is put."""
    if error or app.builder.format != "html":
        return
    for folder, ending in (("results", "*/*.*"), ("notebooks", "*.ipynb")):
        source = Path(app.srcdir).parent / folder
        for path in sorted(source.glob(ending)):
            target = Path(app.outdir) / folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def setup(app):
    app.connect("html-page-context", drop_launcher, priority=900)
    app.connect("build-finished", copy_linked_files)
    return {"parallel_read_safe": True}
