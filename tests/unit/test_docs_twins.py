"""Every page has a Chinese twin with the same headings, the same commands and the same examples."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs_pages import DOCS, ROOT, TWIN, blocks, english_pages, headings, twin_of, without_comments

COMPARED = ("bash", "yaml", "toml", "python", "json")
"""Languages of blocks that say the same in every language but for their comments."""


def differences(english: str, chinese: str) -> list[str]:
    """What two versions of a page do not have in common."""
    found = []
    here, there = headings(english), headings(chinese)
    for number, ((level, name), other) in enumerate(zip(here, [*there, *[(0, "")] * len(here)]), start=1):
        if level != other[0]:
            found.append(
                f"heading {number}, '{'#' * level} {name}', is {'#' * other[0] or 'missing'} {other[1]}".rstrip()
            )
            break
    if not found and len(there) > len(here):
        found.append(f"there is a heading more: {there[len(here)][1]}")
    for language in COMPARED:
        here, there = (
            [without_comments(b.text) for b in blocks(t) if b.language == language] for t in (english, chinese)
        )
        if here == there:
            continue
        lines = [line for block in here for line in block.splitlines()]
        others = [line for block in there for line in block.splitlines()]
        first = next((pair for pair in zip(lines, others) if pair[0] != pair[1]), None)
        shown = (
            f"{first[0]!r} is {first[1]!r}"
            if first
            else f"{len(here)} blocks, {len(lines)} lines; there {len(there)}, {len(others)}"
        )
        found.append(f"{language}: {shown}")
    return found


@pytest.mark.parametrize("page", english_pages(), ids=str)
def test_the_page_has_a_twin_that_agrees(page):
    twin = ROOT / twin_of(page)
    assert twin.is_file(), f"{twin_of(page)} is missing"
    assert differences((ROOT / page).read_text(encoding="utf-8"), twin.read_text(encoding="utf-8")) == [], twin_of(page)


def test_every_twin_has_a_page():
    alone = [
        p.name
        for p in [*ROOT.glob(f"*{TWIN}"), *DOCS.rglob(f"*{TWIN}")]
        if not p.with_name(p.name.replace(TWIN, ".md")).is_file()
    ]
    assert alone == []


PAGE = "# A\n\n## B\n\n```bash\nalignment run --json  # says\n```\n\n```yaml\nkey: 1  # says\n\n```\n\n## C\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("## B", "### B", "heading 2, '## B', is ### B"),
        ("\n## C\n", "\n", "heading 3, '## C', is missing"),
        ("## C\n", "## C\n## D\n", "there is a heading more: D"),
        ("run --json", "run", "bash: 'alignment run --json' is 'alignment run'"),
        ("key: 1", "key: 2", "yaml: 'key: 1' is 'key: 2'"),
        ("```bash\nalignment run --json  # says\n```\n", "", "bash: 1 blocks, 1 lines; there 0, 0"),
        ("```yaml\nkey", "```text\nkey", "yaml: 1 blocks, 1 lines; there 0, 0"),
    ],
)
def test_a_planted_difference_is_found(old, new, said):
    assert differences(PAGE, PAGE.replace(old, new)) == [said]


def test_what_is_in_the_language_of_the_page_may_differ():
    assert differences(PAGE, PAGE.replace("# says", "# 说").replace("## B", "## 乙")) == []
    assert differences(PAGE, PAGE.replace("1  # says\n\n", "1\n")) == []


def test_twins_of_pages_in_folders():
    assert twin_of(Path("docs/how-to/x.md")) == Path("docs/how-to/x.zh-CN.md")
