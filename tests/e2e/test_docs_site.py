"""The documentation as a site: built without a warning, whole by itself, searched from a folder in both languages."""

from __future__ import annotations

import html
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from docs_pages import ROOT, english_pages  # noqa: E402

pytestmark = [
    pytest.mark.docs,
    pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs pip install 'npu-alignment[docs]'"),
]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def build(root: Path, target: Path) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        str(root / "ci" / "mkdocs.yml"),
        "-d",
        str(target),
    ]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(ROOT, target)
    assert done.returncode == 0, done.stderr
    return target


def test_every_page_is_there_in_both_languages(site):
    pages = [p.relative_to("docs").with_suffix(".html") for p in english_pages() if p.parts[0] == "docs"]
    pages.append(Path("repository/readme.html"))
    missing = [str(p) for p in pages if not (site / p).is_file() or not (site / "zh-CN" / p).is_file()]
    assert missing == []
    for page in pages:
        english, chinese = ((folder / page).read_text(encoding="utf-8") for folder in (site, site / "zh-CN"))
        assert '<html lang="en"' in english and '<html lang="zh"' in chinese, page
        # Each leads to the other, by a relative link: the site may lie anywhere, a folder included.
        assert re.search(rf'href="[./]*zh-CN/{re.escape(str(page))}" hreflang="zh-CN"', english), page
        assert re.search(rf'href="[./]*{re.escape(str(page))}" hreflang="en"', chinese), page


def test_nothing_is_loaded_from_elsewhere(site):
    loaded = [
        f"{path.relative_to(site)}: {found}"
        for path in site.rglob("*.html")
        for found in re.findall(
            r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//[^"]*"|<link\b(?![^>]*rel="canonical")[^>]*\bhref="(?:https?:)?//[^"]*"',
            path.read_text(encoding="utf-8"),
        )
    ]
    loaded += [
        f"{path.relative_to(site)}: {found}"
        for path in site.rglob("*.css")
        for found in re.findall(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//[^)\"']*", path.read_text(encoding="utf-8"))
    ]
    assert loaded == []


def test_formulas_are_drawn_without_scripts(site):
    text = (site / "compare.html").read_text(encoding="utf-8")
    assert "<math" in text and "arithmatex" not in text


def test_files_outside_the_documentation_are_pages(site):
    assert 'href="repository/readme.html"' in (site / "index.html").read_text(encoding="utf-8")
    readme = (site / "repository" / "readme.html").read_text(encoding="utf-8")
    assert 'href="../gkd.html"' in readme and 'href="CHANGELOG.html"' in readme


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)")
@pytest.mark.parametrize(
    ("page", "asked", "found"),
    [("index.html", "bisect", "bisect.html"), ("zh-CN/index.html", "二分", "zh-CN/bisect.html")],
)
def test_it_is_searched_from_a_folder(site, tmp_path, page, asked, found):
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom",
        f"--user-data-dir={tmp_path}", f"{(site / page).as_uri()}?q={quote(asked)}",
    ]  # fmt: skip
    document = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    results = [html.unescape(r) for r in re.findall(r'<a href="([^"]*)" class="md-search-result__link"', document)]
    assert any(f"{site.as_uri()}/{found}" == result.split("?")[0] for result in results), results


PLANTED = {
    "[a](nowhere.md)": "contains a link 'nowhere.md', but the target is not found",
    "[a](bisect.md#nowhere)": "the doc 'bisect.md' does not contain an anchor '#nowhere'",
    "[a](../nowhere.yaml)": "contains a link 'repository/nowhere.yaml.md', but the target is not found",
}


def test_a_broken_link_stops_the_build(tmp_path):
    for name in ("ci", "docs", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in ROOT.glob("*.md"):
        shutil.copy2(path, tmp_path)
    page = tmp_path / "docs" / "budgets.md"
    page.write_text("\n\n".join([page.read_text(encoding="utf-8"), *PLANTED]), encoding="utf-8")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert [said for said in PLANTED.values() if said not in done.stderr] == []
