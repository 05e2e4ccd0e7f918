"""What ``alignment rollout`` shows: the responses, their statistics and the verdicts."""

from __future__ import annotations

from collections.abc import Callable

from alignment.report.terminal import explain, headline
from alignment.rl.config import TrainConfig
from alignment.rl.rollout_only import RolloutOnly, rollout_only

SHOWN_CHARACTERS = 240


def rollout_command(
    config: TrainConfig, *, prompts: int = 4, device: str | None = None, emit: Callable[[str], None] = print
) -> RolloutOnly:
    """Run the rollout stage of ``config`` alone and write what it generated, line by line, to ``emit``.

    The exit code is ``alignment.numerics.verdict.exit_code(result.verdicts)``.
    """
    result = rollout_only(config, prompts=prompts, device=device)
    for line in lines(result):
        emit(line)
    return result


def lines(result: RolloutOnly) -> list[str]:
    """The view as plain lines."""
    shown = [f"{len(result.samples)} responses of {result.engine}"]
    for sample in result.samples:
        end = "ended" if sample.ended else "cut at the limit"
        shown += [
            "",
            f"{sample.prompt_id}: {_short(sample.prompt)}",
            f"  {_short(sample.text)}",
            f"  {sample.tokens} tokens, {end}; repetition {sample.compression_ratio:.2f}, "
            f"surprisal {sample.surprisal_ratio:.2f} of uniform, unreadable {sample.unreadable:.0%}",
        ]
    shown.append("")
    for verdict in result.verdicts:
        shown += explain(verdict).splitlines()
    return [*shown, headline(result.verdicts)]


def _short(text: str) -> str:
    flat = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return flat if len(flat) <= SHOWN_CHARACTERS else f"{flat[:SHOWN_CHARACTERS]} … ({len(flat)} characters)"
