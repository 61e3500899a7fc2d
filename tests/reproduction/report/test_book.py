"""The book: it builds without a warning, and every page works in a browser without a network."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlparse

import browser as browsers
import nbformat
import pytest
import yaml

from pipeline import NOTEBOOKS, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the pages that git holds, built as `make book` does in a fresh clone."""
    root = tmp_path_factory.mktemp("book")
    ignored = shutil.ignore_patterns("_build", "__pycache__")
    for name in ("results", "notebooks", "book", "suites", "pipeline", "featcal"):
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("CHANGELOG.md", "params.yaml"):
        shutil.copyfile(ROOT / name, root / name)
    program = str(Path(sys.executable).with_name("jupyter-book"))
    command = [program, *"build -W -n --keep-going --quiet book".split()]
    built = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    return (root / "book" / "_build" / "html").resolve()


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browsers.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def pages_of(site):
    return sorted(p for p in site.rglob("*.html") if "_static" not in p.parts)


def test_every_page_of_the_table_of_contents_is_built(site):
    contents = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text())
    chapters = [chapter for part in contents["parts"] for chapter in part["chapters"]]
    names = {contents["root"], *(chapter["file"] for chapter in chapters)}
    assert all((site / f"{name}.html").is_file() for name in names)
    assert {f"pages/{name}" for name in NOTEBOOKS} <= names


def test_no_page_names_another_host_for_anything_it_loads(site):
    for page in pages_of(site):
        text = page.read_text()
        loaded = r'(?:src|href)="(?:https?:)?//[^"]+\.(?:js|css|woff2?|png|svg)'
        assert not re.findall(loaded, text), page.name
        scripts = " ".join(re.findall(r"<script.*?</script>", text, flags=re.DOTALL))
        assert not re.findall(r"https?://", scripts), page.name


