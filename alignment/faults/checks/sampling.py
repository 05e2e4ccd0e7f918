"""The sampler: what is drawn, with which log-prob, for which sample; and speculative decoding, whose output follows
the target.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from alignment.backends import golden_rollout, speculative
from alignment.backends.rollout import Generation, SamplingParams
from alignment.faults import toy
from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.faults.reference import language_model, sampling
from alignment.numerics.metrics import signed_mean_difference
from alignment.numerics.precision import unit_roundoff
from alignment.numerics.random import portable_key, portable_uniform

ROLLOUT = "rollout"
TEMPERATURES = (0.7, 1.0, 1.3)
TRUNCATIONS = ((-1, 1.0), (5, 1.0), (-1, 0.8), (7, 0.7), (1, 1.0))
# The engine's log-probs are float32; a draw closer than this to the next token may fall on either.
MARGIN = unit_roundoff("float32") ** 0.5


def draws(setting: Setting) -> Iterator[Finding]:
    """Tokens and log-probs of every temperature and truncation, and of greedy decoding with ties."""
    logits = toy.normal((24, 11), setting.seed, "sampler", scale=2.0)
    uniforms = portable_uniform((24,), seed=setting.seed, stream="sampler/uniforms")
    for temperature, (top_k, top_p) in itertools.product(TEMPERATURES, TRUNCATIONS):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        tokens, log_probs = golden_rollout._sample(logits, params, uniforms)
        what = f"temperature {temperature}, top_k {top_k}, top_p {top_p}"
        golden = [sampling.distribution(row, temperature=temperature, top_k=top_k, top_p=top_p) for row in logits]
        for row, (distribution, uniform) in enumerate(zip(golden, uniforms.tolist())):
            token, room = sampling.drawn(distribution, uniform)
            if room > MARGIN and int(tokens[row]) != token:
                yield Finding(
                    stage=ROLLOUT, place="sampler.token", evidence=f"{what}: {int(tokens[row])} instead of {token}"
                )
                break
        # Of the token that was drawn, whichever it is: a wrong one is told above.
        right = torch.stack([p[t] for p, t in zip(golden, tokens.tolist())]).log()
        # float32 log-probs of the size of the smallest, and of the sums they were normalised by.
        bound = 8 * unit_roundoff("float32") * max(1.0, float(right[right.isfinite()].abs().max()))
        wrong = differs(
            log_probs, right.nan_to_num(neginf=-1e9), stage=ROLLOUT, place="sampler.log_prob", scale=1.0, bound=bound
        )
        if wrong:
            signed = signed_mean_difference(log_probs.double(), right.nan_to_num(neginf=-1e9))
            yield dataclasses.replace(
                wrong[0], evidence=f"{what}: {wrong[0].evidence}; signed mean {signed.mean:+.3g} nats"
            )
    ties = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 1.0], [-1.0, -2.0, 0.5, 0.4]], dtype=torch.float64)
    tokens, log_probs = golden_rollout._sample(ties, SamplingParams(temperature=0.0), torch.tensor([0.99, 0.5, 0.999]))
    yield from expect(
        tokens.tolist() == [1, 0, 2], stage=ROLLOUT, place="sampler.greedy",
        evidence=f"temperature 0 gives {tokens.tolist()} instead of the first maxima [1, 0, 2]",
    )  # fmt: skip
    right = language_model.log_softmax(ties).gather(-1, torch.tensor([[1], [0], [2]])).squeeze(-1)
    yield from differs(log_probs, right, stage=ROLLOUT, place="sampler.greedy", bound=8 * unit_roundoff("float32"))


def log_softmax(setting: Setting) -> Iterator[Finding]:
    """The engine's log-probs from logits of every dtype: computed in float32 at least, also for large and masked
    logits.
    """
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = (toy.normal((6, 50), setting.seed, "log_softmax", scale=4.0) - 20.0).to(dtype)
        found = golden_rollout._log_softmax(logits)
        golden = language_model.log_softmax(logits.double())
        wide = "float64" if dtype == torch.float64 else "float32"
        # The sum over the vocabulary grows the rounding of its terms like √n.
        bound = 4 * math.sqrt(50) * unit_roundoff(wide)
        yield from differs(
            found, golden, stage=ROLLOUT, place="rollout.log_softmax", what=f"{dtype} logits", bound=bound
        )


def samples(setting: Setting) -> Iterator[Finding]:
    """Samples of one prompt differ, equal keys give equal samples, and no sample depends on who else is in the
    batch.
    """
    batch = toy.ragged("plain", setting.seed)
    params = SamplingParams(max_new_tokens=5, seed=setting.seed, temperature=1.3)
    engine = _engine("plain", setting.seed)
    width = batch.prompt
    ids, mask = (t[:1, :width].expand(5, -1) for t in (batch.input_ids, batch.attention_mask))
    keys = torch.tensor([portable_key("sample", n) for n in (0, 1, 2, 3, 0)])
    made = engine.generate(ids, mask, params, keys)
    distinct = len({tuple(row) for row in made.responses[:4].tolist()})
    yield from expect(
        distinct > 1,
        stage=ROLLOUT,
        place="sampler.seed",
        evidence="four samples of one prompt with keys of their own are equal",
    )
    yield from expect(
        torch.equal(made.responses[0], made.responses[4]), stage=ROLLOUT, place="sampler.seed",
        evidence="two samples with one key are different",
    )  # fmt: skip
    alone = engine.generate(ids[2:3], mask[2:3], params, keys[2:3])
    yield from expect(
        torch.equal(alone.responses[0], made.responses[2]), stage=ROLLOUT, place="sampler.seed",
        evidence="a sample depends on the other rows of its batch",
    )  # fmt: skip


def _engine(name: str, seed: int) -> golden_rollout.GoldenRollout:
    engine = golden_rollout.GoldenRollout(toy.MODELS[name], dtype=torch.float64)
    held = dict(engine.named_parameters())
    engine.update_weights((key, tensor.to(held[key].dtype)) for key, tensor in toy.weights(name, seed).items())
    return engine


def generations(setting: Setting) -> Iterator[Finding]:
    """What an engine generates, scored by the reference at the declared temperature: log-probs, signed and absolute;
    ends of responses by either end token; greedy responses token by token.
    """
    for name, config in toy.MODELS.items():
        batch, engine = toy.ragged(name, setting.seed), _engine(name, setting.seed)
        ids, mask = batch.input_ids[:, : batch.prompt], batch.attention_mask[:, : batch.prompt]
        keys = torch.tensor([portable_key("row", row) for row in range(len(ids))])
        for temperature in (0.7, 0.0):
            params = SamplingParams(
                temperature=temperature, max_new_tokens=5, eos_token_id=config.eos_token_id, seed=setting.seed
            )
            made = engine.generate(ids, mask, params, keys)
            yield from _scored(made, batch, name, setting.seed, temperature)


def _scored(made: Generation, batch: toy.Ragged, name: str, seed: int, temperature: float) -> Iterator[Finding]:
    config, found, golden = toy.MODELS[name], [], []
    for row in range(len(made.responses)):
        response = made.responses[row].tolist()
        ends = [n for n, token in enumerate(response) if token in config.eos_token_id]
        length = ends[0] + 1 if ends else len(response)
        expected = [1] * length + [0] * (len(response) - length)
        yield from expect(
            made.response_mask[row].tolist() == expected, stage=ROLLOUT, place="rollout.response_mask",
            evidence=f"{name}, row {row}: {made.response_mask[row].tolist()} instead of {expected}",
        )  # fmt: skip
        ids = torch.cat([batch.sequences[row][: batch.prompt_lengths[row]], made.responses[row, :length]])
        with torch.no_grad():
            logits = language_model.forward(ids, toy.weights(name, seed), config)["lm_head"]
        logits = logits[batch.prompt_lengths[row] - 1 : -1]
        if temperature == 0.0:
            greedy = logits.argmax(-1)
            margin = logits.max(-1).values - logits.gather(-1, ids[-length:, None]).squeeze(-1)
            yield from expect(
                bool((margin <= MARGIN).all()), stage=ROLLOUT, place="sampler.greedy",
                evidence=f"{name}, row {row}: {ids[-length:].tolist()} instead of {greedy.tolist()}",
            )  # fmt: skip
        log_p = language_model.log_softmax(logits / (temperature or 1.0))
        golden.append(log_p.gather(-1, ids[-length:, None]).squeeze(-1))
        found.append(made.log_probs[row, :length].double())
    mine, right = torch.cat(found), torch.cat(golden)
    wrong = differs(mine, right, stage=ROLLOUT, place="sampler.log_prob", bound=8 * unit_roundoff("float32"))
    if wrong:
        signed = signed_mean_difference(mine, right)
        evidence = (
            f"{name}, temperature {temperature}: mean |Δ log p| {float((mine - right).abs().mean()):.3g}, "
            f"signed {signed.mean:+.3g} nats ({signed.z:+.1f} standard errors)"
        )
        yield dataclasses.replace(wrong[0], evidence=evidence)


GRID = 64
"""Uniforms a chance of acceptance is measured with; it is exact to one part in so many."""


def speculation(setting: Setting) -> Iterator[Finding]:
    """Whatever was drafted, and by whom, the tokens that come out follow the target: first token and second one."""
    size = 3
    p = torch.softmax(toy.normal((3, size), setting.seed, "speculative p"), dim=-1)
    q = torch.softmax(toy.normal((2, size), setting.seed, "speculative q"), dim=-1)
    grid = [(n + 0.5) / GRID for n in range(GRID)]

    def chances(draft: tuple[int, int], draft_probabilities: Tensor | None) -> tuple[list[float], list[Tensor]]:
        """Chance to keep each drafted token (where those before it were kept), and what a rejected one is drawn
        from.
        """
        accepted, instead = [], []
        for step in range(2):
            kept = 0
            for uniform in grid:
                uniforms = [0.0, 0.0]
                uniforms[step] = uniform
                tokens, then = speculative.verify(draft, p, draft_probabilities, uniforms)
                if len(tokens) > step:
                    kept += 1
                else:
                    rejected = then
            instead.append(rejected if kept < GRID else p[step])
            accepted.append(kept / GRID)
        return accepted, instead

    for kind, drafts in (("drafted with probabilities", q), ("drafted by n-grams", None)):
        for step in range(2):
            for other in range(size):
                pairs = [(token, other) if step == 0 else (other, token) for token in range(size)]
                outcomes = []
                for pair in pairs:
                    accepted, instead = chances(pair, drafts)
                    outcome = (1 - accepted[step]) * instead[step]
                    outcome[pair[step]] += accepted[step]
                    outcomes.append(outcome)
                if drafts is None:
                    # One certain draft: each must give the target by itself.
                    candidates = outcomes
                else:
                    candidates = [sum(drafts[step, token] * outcome for token, outcome in enumerate(outcomes))]
                for found in candidates:
                    yield from differs(
                        found, p[step], stage=ROLLOUT, place="sampler.speculative.verify", scale=1.0, bound=1 / GRID,
                        what=f"{kind}, token {step + 1}",
                    )  # fmt: skip


def order(setting: Setting) -> Iterator[Finding]:
    """Rows with a draft come first, and otherwise nothing changes places."""
    for rows in (5, 40, 300):
        has_draft = portable_uniform((rows,), seed=setting.seed, stream=f"drafted {rows}") < 0.5
        golden = [n for n in range(rows) if has_draft[n]] + [n for n in range(rows) if not has_draft[n]]
        found = speculative.drafted_first(has_draft).tolist()
        yield from expect(
            found == golden, stage=ROLLOUT, place="sampler.drafted_first",
            evidence=f"{rows} rows: {sum(a != b for a, b in zip(found, golden))} are in another place",
        )  # fmt: skip


CHECKS = (
    Check(
        name="sampler.log_softmax",
        layer="unit-op",
        cost=0.002,
        run=log_softmax,
        kept_because="it names the log-softmax, where draws only differ",
    ),  # fmt: skip
    Check(name="sampler.order", layer="unit-op", cost=0.002, run=order),
    Check(
        name="sampler.draws",
        layer="unit-op",
        cost=0.03,
        run=draws,
        kept_because="every rule of the sampler, of which the catalogue has a few",
    ),  # fmt: skip
    Check(name="sampler.samples", layer="unit-op", cost=0.05, run=samples),
    Check(name="sampler.speculation", layer="unit-op", cost=0.05, run=speculation),
    Check(
        name="rollout.generations",
        layer="rollout-vs-train-logprob",
        cost=0.2,
        run=generations,
        kept_because="whole responses by an engine, ends and log-probs, without looking inside",
    ),  # fmt: skip
)
