"""Keep the book free of the network: drop scripts from a CDN, copy linked files into the site.

Also fixes markup of the builder that a screen reader cannot follow, and lets search find a table or
figure by its number.
"""

import re
import shutil
from importlib import resources
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform


class PlaceIndex(SphinxTransform):
    """Index a page called "Table 10: …" by "Table 10": search skips numbers in texts."""

    default_priority = 800  # before the index is read

    def apply(self, **kwargs):
        title = next(self.document.findall(nodes.title), None)
        name = title.astext().partition(":")[0] if title else ""
        if re.fullmatch(r"(Table|Figure) \d+", name):
            entry = ("single", name, title.parent["ids"][0], "main", None)
            title.parent.insert(1, addnodes.index(entries=[entry]))


def fix_list(app, pagename, templatename, context, doctree):
    """Remove the list role of the bibliography; its entries have roles of their own."""
    context["body"] = context.get("body", "").replace(
        '<div role="list" class="citation-list">', '<div class="citation-list">'
    )


def drop_launcher(app, pagename, templatename, context, doctree):
    """Remove the scripts of thebe, which would start a live kernel from a CDN."""

    def kept(script):
        body = str((getattr(script, "attributes", None) or {}).get("body", ""))
        return "thebe" not in f"{getattr(script, 'filename', script)} {body}".lower()

    context["script_files"] = [script for script in context["script_files"] if kept(script)]


def fix_search_page(app, error):
    """Give the field of the search page its own id; the theme's hidden field has the same one."""
    page = Path(app.outdir) / "search.html"
    if error or not page.is_file():
        return
    hidden, name, rest = page.read_text("utf-8").partition('id="search-input"')
    page.write_text(
        hidden + name + rest.replace(name, 'id="search-page-input"') if name else hidden, "utf-8"
    )


def copy_linked_files(app, error):
    """Copy result files and notebook sources into the site, so that links to them work."""
    if error or app.builder.format != "html":
        return
    for folder, ending in (("results", "**/*.*"), ("notebooks", "*.ipynb")):
        source = Path(app.srcdir).parent / folder
        for path in sorted(source.glob(ending)):
            target = Path(app.outdir) / folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def copy_plotly(app, error):
    """Copy plotly.js from the installed package into the site."""
    if error or app.builder.format != "html":
        return
    source = resources.files("plotly").joinpath("package_data", "plotly.min.js")
    (Path(app.outdir) / "_static" / "plotly.min.js").write_bytes(source.read_bytes())


def setup(app):
    app.add_transform(PlaceIndex)
    app.connect("html-page-context", drop_launcher, priority=900)
    app.connect("html-page-context", fix_list)
    app.connect("build-finished", fix_search_page)
    app.connect("build-finished", copy_linked_files)
    app.connect("build-finished", copy_plotly)
    return {"parallel_read_safe": True}
