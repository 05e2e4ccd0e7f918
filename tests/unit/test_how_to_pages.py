"""Each how-to has what its reader came for: the goal, commands, what they print, and what can go wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PAGES = sorted(page for page in HOW_TO.glob("*.md") if ".zh-CN" not in page.name)
ASKED = {
    "record-gpu-baselines", "read-a-failure", "add-a-check", "add-a-subject", "add-a-fault", "add-a-baseline",
    "add-a-stack", "run-on-atlas", "bisect", "your-own-verl-run",
}  # fmt: skip


def lacks(text: str) -> list[str]:
    """What a how-to does not say."""
    bare = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    parts = {
        "its goal, right below the title": r"\A# [^\n]+\n\n\*\*Goal\*\*: \S",
        "a command": r"^```bash\n",
        "what is printed": r"^```text\n",
        "what can go wrong": r"^## What can go wrong\n\n[|*]",
    }
    return [name for name, pattern in parts.items() if not re.search(pattern, text, flags=re.M)] + [
        f"text below the heading {title!r}" for title in re.findall(r"^## ([^\n]+)\n\s*(?=\Z|## )", bare, flags=re.M)
    ]


def test_the_pages_that_were_asked_for_are_there():
    assert ASKED <= {page.stem for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_how_to_says_goal_commands_output_and_pitfalls(page):
    assert lacks(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("right", "wrong", "missing"),
    [
        ("**Goal**: ", "", "its goal, right below the title"),
        ("```bash", "```console", "a command"),
        ("```text", "```", "what is printed"),
        ("## What can go wrong", "## Pitfalls", "what can go wrong"),
    ],
)
def test_a_page_without_one_of_them_is_found(right, wrong, missing):
    page = next(page for page in PAGES if page.stem == "read-a-failure").read_text(encoding="utf-8")
    assert right in page and lacks(page.replace(right, wrong)) == [missing]
