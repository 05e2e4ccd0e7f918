"""What a worker gets of the environment, and what nobody is to read in Ray's."""

from __future__ import annotations

from alignment.rl.forwarded import forwarded, without_secrets


def test_what_may_be_a_secret_is_parted_from_the_rest(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("HF_TOKEN", "hunter3")
    shown, withheld = without_secrets(forwarded())
    assert withheld["VLLM_API_KEY"] == "hunter2" and "hunter2" not in shown.values()
    assert shown["VLLM_LOGGING_LEVEL"] == "ERROR" and "VLLM_LOGGING_LEVEL" not in withheld
    assert "HF_TOKEN" not in {**shown, **withheld}  # never forwarded
    assert {**shown, **withheld} == forwarded()
