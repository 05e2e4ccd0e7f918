"""A prefix cache saves the prompt, says what the engine says without it, and forgets it with the weights."""

import torch

from alignment.backends.prefix_cache import PrefixCachingRollout
from alignment.backends.weight_sync import stream_weights
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset


def test_a_repeated_prompt_is_answered_by_the_present_weights(monkeypatch):
    config = preset("tiny-moonlight")
    engine = PrefixCachingRollout(config, dtype=torch.float64)
    prompt, response = torch.arange(3, 9), torch.arange(20, 24)
    prefills = []
    prefill = CausalLM.prefill
    monkeypatch.setattr(
        CausalLM, "prefill", lambda self, ids, *a, **k: (prefills.append(ids.shape[1]), prefill(self, ids, *a, **k))[1]
    )
    answers = []
    for seed in (5, 6):
        engine.update_weights(stream_weights(CausalLM(config, dtype=torch.float64).init_weights(seed)))
        first, second = (engine.forced_log_probs(prompt, response) for _ in range(2))
        assert torch.equal(first, second)
        ids = torch.cat([prompt, response])[None]
        probe = engine.probe(ids, torch.ones_like(ids), len(response)).decode[0]
        torch.testing.assert_close(first, probe)
        answers.append(first)
    assert not torch.equal(*answers)
    assert prefills.count(len(prompt)) == 2 + 2, "one per update, and one for each probe"
