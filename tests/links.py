"""Links inside a built site: every address must be a file, and every anchor an id there."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The ids of one page and the addresses it names."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]


def broken(site: Path, pages: list[Path]) -> list[str]:
    """Return `page: address` for every address inside the site that leads nowhere."""
    read = {page.resolve(): Page(page) for page in pages}
    found = []
    for path, page in read.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            known = target.is_file() and target.is_relative_to(site.resolve())
            if not known or (anchor and target in read and anchor not in read[target].ids):
                found.append(f"{path.relative_to(site.resolve())}: {link}")
    return found
