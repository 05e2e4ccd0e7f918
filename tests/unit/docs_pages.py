"""The pages of the documentation as the tests read them: headings, links, fenced blocks, and the commands in these."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TWIN = ".zh-CN.md"
NEEDS = {
    "npu": "an NPU, real or at scale",
    "gpu": "a CUDA GPU",
    "cluster": "several nodes, or a service that runs there",
    "container": "a container engine and an image",
    "engine": "an engine that is no dependency; executed where it is installed",
    "source": "somebody's source, run or installation, which is not here",
    "network": "more of the network than the package index",
    "long": "minutes of its own; the nightly executes it by itself",
    "elsewhere": "nothing more, but another test executes it",
}
"""What keeps a command from being executed with the page it stands on as it stands. It is parsed all the same."""
PROVES = r"it proves the command line and the flow, nothing of (?:the|your) \w+"
"""What a declared stand-in has to say of itself."""

STEPS = "trainer.total_training_steps=2"

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<mark>`{3,})(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=indent)(?P=mark)[ \t]*$", re.M | re.S
)
_DECLARATION = re.compile(
    r"<!--\s*(needs (?P<kind>\w+)|exits (?P<code>\d+)|stand-in (?P<put>`[^`]+` as `[^`]+`(?:, `[^`]+` as `[^`]+`)*))"
    r"(?P<only> for (?:`[^`]+`(?:, )?)+)?: (?P<why>[^>]+?)\s*-->"
)
_MAY_GO_ON = re.compile(r"[\\'\"]|\b(?:for|while|if|until|do|then)\b")
_OPERATORS = {"&&", "||", "|", ";", "&", "(", ")", "|&", ";;"}


def english_pages() -> list[Path]:
    """README and every page of docs/ in English, as paths from the root."""
    pages = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [p.relative_to(ROOT) for p in pages if not p.name.endswith(TWIN)]


def twin_of(page: Path) -> Path:
    """Where the Chinese twin of an English page lies."""
    return page.with_name(page.name.removesuffix(".md") + TWIN)


def without_fences(text: str) -> str:
    """The page without its fenced blocks and HTML comments, which hold no headings and no links."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.S)


def headings(text: str) -> list[tuple[int, str]]:
    """Level and text of each heading."""
    return [
        (len(m[1]), m[2].strip()) for m in re.finditer(r"^(#{1,6}) +(.+?)(?: +#+)?$", without_fences(text), flags=re.M)
    ]


def anchor(heading: str) -> str:
    """The anchor that code hosts and MkDocs (toc with pymdownx' slugs, case lower) both give a heading."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "").lower()
    return re.sub(r"[^\w\- ]", "", shown).strip().replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Every anchor of a page; a repeated heading is numbered."""
    found: dict[str, int] = {}
    for _, heading in headings(text):
        name = anchor(heading)
        found[name] = found.get(name, -1) + 1
        if found[name]:
            found[f"{name}-{found[name]}"] = 0
    return set(found) | set(re.findall(r'(?:id|name)="([^"]+)"', text))


