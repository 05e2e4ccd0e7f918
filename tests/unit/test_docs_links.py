"""Every relative link of a page leads to a file, and every anchor to a heading; nothing is asked of the network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_pages import DOCS, ROOT, TWIN, anchor, anchors, headings, links, twin_of


def all_pages() -> list[Path]:
    top = [p for p in ROOT.glob("*.md")]
    return sorted(p.relative_to(ROOT) for p in [*top, *DOCS.rglob("*.md")])


def broken(page: Path, text: str) -> list[str]:
    """Links of a page, by its path from the root, that lead nowhere."""
    found = []
    for target in links(text):
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if path and not (file.resolve().is_relative_to(ROOT) and file.exists()):
            found.append(f"{target}: no such file")
        elif fragment and file.suffix == ".md":
            there = text if not path else file.read_text(encoding="utf-8")
            if fragment not in anchors(there):
                found.append(f"{target}: {file.name} has no such heading")
    return found


@pytest.mark.parametrize("page", all_pages(), ids=str)
def test_every_link_of_the_page_leads_somewhere(page):
    assert broken(page, (ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", [p for p in all_pages() if p.name.endswith(TWIN)], ids=str)
def test_chinese_pages_lead_to_chinese_pages(page):
    """But to its own English version, which some name at their head."""
    assert english(page, (ROOT / page).read_text(encoding="utf-8")) == []


def english(page: Path, text: str) -> list[str]:
    """Links of a Chinese page to English ones that have a twin."""
    own = page.name.replace(TWIN, ".md")
    paths = {target.partition("#")[0] for target in links(text)} - {own}
    return sorted(p for p in paths if p.endswith(".md") and twin_of((ROOT / page).parent / p).is_file())


def test_a_link_out_of_the_language_is_found():
    text = "[a](bisect.md#exit-codes) [b](bisect.zh-CN.md) [c](page.md) [d](../CHANGELOG.md) [e](https://a.b/c.md)"
    assert english(Path("docs/page.zh-CN.md"), text) == ["bisect.md"]


def test_every_page_has_its_place_in_the_site():
    nav = (ROOT / "ci" / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:", 1)[1]
    placed = re.findall(r"[\w/-]+\.md", nav)
    pages = [str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if not p.name.endswith(TWIN)]
    assert sorted(placed) == sorted(pages), "nav: of ci/mkdocs.yml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a](nowhere.md)", "nowhere.md: no such file"),
        ("[a](../../outside)", "../../outside: no such file"),
        ("[a](bisect.md#no-such-heading)", "bisect.md has no such heading"),
        ("[a](#no-such-heading)", "page.md has no such heading"),
        ("![a](nowhere.png)", "nowhere.png: no such file"),
        ("[a]\n\n[a]: nowhere.md", "nowhere.md: no such file"),
    ],
)
def test_a_broken_link_is_found(text, said):
    found = broken(Path("docs/page.md"), text)
    assert len(found) == 1 and found[0].endswith(said.split(": ", 1)[-1])


def test_links_in_code_and_comments_are_none():
    text = (
        "`[a](b)`\n```python\nx[a](b)\n```\n<!-- [a](b) -->\n# Here\n[a](#here) [b](bisect.md#exit-codes) <https://a.b>"
    )
    assert broken(Path("docs/page.md"), text) == []


def test_anchors_are_those_of_the_code_hosts():
    assert anchor("`use_dynamic_bsz`") == "use_dynamic_bsz"
    assert anchor("MindSpeed: the scale, that *reaches* [it](x.md)") == "mindspeed-the-scale-that-reaches-it"
    assert anchor("退出码 (codes)") == "退出码-codes"
    assert anchors("# A\n## A\n") == {"a", "a-1"}
    assert headings("# A\n```\n# no\n```\n<!--\n# no\n-->\n## B #\n") == [(1, "A"), (2, "B")]
