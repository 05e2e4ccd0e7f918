"""Axis 2: what was fed to the model, batch by batch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from alignment.diagnose.axes import AXES, AxisReport, Finding, overrides, report
from alignment.diagnose.axes.prompt_parts import (
    MODEL,
    QUESTION,
    RECIPE,
    TEMPLATE,
    TOKENIZER,
    TOKENS,
    first_difference,
    recorded_pairs,
)
from alignment.diagnose.run_stages import RunData
from alignment.errors import InputError
from alignment.files import read_json
from alignment.rl.tracking import GROUPS, read_series

AXIS = AXES[1]
_FILES = "data.train_files"


def named(run: RunData) -> bool:
    """Whether a run knows its prompts by name; a raw folder of verl has their text instead."""
    return (run.directory / GROUPS).is_file()


def prompts_by_step(run: RunData) -> dict[int, list[str]]:
    """The names of the prompts of every step, in the order in which they were used."""
    path = run.directory / GROUPS
    if path.is_file():
        return {int(line["step"]): list(line["prompt_ids"]) for line in read_series(path) if "prompt_ids" in line}
    return {step: [str(row["input"]) for row in rows] for step, rows in run.texts.items()}


def check(dut: RunData, baseline: RunData) -> AxisReport:
    """The first batch, sample and token that differ; and whether it is the order, the content or the tokens."""
    ours, theirs = prompts_by_step(dut), prompts_by_step(baseline)
    steps = sorted(set(ours) & set(theirs))
    if not steps:
        return report(AXIS, [], compared="", unseen="a run recorded no prompts")
    if named(dut) != named(baseline):
        return report(AXIS, [], compared="", unseen="one run names its prompts and the other keeps their text")
    findings: list[Finding] = []
    for step in steps:
        if ours[step] != theirs[step]:
            findings.append(_parted(step, ours[step], theirs[step], _alike(ours, theirs, steps)))
            break
    recorded = 0 if findings else len(recorded_pairs(dut, baseline))
    written = None if findings else first_difference(dut, baseline)
    if written is not None and written.part not in RECIPE:
        findings.append(Finding(axis=AXIS, cause=_WRITTEN[written.part], evidence=written.evidence))
    findings += _tokenizers(dut, baseline)
    hashes = [run.provenance_hash("data_hash") for run in (dut, baseline)]
    if not findings and written is None and None not in hashes and hashes[0] != hashes[1]:
        findings.append(
            Finding(
                axis=AXIS,
                cause="the data differ where no step has looked yet",
                evidence=f"content {hashes[1][:12]} → {hashes[0][:12]}",
                weight=1,
            )
        )
    compared = f"{len(steps)} batches have the same prompts in the same order"
    if written is not None:
        compared += f"; {written.part} around them differ: see the scoring"
    elif recorded:
        compared += f", {recorded} of them compared token by token"
    return report(AXIS, findings, compared=compared, next_command=next_data(dut, baseline) if findings else "")


_WRITTEN = {
    QUESTION: "one name, two questions",
    TEMPLATE: "one prompt is written in two ways: chat template",
    TOKENS: "one prompt is tokenised in two ways: tokenizer",
    "": "one prompt is tokenised in two ways: tokenizer or chat template",
}


def next_data(dut: RunData, baseline: RunData) -> str:
    """The baseline's data for the run under test, or the first stage that parts where both name the same."""
    if dut.config.get(_FILES) != baseline.config.get(_FILES) and baseline.config.get(_FILES):
        return f"run again with {overrides(baseline.config, [_FILES])}"
    return f"alignment compare {baseline.directory} {dut.directory}"


def _parted(step: int, ours: Sequence[str], theirs: Sequence[str], order_only: bool) -> Finding:
    place = next(i for i in range(max(len(ours), len(theirs))) if ours[i : i + 1] != theirs[i : i + 1])
    at = f"batch {step}, prompt {place}: {_name(theirs, place)} → {_name(ours, place)}"
    if order_only:
        return Finding(axis=AXIS, cause="another order of the prompts", evidence=at)
    return Finding(axis=AXIS, cause="other prompts", evidence=at)


def _alike(ours: dict[int, list[str]], theirs: dict[int, list[str]], steps: Iterable[int]) -> bool:
    """Whether the runs used the same prompts, as often, in another order."""
    counted = [Counter(prompt for step in steps for prompt in side[step]) for side in (ours, theirs)]
    return counted[0] == counted[1]


def _tokenizers(dut: RunData, baseline: RunData) -> list[Finding]:
    """What differs in the tokenizers that the two configurations name, where both folders are there."""
    folders = [run.config.get(TOKENIZER) or run.config.get(MODEL) for run in (dut, baseline)]
    if None in folders or not all(Path(str(folder)).is_dir() for folder in folders):
        return []
    findings = []
    for cause, read in (("another chat template", _chat_template), ("another vocabulary", _vocabulary)):
        ours, theirs = (read(Path(str(folder))) for folder in folders)
        if ours is not None and theirs is not None and ours != theirs:
            length = min(len(ours), len(theirs))
            at = next((i for i in range(length) if ours[i] != theirs[i]), length)
            evidence = f"from character {at} on: {theirs[at : at + 40]!r} → {ours[at : at + 40]!r}"
            findings.append(Finding(axis=AXIS, cause=cause, evidence=evidence, weight=2))
    return findings


def _chat_template(folder: Path) -> str | None:
    """The template as a file of its own, or within the tokenizer's configuration."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = _json(folder / "tokenizer_config.json").get("chat_template")
    return None if found is None else found if isinstance(found, str) else json.dumps(found, sort_keys=True)


def _vocabulary(folder: Path) -> str | None:
    """Tokens, merges and added tokens; how a release of tokenizers writes them down is left out."""
    found = _json(folder / "tokenizer.json")
    if not found:
        return None
    model = found.get("model") or {}
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model.get("merges") or ()]
    added = [(token.get("id"), token.get("content")) for token in found.get("added_tokens") or ()]
    return json.dumps([model.get("vocab"), merges, added], sort_keys=True, ensure_ascii=False)


def _json(path: Path) -> dict:
    try:
        found = read_json(path)
    except InputError:
        return {}
    return found if isinstance(found, dict) else {}


def _name(prompts: Sequence[str], place: int) -> str:
    return repr(prompts[place])[:60] if place < len(prompts) else "none"
