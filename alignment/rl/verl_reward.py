"""verl's ``reward.custom_reward_function`` over this project's verifiers: one function, called once per response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """``score`` (−1 or +1, before overlong shaping) and ``acc`` of one response, by ``alignment.rl.scoring``."""
    # verl loads this file by its path; everything else comes from the installed package.
    from alignment.rl.scoring import score_response

    metadata = (extra_info or {}).get("metadata") or None
    found = score_response(data_source, solution_str, ground_truth, metadata=metadata)
    return {"score": found.score, "acc": found.acc}
