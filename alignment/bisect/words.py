"""The answer in words: one paragraph that says what it is, how that is known, and what is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.bisect.history import describe_commit
from alignment.bisect.known_bad import load_known_bad
from alignment.bisect.observation import plain_number
from alignment.bisect.outcomes import Ending
from alignment.bisect.solver import Answer, Edge, Finding


def answer_data(answer: Answer, counts: Mapping[str, int], *, repositories: Mapping[str, str] = {}) -> dict[str, Any]:
    """The answer as it is stored and printed with ``--json``."""
    return {
        "ending": answer.ending.name.lower(),
        "exit_code": int(answer.ending),
        "bound": answer.bound,
        "probes": dict(counts),
        "notes": list(answer.notes),
        "words": in_words(answer, counts, repositories=repositories),
        "findings": [
            {
                "kind": f.kind,
                "necessary": f.necessary,
                "sufficient": f.sufficient,
                "remarks": f.remarks,
                "edges": [_edge_data(e, repositories) for e in f.edges],
            }
            for f in answer.findings
        ],
    }


def _edge_data(edge: Edge, repositories: Mapping[str, str]) -> dict[str, Any]:
    return {
        "changes": [
            {
                "component": c.component,
                "old": str(c.old or ""),
                "new": str(c.new or ""),
                "commit": _commit(c, repositories),
            }
            for c in edge.changes
        ],
        "exact": edge.exact,
        "pinned_together": edge.pinned,
        "hidden": edge.hidden,
        "confidence": edge.held,
        "low": {"digest": edge.low.digest, "name": str(edge.low), "value": plain_number(edge.low_value)},
        "high": {
            "digest": edge.high.digest,
            "name": str(edge.high),
            "value": plain_number(edge.high_value),
            "zone": edge.high_zone.value,
        },
        "sizes": edge.sizes,
        "skips": edge.skips,
        "known_bad": [k.id for k in _known(edge)],
    }


def _commit(change, repositories: Mapping[str, str]) -> str:
    from pathlib import Path

    if change.new is None or change.new.kind != "git":
        return ""
    path = Path(repositories.get(change.component) or change.new.repository or ".")
    return describe_commit(path, change.new.revision) if path.is_dir() else ""


def _known(edge: Edge):
    """Known defects that one side of the step has and the other has not."""
    return [k for k in load_known_bad() if k.matches(edge.low) != k.matches(edge.high)]


def in_words(answer: Answer, counts: Mapping[str, int], *, repositories: Mapping[str, str] = {}) -> str:
    """The whole answer as one paragraph."""
    said = [" ".join(_finding(f, repositories)) for f in answer.findings]
    if len(answer.findings) > 1:
        said.insert(0, f"There are {len(answer.findings)} causes.")
    spent = ", ".join(
        f"{counts[k]} {what}"
        for k, what in (
            ("ends", "at the ends"),
            ("search", "in the search"),
            ("confirm", "for the proof"),
            ("recheck", "to measure again"),
        )
        if counts.get(k)
    )
    said.append(f"It took {sum(counts.values())} probes ({spent}; the search may have taken {answer.bound}).")
    if answer.ending is Ending.RANGE:
        said.append("A single step cannot be named: what lies inside the range could not be measured.")
    return " ".join([*said, *(n[:1].upper() + n[1:] + "." for n in answer.notes)])


def _finding(finding: Finding, repositories: Mapping[str, str]) -> list[str]:
    edges = finding.edges
    if finding.kind == "interaction":
        said = [
            f"Two changes are bad only together: {finding}."
            if len(edges) == 2
            else f"These changes are bad only together: {finding}."
        ]
    elif finding.kind == "contribution":
        said = [f"{_step(edges[0])} accounts for a part of the deviation{_values(edges[0])}."]
    else:
        said = [f"{_step(edges[0])} turned the result from good to bad{_values(edges[0])}."]
    for edge in edges:
        for change in edge.changes:
            commit = _commit(change, repositories) if edge.exact else ""
            if commit:
                said.append(f"The commit is {commit}.")
        if edge.hidden:
            count = f"{edge.hidden} candidate{'s' if edge.hidden > 1 else ''}"
            said.append(f"Inside {edge} {count} could not be measured, so this is a range and no single step.")
        closed = [
            c.component
            for c in edge.changes
            if c.component in edge.high.pins and edge.high.component(c.component).external
        ]
        if closed:
            said.append(f"{', '.join(closed)}: closed binaries, so the search ends at the version.")
        if edge.pinned:
            said.append("Its components are pinned together and cannot move one by one.")
        if edge.held < 1:
            said.append(f"The posterior of this step is {edge.held:.1%}.")
        for known in _known(edge):
            said.append(f"Known: {known.title} ({known.source}).")
    if finding.kind != "interaction":
        said.append(_proof(finding))
    else:
        said.append(
            "Each alone leaves the good end good; without one of them the bad end is good."
            if finding.necessary
            else "Each alone leaves the good end good."
        )
    return [*said, *(r[:1].upper() + r[1:] + "." for r in finding.remarks)]


def _step(edge: Edge) -> str:
    return ("The joint step " if len(edge.changes) > 1 else "") + str(edge)


def _values(edge: Edge) -> str:
    if edge.low_value is None or edge.high_value is None:
        return ""
    return f" ({edge.low_value:.6g} before, {edge.high_value:.6g} after)"


def _proof(finding: Finding) -> str:
    said = {
        (True, True): "Confirmed both ways: the bad end without it is good, and the good end with it is bad.",
        (True, None): "The bad end without it is good; that it suffices could not be shown.",
        (None, True): "The good end with it is bad; that it is necessary could not be shown.",
        (False, True): "The good end with it is bad, but so is the bad end without it.",
        (True, False): "The bad end without it is good, but the good end with it is not bad.",
        (False, False): "Neither is the bad end without it good, nor the good end with it bad.",
    }
    if finding.kind == "contribution":
        said[(True, True)] = "Confirmed both ways: the bad end without it is better, and the good end with it is worse."
    return said.get((finding.necessary, finding.sufficient), "It could not be confirmed by exchanging it alone.")
