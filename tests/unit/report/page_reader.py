"""A page as a parser and a real browser see it."""

from __future__ import annotations

import html
import html.parser
import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(html.parser.HTMLParser):
    """Checks that elements nest and close, and collects what could load something or run."""

    VOID = {"meta", "link", "br", "img", "input", "hr"}

    def __init__(self) -> None:
        super().__init__()
        self.open, self.links, self.scripts, self.text = [], [], 0, []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        assert not any(name.startswith("on") for name, _ in attributes), attributes

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(page: Path) -> Page:
    reader = Page()
    reader.feed(page.read_text())
    assert not reader.open
    return reader


browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)")


def visited(page: Path, directory: Path) -> tuple[str, list[str]]:
    """The document after its scripts have run, as Chromium writes it, and what went to the browser's console."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom",
        "--enable-logging=stderr", "--v=0", f"--user-data-dir={directory / 'profile'}", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def opened(page: Path, directory: Path) -> str:
    """The document after its scripts have run, as Chromium writes it."""
    return visited(page, directory)[0]


def told_by(document: str) -> Any:
    """What a probe left in the document."""
    return json.loads(html.unescape(re.search(r'<pre id="told">(.*?)</pre>', document, re.S)[1]))


ASK_AXE = """
<script>
addEventListener("load", async () => {
  const theme = "%s";
  document.documentElement.dataset.theme = theme;
  const { violations, passes } = await axe.run(document);
  const out = document.createElement("pre"); out.id = "told";
  out.textContent = JSON.stringify({ passes: passes.length, violations: violations.map((v) => [v.impact, v.id, v.nodes[0].html]) });
  document.body.append(out);
});
</script>
"""


def violations(page: Path, directory: Path, theme: str) -> list[tuple[str, str, str]]:
    """What the rules of axe find in a page."""
    axe = Path(importlib.util.find_spec("axe_core_python").origin).with_name("axe.min.js")
    seen = directory / f"seen-{theme}.html"
    probe = "<script>" + axe.read_text().replace("</script", "<\\/script") + "</script>" + ASK_AXE % theme
    seen.write_text(page.read_text().replace("</body>", probe + "</body>"))
    told = told_by(opened(seen, directory))
    assert told["passes"] > 0
    return [tuple(violation) for violation in told["violations"]]
