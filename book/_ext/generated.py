"""Pages of the reference are written by the sources themselves: `<!-- generated: NAME -->` in a
page becomes what NAME yields.

Runs when Sphinx reads a page, so that nothing generated lies in the repository and nothing can be
out of date.
"""

import re
from pathlib import Path

from reference import api, commands, messages, params, results

MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
PARTS = {
    "api": api.text,
    "commands": commands.text,
    "messages": messages.text,
    "params": params.text,
    "results": results.text,
}


def fill(app, name, source):
    """Put generated text in the place of its mark; `root` is the project that the book belongs
    to.
    """
    root = Path(app.srcdir).parent
    source[0] = MARK.sub(lambda mark: PARTS[mark[1]](root), source[0])


def always_read(app, env, added, changed, removed):
    """Pages with a mark depend on sources that Sphinx does not know of, so every build reads
    them.
    """
    return [
        name
        for name in env.found_docs
        if (path := Path(env.doc2path(name))).suffix == ".md" and MARK.search(path.read_text())
    ]


def setup(app):
    app.connect("source-read", fill)
    app.connect("env-get-outdated", always_read)
    return {"parallel_read_safe": True}
