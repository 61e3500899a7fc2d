"""Replace `<!-- generated: NAME -->` in a page by text that is generated from the sources.

Runs when Sphinx reads a page, so no generated text is in the repository and none is out of date.
"""

import re
from pathlib import Path

from reference import api, commands, mergers, messages, params, results, steps

MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
PARTS = {
    "api": api.text,
    "commands": commands.text,
    "mergers": mergers.text,
    "messages": messages.text,
    "params": params.text,
    "results": results.text,
    "steps": steps.text,
}


def fill(app, name, source):
    """Replace the marks of a page."""
    root = Path(app.srcdir).parent
    source[0] = MARK.sub(lambda mark: PARTS[mark[1]](root), source[0])


def always_read(app, env, added, changed, removed):
    """Return the pages with a mark: they depend on sources that Sphinx does not track."""
    return [
        name
        for name in env.found_docs
        if (path := Path(env.doc2path(name))).suffix == ".md" and MARK.search(path.read_text())
    ]


def setup(app):
    app.connect("source-read", fill)
    app.connect("env-get-outdated", always_read)
    return {"parallel_read_safe": True}
