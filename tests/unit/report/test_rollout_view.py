"""The inference-only run as people see it."""

from __future__ import annotations

from alignment.numerics.verdict import Outcome
from alignment.report.rollout_view import SHOWN_CHARACTERS, lines
from alignment.rl.rollout_only import RolloutOnly, Sample, check_text


def result(text: str, **changes) -> RolloutOnly:
    fields = dict(tokens=7, ended=True, compression_ratio=1.2, surprisal_ratio=0.25, unreadable=0.0, **{})
    sample = Sample(prompt_id="sum-01", prompt="1 + 1 =", text=text, **{**fields, **changes})
    return RolloutOnly(
        engine="golden", samples=(sample,), verdicts=(check_text([sample], subject="golden", device="cpu"),)
    )


def test_prompt_response_and_statistics_are_shown():
    shown = lines(result("2"))
    assert shown[:5] == [
        "1 responses of golden",
        "",
        "sum-01: 1 + 1 =",
        "  2",
        "  7 tokens, ended; repetition 1.20, surprisal 0.25 of uniform, unreadable 0%",
    ]
    assert shown[-1] == "ALIGNED: 1 pass"


def test_garbled_text_is_named_and_cannot_disturb_the_terminal():
    garbled = result("\x1b[31m中\ufffd", unreadable=0.5, ended=False)
    assert garbled.verdicts[0].outcome is Outcome.FAIL
    shown = "\n".join(lines(garbled))
    assert "\x1b" not in shown and "\\x1b[31m中" in shown
    assert "cut at the limit" in shown and "most text is no language" in shown
    assert "MISALIGNED: 1 fail" in shown


def test_long_text_is_cut():
    shown = lines(result("x" * (SHOWN_CHARACTERS + 5)))[3]
    assert shown.endswith(f"… ({SHOWN_CHARACTERS + 5} characters)")