def links(text: str) -> list[str]:
    """Targets of the links and images, without titles."""
    prose = re.sub(r"`[^`\n]*`", "`code`", without_fences(text))
    inline = re.findall(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)", prose)
    return inline + re.findall(r"^\[[^\]]+\]:\s*(\S+)", prose, flags=re.M)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its language, its text without the fence's indentation, and what is declared before it."""

    language: str
    text: str
    line: int
    declarations: tuple[re.Match, ...] = ()
    saved_as: str | None = None


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page in order."""
    found = []
    end = 0
    for fence in _FENCE.finditer(text):
        before = text[end : fence.start()]
        end = fence.end()
        # Only comments that directly precede the fence declare something about it.
        tail = re.search(r"((?:<!--(?:(?!-->).)*-->\s*)*)$", before, flags=re.S)
        found.append(
            Block(
                language=(fence["info"].split() or [""])[0],
                text=re.sub(rf"^{fence['indent']}", "", fence["text"], flags=re.M),
                line=text.count("\n", 0, fence.start()) + 1,
                declarations=tuple(_DECLARATION.finditer(tail[1] if tail else "")),
                saved_as=saved[1]
                if (saved := re.search(r"<!-- saved as `([\w./-]+)` -->", tail[1] if tail else ""))
                else None,
            )
        )
    return found


def saved_blocks(page: Path) -> dict[str, str]:
    """The blocks that the page says are files, by name: ``<!-- saved as `my_fault.py` -->``."""
    if not (ROOT / page).is_file():
        return {}
    found = blocks((ROOT / page).read_text(encoding="utf-8"))
    return {block.saved_as: block.text for block in found if block.saved_as}


def smaller(text: str) -> str:
    """The same command made quick where the page leaves it open: two steps, one process, one seed, one category."""
    if re.match(r"alignment (dapo|gkd|ablate)\b", text):
        own = "engine=verl" not in text and not text.startswith("alignment ablate")
        if "total_training_steps" not in text:
            text = re.sub(r"^alignment (\w+)", rf"alignment \1 {STEPS}", text)
        if own and "--executor" not in text and "n_gpus_per_node" not in text:
            text = re.sub(r"^alignment (\w+)", r"alignment \1 --executor inprocess", text)
    if text.startswith("alignment run --fault"):
        text = text.replace("alignment run", "alignment run --only layer --subject torch", 1)
    if text.startswith("alignment stress --minutes"):
        text = re.sub(r"--minutes \d+", "--minutes=0.05", text)
    if text.startswith("alignment replay") and "--perturbations" not in text:
        text = text.replace("alignment replay", "alignment replay --perturbations 1", 1)
    if text.startswith("alignment compare-engines") and "--engine" not in text:
        text = text.replace("compare-engines", "compare-engines --engine golden", 1)
    if text.startswith("alignment audit") and "--seeds" not in text and "--list" not in text:
        # Every check against every fault takes long; against those of one category it is the same command.
        few = " --category moe" if "--ablation" in text and "--category" not in text else ""
        text = text.replace("alignment audit", f"alignment audit --seeds 1{few}", 1)
    return text


@dataclass(frozen=True, kw_only=True)
class Command:
    """One complete statement of a bash block: a line with its continuation lines and here-documents.

    Attributes:
        stand_in: what is put in the place of which words, in order, so that the test can execute it; None without one.
        used: the beginnings and the replaced words of the declarations that say something of this command.
        block: the line of the block it stands in, and ``of_block`` how many commands that has.
        promises: the verdicts in the output that the page prints below the block.
    """

    page: Path
    line: int
    text: str
    needs: str | None = None
    why: str = ""
    exits: int = 0
    stand_in: tuple[tuple[str, str], ...] | None = None
    used: tuple[str, ...] = field(default=(), compare=False)
    block: int = 0
    of_block: int = 1
    promises: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def with_stand_in(self) -> str:
        """The statement as the test executes it; the one of the page where no stand-in is declared."""
        text = self.text
        for old, new in self.stand_in or ():
            text = text.replace(old, new)
        return text

    @property
    def executed(self) -> str:
        """How a test executes it: plainly, long, engine, elsewhere, stand-in; or only parsed."""
        if self.stand_in is not None or re.search(f"{PROVES}$", self.why):
            return "stand-in"
        if self.needs in ("long", "engine", "elsewhere"):
            return self.needs
        return "only parsed" if self.needs else "plainly"

    @property
    def shortened_by(self) -> str:
        """The words by which a test makes it quick, which the page does not have; empty where it is executed as is."""
        if self.executed in ("elsewhere", "only parsed"):
            return ""
        own = self.with_stand_in.split()
        return " ".join(word for word in smaller(self.with_stand_in).split() if word not in own)


def statements(text: str) -> list[tuple[int, str]]:
    """Complete statements of a shell text with the line each starts at; comment lines are left out."""
    lines, found, i = text.splitlines(), [], 0
    while i < len(lines):
        start, gathered = i, lines[i]
        while _unfinished(gathered) and i + 1 < len(lines):
            i += 1
            gathered += "\n" + lines[i]
        here = re.search(r"<<-?\s*['\"]?(\w+)['\"]?", _without_comment(gathered))
        while here and i + 1 < len(lines):
            i += 1
            gathered += "\n" + lines[i]
            if lines[i].strip() == here[1]:
                break
        i += 1
        if _without_comment(gathered).strip():
            found.append((start, gathered))
    return found


def _unfinished(text: str) -> bool:
    if not _MAY_GO_ON.search(text):  # lexing takes a hundred times as long
        return False
    if _without_comment(text).rstrip(" ").endswith("\\"):
        return True
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return True
    depth = sum({"do": 1, "then": 1, "done": -1, "fi": -1}.get(word.rstrip(";"), 0) for word in words)
    return depth > 0 or (
        bool(words)
        and words[0] in ("for", "while", "if", "until")
        and not any(w.rstrip(";") in ("done", "fi") for w in words)
    )


def _without_comment(text: str) -> str:
    """`text` up to a # that starts a word outside quotes."""
    quote = ""
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (i == 0 or text[i - 1].isspace()):
            return text[:i]
    return text


def without_comments(text: str) -> str:
    """A block of shell, YAML or Python without blank lines and comments, which are in the language of the page."""
    kept = []
    for line in text.splitlines():
        bare = _without_comment(line).rstrip()
        if bare.strip():
            kept.append(bare)
    return "\n".join(kept)