class Page(HTMLParser):
    """The ids of a page and the addresses it names."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        self.links += [values[name] for name in ("href", "src") if values.get(name)]


def broken(site, pages):
    """Return `page: address` for every address inside the site that leads nowhere."""
    read, result = {page: Page(page) for page in pages}, []
    for path, page in read.items():
        for link in dict.fromkeys(page.links):
            parts = urlparse(link)
            if parts.scheme or parts.netloc:
                continue
            target, anchor = (path.parent / unquote(parts.path)).resolve(), unquote(parts.fragment)
            target = target if parts.path else path
            exists = target.is_file() and target.is_relative_to(site)
            if not exists or (anchor and target in read and anchor not in read[target].ids):
                result.append(f"{path.relative_to(site)}: {link}")
    return result


def test_no_link_of_the_site_leads_nowhere(site):
    assert broken(site, pages_of(site)) == []


def test_the_link_test_can_fail(tmp_path):
    links = '<a href="b.html#there"> <a href="#gone"> <a href="https://c">'
    (tmp_path / "a.html").write_text(links)
    (tmp_path / "b.html").write_text('<h1 id="there"> <a href="a.html#there"> <img src="no.svg">')
    result = broken(tmp_path, sorted(tmp_path.glob("*.html")))
    assert result == ["a.html: #gone", "b.html: a.html#there", "b.html: no.svg"]


def test_plots_are_vector_graphics():
    for name in set(NOTEBOOKS) - {"figure4"}:  # which shows damaged pictures
        page = nbformat.read(ROOT / "book/pages" / f"{name}.ipynb", as_version=4)
        shown = [output for cell in page.cells for output in cell.get("outputs", [])]
        data = [output.get("data", {}) for output in shown]
        assert not any("<image" in formats.get("image/svg+xml", "") for formats in data), name
        assert name == "differences" or not {"image/png", "image/jpeg"} & set().union(*data), name


def test_generated_pages_are_filled(site):
    assert "anchor_blend" in (site / "reference/api.html").read_text()
    assert not [page.name for page in pages_of(site) if "generated:" in page.read_text()]


@pytest.mark.browser
def test_all_claims_are_filtered_by_verdict_and_words(site, window):
    page = site / "pages" / "scoreboard.html"
    written = re.search(r"<table class=\"fc fc-claims.*?</table>", page.read_text(), re.DOTALL)
    assert " hidden" not in written[0]  # without scripts
    shown = "return [...document.querySelectorAll('table.fc-filtered tbody tr')].filter(row => !row.hidden).length"
    window.look(page, 1280)
    of = "return document.querySelectorAll('table.fc-filtered tbody tr{}').length".format
    others = ("does-not-hold", "within-noise", "one-run", "vacuous", "not-run")
    other = "".join(f":not(.fc-is-{word})" for word in others)  # a row has one of every source
    window.run("document.querySelector('.fc-filter [value=holds]').click()")
    assert 0 < window.run(shown) == window.run(of("")) - window.run(of(other)) < window.run(of(""))
    window.look(page, 1280, "?verdict=holds")
    assert window.run(shown) == window.run(of(".fc-is-holds"))
    window.run(
        "const field = document.querySelector('.fc-filter [type=search]'); field.value = 'nowhere';"
        "field.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert window.run(shown) == 0
    assert window.run("return document.querySelector('.fc-filter output').value").startswith("0 of")


@pytest.mark.browser
def test_a_figure_tells_values_by_hovering_and_stands_still_without_scripts(site, window):
    page = site / "pages/figure5.html"
    window.look(page, 1280)
    text = window.wait(
        "const box = document.querySelector('.fc-chart.js-plotly-plot');"
        "if (box) Plotly.Fx.hover(box, [{curveNumber: 0, pointNumber: 1}]);"
        "return box && box.querySelector('.hoverlayer .hovertext')?.textContent"
    )
    data = (ROOT / "book/pages/figure5.ipynb").read_text()
    assert text and text.split(" %")[0].split()[-1] in data
    hidden = "return [...document.querySelectorAll('.fc-still')].every(one => !one.offsetParent)"
    assert window.run(hidden)
    assert "fc-still" not in page.read_text() and "fc-chart" not in page.read_text()


@pytest.mark.browser
@pytest.mark.parametrize(
    ("query", "page", "first"),
    [
        ("ridge", "reference/commands", None), ("Table 10", "pages/table10", 1),
        ("Table 1", "pages/table01", 1), ("Figure 5", "pages/figure5", 1),
    ],
)  # fmt: skip
def test_search_works_without_a_network(site, window, query, page, first):
    """Search leads to the page, for a table or figure with its first result."""
    window.look(site / "search.html", 1280, f"?q={quote(query)}")
    script = (
        "[...document.querySelectorAll('#search-results li a')].map(a => a.getAttribute('href'))"
    )
    links = window.wait(f"const found = {script}; return found.length ? found : null") or []
    assert any(page in link for link in links[:first])
    assert all(urlparse(url).scheme in ("file", "data") for url in window.requests())


@pytest.mark.browser
def test_every_page_works_in_a_browser_wide_and_narrow_and_axe_finds_nothing_serious(site, window):
    # the index only leads to the landing page
    pages = [page for page in pages_of(site) if page != site / "index.html"]
    assert len(pages) >= 8
    for page in pages:
        name = str(page.relative_to(site))
        window.look(page, 1280)
        for scheme in ("light", "dark"):
            assert window.colours(scheme) == scheme, name
            assert window.audit(scheme) == [], f"{name}, {scheme}"
        for width in (1280, 390):  # a narrow page has the same texts and colours
            window.resize(width)
            # charts follow in a moment
            fits = window.wait(f"return document.documentElement.scrollWidth <= {width}")
            assert fits, f"{name} scrolls sideways at {width} px"
        assert window.run(browsers.BROKEN) == [], f"{name}: broken images"
        assert window.run(browsers.RAW) == [], f"{name}: formulas that were not drawn"
        assert window.complaints() == [], f"{name}: errors on the console"
        local = ("file", "data", "blob", "about", "chrome")
        outside = [url for url in window.requests() if urlparse(url).scheme not in local]
        assert outside == [], f"{name} asks the network"


@pytest.mark.browser
def test_the_browser_test_can_fail(window, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<html><body><main><article style="width:2000px"><p style="color:#eee">faint</p><span class="math">\\(x\\)</span>'
        '<img src="missing.png"></article></main><script>console.error("broken"); fetch("http://127.0.0.1:9/")</script></body></html>'
    )
    window.look(bad, 390)
    assert any("color-contrast" in found and "faint" in found for found in window.audit())
    assert window.run(browsers.BROKEN) and len(window.run(browsers.RAW)) == 2
    assert window.run("return document.documentElement.scrollWidth") > 390
    assert any("127.0.0.1" in unquote(url) for url in window.requests()) and window.complaints()
