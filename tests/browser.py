"""A headless Chromium for tests of the book; without one a test fails (make test installs it)."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --allow-file-access-from-files"
).split()

BROKEN = "return [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
RAW = """
const all = (where) => [...document.querySelectorAll(where)], start = e => e.textContent.slice(0, 40);
const bare = all('.math').filter(e => !e.querySelector('mjx-container')).map(start);
const failed = all('mjx-merror, [data-mml-node="merror"]').map(start);
const words = document.querySelector('main, body').innerText.match(/\\\\\\(|\\\\\\[|\\$\\$|\\{cite|\\{eq\\}/g) || [];
return [...bare, ...failed, ...words];
"""
REPAINTED = """
const done = arguments[arguments.length - 1], wanted = arguments[0], end = performance.now() + 2000;
const look = () => { const theme = document.documentElement.dataset.theme;
                     theme === wanted || performance.now() > end ? setTimeout(() => done(theme), 20) : setTimeout(look, 10) };
look();
"""
# Contrast is the rule that takes a browser long. It looks at one text of each kind on all pages: a
# kind is how the text and all around it are named and styled, and whether it is in an even row.
KINDS = """
const kinds = new Map(), all = [...document.body.querySelectorAll('*')];
const parity = e => e.tagName === 'TR' ? [...e.parentElement.children].indexOf(e) % 2 : '';
const name = e => [e.tagName, parity(e), e.getAttribute('class'), e.getAttribute('style')].join();
const kind = e => e === document.body ? '' : kind(e.parentElement) + '>' + name(e);
const told = e => e.matches('input, select, textarea') || [...e.childNodes].some(c => c.nodeType === 3 && c.data.trim());
for (const e of all.filter(e => e.checkVisibility() && told(e))) {
  const own = kind(e);
  if (!kinds.has(own)) kinds.set(own, e);
}
window.kinds = [...kinds.values()];
return [...kinds.keys()];
"""
MARK = "kinds.forEach((e, i) => e.toggleAttribute('data-audited', arguments[0].includes(i)))"
AUDIT = """
axe.configure({rules: [{id: 'color-contrast', selector: '[data-audited]'}]});
axe.run(document, arguments[0]).then(found => arguments[1](found.violations));
"""
# Rules of axe that count whatever their impact is said to be.
READ_BY = ("heading-order", "page-has-heading-one", "image-alt", "empty-heading")
SETTLED = """
const done = arguments[arguments.length - 1];
const drawn = window.MathJax && MathJax.startup ? MathJax.startup.promise : Promise.resolve();
drawn.then(() => requestAnimationFrame(() => done(true)));
"""


def _programs() -> tuple[str, str]:
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    pytest.fail("no Chromium with its driver (Debian: apt-get install chromium chromium-driver)")


class Browser:
    """One window; `look` opens a page at a width and colour scheme."""

    def __init__(self, driver):
        self.driver, self.audited = driver, {"light": set(), "dark": set()}

    def look(self, page: Path, width: int, query: str = "") -> None:
        """Open a page, with what follows its address, and wait until its formulas are drawn."""
        self.driver.get_log("performance"), self.driver.get_log("browser")
        self.resize(width)
        self.driver.get(page.as_uri() + query)
        self.driver.execute_async_script(SETTLED)

    def resize(self, width: int) -> None:
        """Another width for the page that is open; a telephone's below 600."""
        metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def colours(self, scheme: str) -> str:
        """Ask for light or dark; returns the theme the page then has."""
        wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
        return self.driver.execute_async_script(REPAINTED, scheme)

    def run(self, script: str):
        return self.driver.execute_script(script)

    def wait(self, script: str, seconds: float = 10):
        """What a script returns, asked again until it is something."""
        end = time.monotonic() + seconds
        while not (got := self.run(script)) and time.monotonic() < end:
            time.sleep(0.1)
        return got

    def audit(self, scheme: str = "light") -> list[str]:
        """Return serious axe-core findings, all on headings and pictures; on dark pages colours."""
        from axe_core_python.base import AXE_SCRIPT

        if not self.run("return 'axe' in window"):
            self.run(AXE_SCRIPT)
        kinds, known = self.run(KINDS), self.audited[scheme]
        new = [i for i, kind in enumerate(kinds) if kind not in known]
        known.update(kinds)
        if scheme == "dark" and not new:
            return []
        self.driver.execute_script(MARK, new)
        options = {"resultTypes": ["violations"]}
        options |= {"runOnly": ["color-contrast"]} if scheme == "dark" else {}
        found = []
        for one in self.driver.execute_async_script(AUDIT, options):
            if one["impact"] in ("serious", "critical") or one["id"] in READ_BY:
                nodes = one["nodes"][:3]
                found += [f"{one['id']}: {node['target']} {node['html'][:80]}" for node in nodes]
        return found

    def requests(self) -> list[str]:
        """Addresses asked for since the page was opened."""
        log = self.driver.get_log("performance")
        events = [json.loads(entry["message"])["message"] for entry in log]
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent]

    def complaints(self) -> list[str]:
        """Errors on the console since the page was opened."""
        log = self.driver.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, closed at the end."""
    program, driver = _programs()
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(driver))
    try:
        window.set_script_timeout(90)  # of the largest page on a busy machine
        window.get("about:blank")  # away from the browser's own first page
        yield Browser(window)
    finally:
        window.quit()