def commands(page: Path) -> list[Command]:
    """Every statement of the page's bash blocks, with what the comments before the blocks declare."""
    found = []
    every = blocks((ROOT / page).read_text(encoding="utf-8"))
    for block, following in zip(every, [*every[1:], None]):
        if block.language != "bash":
            continue
        found_here = statements(block.text)
        promises = promised(following.text) if following is not None and following.language == "text" else ()
        plain = [_without_comment(text).strip() for _, text in found_here]
        for (offset, text), bare in zip(found_here, plain):
            needs, why, exits, stand_in, used = None, "", 0, None, []
            for declared in block.declarations:
                beginnings = re.findall(r"`([^`]+)`", declared["only"] or "")
                # A beginning that is a whole command of the block means that one alone.
                meant = [b for b in beginnings if (bare == b if b in plain else bare.startswith(b))]
                if beginnings and not meant:
                    continue
                used += meant
                if declared["kind"]:
                    needs, why = declared["kind"], declared["why"]
                elif declared["put"]:
                    stand_in = (stand_in or ()) + replacements(declared)
                else:
                    exits = int(declared["code"])
            command = Command(
                page=page, line=block.line + 1 + offset, text=text, needs=needs, why=why, exits=exits,
                stand_in=stand_in, block=block.line, of_block=len(found_here), promises=promises,
            )  # fmt: skip
            used += [old for old, _ in stand_in or () if old in text]
            found.append(replace(command, used=tuple(used)))
    return found


@functools.cache
def _promises() -> re.Pattern:
    """What of the output on a page is a verdict and no number of a machine, as the newcomer's script has it."""
    script = (ROOT / "scripts" / "newcomer.sh").read_text(encoding="utf-8")
    found = re.search(r"^PROMISES = (\(.*?\))  # fmt: skip$", script, flags=re.M | re.S)
    return re.compile("|".join(ast.literal_eval(found[1])))


def promised(output: str) -> tuple[str, ...]:
    """The verdicts in an output that a page prints; what is executed has to print lines that begin so."""
    return tuple(match[0] for match in map(_promises().match, output.splitlines()) if match)


def replacements(declared: re.Match) -> tuple[tuple[str, str], ...]:
    """What a declared stand-in puts in the place of what."""
    return tuple(re.findall(r"`([^`]+)` as `([^`]+)`", declared["put"] or ""))


def simple_commands(text: str) -> list[list[str]]:
    """The words of every simple command in a statement, without redirections and here-documents."""
    head = re.split(r"<<-?\s*['\"]?\w+['\"]?", text)[0] if re.search(r"<<-?\s*['\"]?\w", text) else text
    inner = re.findall(r"\$\(([^()]*)\)", head)
    flat = re.sub(r"\\\n", " ", re.sub(r"\$\([^()]*\)", "substituted", head))
    found: list[list[str]] = []
    words: list[str] = []
    skip = False
    for word in _lexed(_on_one_line(flat)):
        if skip:
            skip = False
        elif word in _OPERATORS:
            found.append(words)
            words = []
        elif re.fullmatch(r"[<>]+&?|&>+|>&", word):
            skip = True
            if words and words[-1].isdigit():
                words.pop()
        else:
            words.append(word)
    found.append(words)
    for nested in inner:
        found += simple_commands(nested)
    return [w for w in map(_bare, found) if w]


def _on_one_line(text: str) -> str:
    """Ends of lines as semicolons where they end a command, and no comments."""
    quote, kept, comment = "", [], False
    for i, character in enumerate(text):
        if comment:
            comment = character != "\n"
        elif not quote and character == "#" and (i == 0 or text[i - 1].isspace()):
            comment = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        if not comment:
            kept.append(" ; " if character == "\n" and not quote else character)
    return "".join(kept)


def _lexed(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)


def _bare(words: list[str]) -> list[str]:
    """Without the variables set for it and the keywords before it."""
    while words and (
        re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], flags=re.S) or words[0] in ("do", "then", "else", "!", "{", "time")
    ):
        words = words[1:]
    return [] if not words or words[0] in ("done", "fi", "}", "for") else words


def main() -> None:
    """Prints how many commands the pages have, which no test executes and why, and which are shortened by what."""
    every = [command for page in english_pages() for command in commands(page)]
    count = Counter(command.executed for command in every)
    for command in every:
        if command.executed == "only parsed":
            print(f"{command.place}: needs {command.needs}: {command.why}: {command.text.splitlines()[0]}")
        if command.shortened_by:
            print(f"{command.place}: shortened by {command.shortened_by}: {command.text.splitlines()[0]}")
    shortened = Counter(command.executed for command in every if command.shortened_by)
    print(
        f"{len(every)} commands: {count['plainly'] + count['long']} executed "
        f"({shortened['plainly'] + shortened['long']} of them shortened), "
        f"{count['engine']} where the engine is ({shortened['engine']} shortened), "
        f"{count['elsewhere']} by another test, "
        f"{count['stand-in']} with a declared stand-in ({shortened['stand-in']} shortened), "
        f"{count['only parsed']} only parsed"
    )


if __name__ == "__main__":
    main()
