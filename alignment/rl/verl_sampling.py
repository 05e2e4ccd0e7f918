"""verl's single-turn agent loop with a seed per sample: two runs draw equal tokens from equal distributions.

verl sends requests without a seed: what a sample draws then depends on which others happen to be in the engine's batch,
and no two runs can be compared token by token. (With ``rollout.full_determinism`` every request gets the *same* seed,
which makes all samples of a prompt equal.) Configure it, on any device, with
``actor_rollout_ref.rollout.agent.agent_loop_config_path`` naming a file that says::

    - name: paired_single_turn
      _target_: alignment.rl.verl_sampling.paired_single_turn

and ``actor_rollout_ref.rollout.agent.default_agent_loop=paired_single_turn``.
"""

from __future__ import annotations

from typing import Any

from alignment.numerics.random import portable_key

NAME = "paired_single_turn"
AGENT_LOOPS = f"- name: {NAME}\n  _target_: alignment.rl.verl_sampling.{NAME}\n"
# What a vLLM request takes, and torch's generators as well.
SEED_BITS = 63


def sample_seed(*, base: int, prompt: str, sample: int, occurrence: int) -> int:
    """The seed of one sample: of a prompt's ``sample``-th answer the ``occurrence``-th time the prompt comes up."""
    return portable_key(base, prompt, sample, occurrence) & ((1 << SEED_BITS) - 1)


def seeded(run, *, base: int, samples: int, seen: dict[tuple[str, int], int]):
    """``run(sampling_params, **fields)`` with ``sampling_params["seed"]`` set, unless the caller or validation decides.

    Args:
        run: an agent loop's coroutine.
        base: seed of the run.
        samples: samples per prompt; verl numbers the samples of a batch through (``priority``).
        seen: how often a sample of a prompt came up so far; kept by the caller.
    """

    async def run_seeded(sampling_params: dict[str, Any], **fields: Any):
        info = fields.get("extra_info")
        info = info if isinstance(info, dict) else {}
        prompt = str(info.get("prompt_id", info.get("index", fields.get("index", fields.get("raw_prompt")))))
        # The number within the prompt's samples is told by the v1 trainer; the legacy one numbers the whole batch.
        sample = int(fields["session_id"]) if "session_id" in fields else int(fields.get("priority", 0)) % samples
        occurrence = seen[prompt, sample] = seen.get((prompt, sample), -1) + 1
        occurrence = int(fields.get("global_steps", occurrence))
        seed = sample_seed(base=base, prompt=prompt, sample=sample, occurrence=occurrence)
        return await run({"seed": seed, **sampling_params}, **fields)

    return run_seeded


_SEEN: dict[tuple[str, int], int] = {}


def paired_single_turn(*arguments: Any, **named: Any):
    """verl's ``SingleTurnAgentLoop`` whose requests carry seeds; what its configuration's ``_target_`` calls."""
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    loop = SingleTurnAgentLoop(*arguments, **boundaries_by_tokenizer(named))
    rollout = loop.rollout_config
    loop.run = seeded(loop.run, base=int(rollout.seed), samples=int(rollout.n), seen=_SEEN)
    return loop


def boundaries_by_tokenizer(named: dict[str, Any]) -> dict[str, Any]:
    """An agent loop's arguments without ``hf_model_type`` where the tokenizer is not that of the model's namesake.

    Live defect of verl 0.9.1: the treatment of turn boundaries follows ``model_type``, and for ``deepseek_v3`` requires
    DeepSeek's end-of-sentence token. Moonlight has that model type and another tokenizer.
    """
    kind, tokenizer = named.get("hf_model_type"), named.get("tokenizer")
    if tokenizer is None or not str(kind).startswith(("deepseek_v2", "deepseek_v3")) or END in tokenizer.get_vocab():
        return named
    return {**named, "hf_model_type": None}


END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
