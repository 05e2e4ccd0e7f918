"""What the documentation site needs beyond its pages: files outside docs/ that they link to, formulas without scripts.

On a code host a page links to ``../README.md`` or ``../alignment/…`` as everywhere. In the site such a file becomes a
page below ``repository/``, so that the site is whole by itself and asks nothing of the network. Formulas between dollar
signs become MathML, which browsers draw themselves.
"""

from __future__ import annotations

import html
import posixpath
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

ROOT = Path(__file__).resolve().parents[1]
TWIN = ".zh-CN.md"
FOLDER = "repository"
PAGES = ROOT / "build" / "site-pages"
"""The pages as the site has them, made anew by every build."""

UNSEARCHED = {f"docs/reference/{name}{TWIN}" for name in ("cli", "configuration")}
"""Their descriptions are those of the English page, so every word would be found twice."""

LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".json": "json", ".cpp": "cpp"}
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"^(?P<indent> *)(?P<mark>`{3,}).*?^(?P=indent)(?P=mark)[ \t]*$|`[^`\n]*`", re.M | re.S)


@event_priority(100)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lets the site be built from the pages of docs/ and of whatever else of the repository they link to."""
    if Path(config.docs_dir) == PAGES:
        # The build of a further language.
        return config
    docs = Path(config.docs_dir)
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(docs, PAGES)
    waiting = [path.relative_to(ROOT).as_posix() for path in docs.rglob("*.md")]
    done = set(waiting)
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text(encoding="utf-8")
        outside = {target for target, _ in map(lambda m: _resolved(path, m["target"]), _links(text)) if target}
        new = sorted(t for t in outside if not t.startswith("docs/") and (ROOT / t).is_file() and t not in done)
        done.update(new)
        waiting += [t for t in new if t.endswith(".md")]
        page = PAGES / _page(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        text = _outside_code(text, lambda part: _LINK.sub(lambda m: _rewritten(path, m), part))
        if path in UNSEARCHED:
            text = f"---\nsearch: {{exclude: true}}\n---\n\n{text}"
        page.write_text(text, encoding="utf-8")
        for source in (t for t in new if not t.endswith(".md")):
            _write_source(source)
    config.docs_dir = str(PAGES)
    config.watch.append(str(docs))
    return config


def _write_source(path: str) -> None:
    """A file that is no page, as one."""
    page = PAGES / _page(path)
    page.parent.mkdir(parents=True, exist_ok=True)
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    page.write_text(f"# {path}\n\n`````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n`````\n", encoding="utf-8")


def _rewritten(path: str, match: re.Match) -> str:
    """A link on the page ``path`` as the site resolves it."""
    target, fragment = _resolved(path, match["target"])
    if target is None:
        return match[0]
    if target != path and target.replace(TWIN, ".md") == path.replace(TWIN, ".md"):
        # The other language of this page: the site has a switch for it.
        return match["text"]
    link = posixpath.relpath(_page(target), posixpath.dirname(_page(path)) or ".")
    return f"{match['image']}[{match['text']}]({link}{fragment})"


def on_page_content(content: str, **_) -> str:
    """Formulas, which arithmatex has marked, as MathML."""
    from latex2mathml.converter import convert

    def drawn(match: re.Match) -> str:
        formula = html.unescape(match["formula"])
        return convert(formula, display="block" if match["tag"] == "div" else "inline")

    pattern = r'<(?P<tag>span|div) class="arithmatex">\\[\(\[](?P<formula>.*?)\\[\)\]]</(?P=tag)>'
    return re.sub(pattern, drawn, content, flags=re.S)


@event_priority(-200)
def on_post_build(config: MkDocsConfig) -> None:
    """What is searched without a server, once more: the offline plugin wrote it before all languages were together."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    text = index.read_text(encoding="utf-8")
    index.with_suffix(".js").write_text(f"var __index = {text}", encoding="utf-8")


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def _links(text: str) -> Iterator[re.Match]:
    return _LINK.finditer(_CODE.sub("", text))


def _resolved(path: str, target: str) -> tuple[str | None, str]:
    """The target of a link on the page ``path``, from the repository's root, and the fragment; None for an address."""
    link, mark, fragment = target.partition("#")
    if not link or re.match(r"[a-z][a-z+.-]*:", link):
        return None, ""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link)), mark + fragment


def _page(target: str) -> str:
    """Where the site has a file of the repository. A README is no index here."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"{FOLDER}/{target.replace('README', 'readme')}" + ("" if target.endswith(".md") else ".md")
