"""Distillation: the divergence and its gradient, the teacher's tables, both views of a sample, and the update they
make.

β on both sides of ½ and at the ends, T ≠ 1, student and teacher far apart, rows the teacher never scored, ragged
tables, vocabularies of two sizes, a vocabulary over ranks, samples that are too long, and micro batches of unequal
length.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.faults.reference import distillation as textbook
from alignment.faults.reference.toy_policy import ToyPolicy, forward_alone
from alignment.numerics.random import portable_integers, portable_normal

STAGE, UPDATE = "teacher", "actor_update"
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
IGNORED = -100


def _logits(seed: int, name: str, *shape: int) -> Tensor:
    return 3 * portable_normal(shape, seed=seed, stream=f"distillation/{name}")


def divergence(setting: Setting) -> Iterator[Finding]:
    """Every β and T over a whole vocabulary, by rows that lie far apart; the pieces first, then what is made of
    them.
    """
    from alignment.rl import distill_loss as product

    student, teacher = _logits(setting.seed, "student", 5, 7), _logits(setting.seed, "teacher", 5, 7)
    ours, theirs = (torch.log_softmax(x, -1) for x in (student, teacher))
    where = {"stage": STAGE}
    golden = (theirs.exp() * (theirs - ours)).sum(-1)
    yield from differs(product.kl_divergence(theirs, ours), golden, place="distill_loss.kl_divergence", **where)
    forbidden = theirs.clone()
    forbidden[:, 2] = forbidden[1, 4] = -torch.inf
    forbidden = torch.log_softmax(forbidden, -1)
    kept = torch.where(torch.isneginf(forbidden), 0.0, forbidden.exp() * (forbidden - ours)).sum(-1)
    found = product.kl_divergence(forbidden, ours)
    yield from differs(found, kept, place="distill_loss.kl_divergence", what="tokens the teacher forbids", **where)
    both = torch.log_softmax(ours.masked_fill(torch.isneginf(forbidden), -torch.inf), -1)
    kept = torch.where(torch.isneginf(forbidden), 0.0, forbidden.exp() * (forbidden - both)).sum(-1)
    leaf = both.clone().requires_grad_()
    found = product.kl_divergence(forbidden, leaf)
    yield from differs(found, kept, place="distill_loss.kl_divergence", what="slots open on both sides", **where)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    golden = torch.where(torch.isneginf(forbidden), 0.0, -forbidden.exp())
    yield from differs(
        gradient, golden, place="distill_loss.kl_divergence", what="gradient with slots open on both sides", **where
    )
    for beta in (0.1, 0.9):
        mixed = torch.log(beta * theirs.exp() + (1 - beta) * ours.exp())
        found = product.mixture(ours, theirs, beta)
        yield from differs(found, mixed, place="distill_loss.mixture", what=f"β = {beta}", **where)
    for beta in BETAS:
        golden = textbook.divergence(student, teacher, beta=beta, temperature=1.0)
        found = product.jsd(ours, theirs, beta)
        yield from differs(found, golden, place="distill_loss.jsd", what=f"β = {beta}", **where)
    for temperature in (1.0, 0.6):
        for beta in BETAS:
            leaf = student.clone().requires_grad_()
            golden = textbook.divergence(leaf, teacher, beta=beta, temperature=temperature)
            (right,) = torch.autograd.grad(golden.sum(), leaf)
            name = "token_divergence" if temperature == 1.0 else "token_divergence.temperature"
            what = f"β = {beta}, T = {temperature:g}"
            said = product.TeacherTokens(logits=teacher)
            found, agreement = product.token_divergence(leaf, said, beta=beta, temperature=temperature, chunk_size=3)
            yield from differs(found, golden, place=f"distill_loss.{name}", what=what, **where)
            (gradient,) = torch.autograd.grad(found.sum(), leaf)
            yield from differs(gradient, right, stage=UPDATE, place=f"distill_loss.{name}", what=f"gradient, {what}")
            same = (student.argmax(-1) == teacher.argmax(-1)).double()
            yield from differs(agreement.double(), same, place="distill_loss.agreement", what=what, **where)


def tables(setting: Setting) -> Iterator[Finding]:
    """The teacher's most likely tokens: over ranks, ragged, missing, through an engine's answer; and two
    vocabularies.
    """
    from alignment.rl import batch as batches
    from alignment.rl import distill_loss as product
    from alignment.rl import gkd_stages, prompt_log_probs, vocab_parallel

    seed, k = setting.seed, 3
    student, teacher = _logits(seed, "student", 5, 8), _logits(seed, "teacher", 5, 8)
    order = teacher.argsort(-1, descending=True)[:, :k]
    for cut in ([4, 4], [2, 3, 3], [8], [1, 7]):
        values, ids = vocab_parallel.vocab_parallel_top_k(list(teacher.split(cut, -1)), k)
        same = torch.equal(ids, order)
        where = {"stage": STAGE, "place": "vocab_parallel.top_k"}
        yield from expect(same, evidence=f"vocabulary in {cut}: {ids.tolist()} instead of {order.tolist()}", **where)
        if same:
            yield from differs(values, teacher.gather(-1, order), what=f"vocabulary in {cut}", **where)
    log_probs = torch.log_softmax(teacher, -1).gather(-1, order)
    log_probs[2, 1:] = log_probs[4] = -torch.inf
    for beta, temperature in ((0.0, 1.0), (0.1, 0.6), (0.5, 2.5), (0.9, 1.0), (1.0, 0.6)):
        leaf = student.clone().requires_grad_()
        said = product.TeacherTokens(topk_log_probs=log_probs, topk_indices=order)
        found, _ = product.token_divergence(leaf, said, beta=beta, temperature=temperature, chunk_size=2)
        golden = torch.zeros(5, dtype=torch.float64)
        rows = []
        for row in range(4):
            n = int((~torch.isneginf(log_probs[row])).sum())
            rows.append(
                textbook.divergence(
                    leaf[row, order[row, :n]][None], log_probs[row, :n][None], beta=beta, temperature=temperature
                )
            )
        golden[:4] = torch.cat(rows).detach()
        what = f"β = {beta}, T = {temperature:g}, ragged rows"
        place = "distill_loss.token_divergence.kl_divergence.topk"
        yield from differs(found, golden, stage=STAGE, place=place, what=what)
        (right,) = torch.autograd.grad(torch.cat(rows).sum(), leaf)
        (gradient,) = torch.autograd.grad(found.sum(), leaf)
        yield from differs(gradient, right, stage=UPDATE, place=place, what=f"gradient, {what}")
    longer = torch.cat([teacher, _logits(seed, "more", 5, 2)], -1)
    for ours, theirs, width in ((student, longer, 10), (longer, student, 10)):
        found = product.align_vocabularies(ours, theirs)
        short, long = (found[0], found[1]) if ours.shape[-1] == 8 else (found[1], found[0])
        golden = torch.cat([student, longer[:, 8:]], -1)
        yield from expect(
            short.shape[-1] == width and long.shape[-1] == width,
            stage=STAGE,
            place="distill_loss.align_vocabularies",
            evidence=f"widths {short.shape[-1]} and {long.shape[-1]}",
        )
        yield from differs(short, golden, stage=STAGE, place="distill_loss.align_vocabularies")
        yield from differs(long, longer, stage=STAGE, place="distill_loss.align_vocabularies")
    ours = torch.tensor([[IGNORED, IGNORED, 5, 6, IGNORED], [IGNORED, 7, IGNORED, 8, 9]])
    theirs = torch.tensor([[IGNORED, 5, 6, IGNORED, IGNORED, IGNORED], [IGNORED, IGNORED, IGNORED, 7, 8, 9]])
    said = [_logits(seed, f"frame/{row}", 6, 2).float() for row in range(2)]
    ids = [torch.arange(12).view(6, 2) + 20 * row for row in range(2)]
    view = batches.Batch({"labels": ours, "teacher_labels": theirs})
    placed = gkd_stages.place_tables(said, ids, view, k=2)
    values, tokens = placed[gkd_stages.TABLES[0]], placed[gkd_stages.TABLES[1]]
    moved = {(0, 1): (0, 0), (0, 2): (0, 1), (1, 0): (1, 2), (1, 2): (1, 3), (1, 3): (1, 4)}
    right = torch.full_like(values, -torch.inf)
    for (row, here), (_, there) in moved.items():
        right[row, here] = said[row][there]
    same = torch.equal(values, right) and all(
        torch.equal(tokens[row, here], ids[row][there]) for (row, here), (_, there) in moved.items()
    )
    yield from expect(same, stage=STAGE, place="gkd_stages.place_tables", evidence=f"{values.tolist()}")
    kept = gkd_stages.active_tables(view.add(placed))[gkd_stages.TABLES[0]]
    golden = torch.stack([right[place] for place in moved])
    yield from differs(kept, golden.double(), stage=STAGE, place="gkd_stages.active_tables")
    whole = torch.log_softmax(_logits(seed, "prompt", 6, 8), -1)
    ids = portable_integers(0, 8, (6,), seed=seed, stream="distillation/prompt").tolist()
    parsed = prompt_log_probs.parse_prompt_log_probs(prompt_log_probs.entries_from_log_probs(whole, ids, k=k), ids, k=k)
    best = whole.topk(k, -1)
    where = {"stage": STAGE, "place": "prompt_log_probs"}
    yield from differs(parsed.log_probs[:-1].double(), best.values[:-1].float().double(), **where)
    yield from expect(
        torch.equal(parsed.indices[:-1], best.indices[:-1]) and bool(torch.isneginf(parsed.log_probs[-1]).all()),
        evidence=f"ids {parsed.indices.tolist()}",
        **where,
    )


def _sample(gkd_data, number: int, prompt: list[int], response: list[int], counted: list[int], other: list[int] | None):
    return gkd_data.GkdSample(
        sample_id=f"s{number}",
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        response_mask=tuple(bool(c) for c in counted),
        on_policy=bool(number % 2),
        teacher_prompt_ids=None if other is None else tuple(other),
    )


def views(setting: Setting) -> Iterator[Finding]:
    """Both views of samples, short and too long: the same response tokens count in the same order, cut on the same
    side.
    """
    from alignment.rl import distill_loss, gkd_data

    drawn = portable_integers(3, 90, (60,), seed=setting.seed, stream="distillation/views").tolist()
    plan = ((4, 3, 4), (2, 5, 2), (6, 4, 6))
    samples, at = [], 0
    for number, (p, r, t) in enumerate(plan):
        prompt, response, other = drawn[at : at + p], drawn[at + p : at + p + r], drawn[40 : 40 + t]
        counted = [1] * r
        counted[1] = int(number != 1)
        samples.append(_sample(gkd_data, number, prompt, response, counted, other))
        at += p + r
    for strategy, limit in (("delete", 12), ("left", 8), ("right", 8), ("left", 6)):
        encoder = gkd_data.Encoder(max_length=limit, truncation_strategy=strategy)
        ours, theirs = gkd_data.encode_samples(samples, encoder)
        for sample, mine, other in zip(samples, ours, theirs):
            for name, view, prompt in (
                ("student", mine, sample.prompt_ids),
                ("teacher", other, sample.teacher_prompt_ids),
            ):
                ids = [*prompt, *sample.response_ids]
                labels = [IGNORED] * len(prompt) + [
                    token if c else IGNORED for token, c in zip(sample.response_ids, sample.response_mask)
                ]
                part = slice(-limit, None) if strategy == "left" else slice(0, limit)
                ids, labels = ids[part], labels[part]
                labels[0] = IGNORED
                evidence = f"{sample.sample_id}, {strategy} at {limit}: {list(view.input_ids)}, {list(view.labels)}"
                yield from expect(
                    (list(view.input_ids), list(view.labels)) == (ids, labels),
                    stage=STAGE,
                    place=f"encode_samples.{name}",
                    evidence=evidence,
                )
    encoder = gkd_data.Encoder(max_length=12)
    batch = gkd_data.collate(samples, encoder, dp_size=1, pad_token_id=0)
    for row, sample in enumerate(samples):
        for prefix, prompt in (("", sample.prompt_ids), ("teacher_", sample.teacher_prompt_ids)):
            ids = [*prompt, *sample.response_ids]
            width = batch[f"{prefix}input_ids"].shape[1]
            golden = ids + [0] * (width - len(ids))
            found = batch[f"{prefix}input_ids"][row].tolist()
            yield from expect(found == golden, stage=STAGE, place=f"collate.{prefix}input_ids", evidence=f"{found}")
            mask = [1] * len(ids) + [0] * (width - len(ids))
            found = batch[f"{prefix}attention_mask"][row].tolist()
            yield from expect(found == mask, stage=STAGE, place=f"collate.{prefix}attention_mask", evidence=f"{found}")
            positions = batch[f"{prefix}position_ids"][row, : len(ids)].tolist()
            yield from expect(
                positions == list(range(len(ids))),
                stage=STAGE,
                place=f"collate.{prefix}position_ids",
                evidence=f"{positions}",
            )
        found = int(batch["dataset_response"][row])
        yield from expect(found == 1 - row % 2, stage=STAGE, place="collate.dataset_response", evidence=f"{found}")
    labels = torch.tensor([[IGNORED, IGNORED, 5, 6, IGNORED]])
    shifted = distill_loss.shift_labels(labels)
    yield from expect(
        shifted.tolist() == [[IGNORED, 5, 6, IGNORED, IGNORED]],
        stage=STAGE,
        place="distill_loss.shift_labels",
        evidence=f"{shifted.tolist()}",
    )
    active = distill_loss.active_positions(labels)
    yield from expect(
        active.tolist() == [[False, True, True, False, False]],
        stage=STAGE,
        place="distill_loss.active_positions",
        evidence=f"{active.tolist()}",
    )
    try:
        distill_loss.require_same_active(labels, torch.tensor([[IGNORED, 5, 7, IGNORED]]))
        yield Finding(stage=STAGE, place="distill_loss.require_same_active", evidence="other tokens are let through")
    except InputError:
        pass


class Words:
    """A tokenizer of one token per word; 1 begins a turn and 2 ends a response."""

    eos_token_id = 2

    def encode(self, text: str) -> list[int]:
        """The words by their length."""
        return [10 + len(word) for word in text.split()]

    def encode_chat(self, messages) -> list[int]:
        """Each turn behind its mark."""
        return [token for message in messages for token in (1, *self.encode(message["content"]))]


def selection(setting: Setting) -> Iterator[Finding]:
    """From conversations to samples, from samples to those that fit, and what an answer of the student makes of
    them.
    """
    from alignment.rl import distill_loss
    from alignment.rl import gkd_data as product

    words, talk = (
        Words(),
        [
            {"role": "user", "content": "a bb"},
            {"role": "assistant", "content": "ccc"},
            {"role": "user", "content": "dddd"},
            {"role": "assistant", "content": "ee ff"},
        ],
    )
    where = {"stage": STAGE}
    for extra, theirs in (
        ({}, None),
        ({"teacher_prompt": "x yyyyy"}, (1, 11, 12, 1, 13, 1, 11, 15)),
        ({"teacher_messages": [{"role": "user", "content": "zz"}]}, (1, 12)),
    ):
        sample = product.conversation_sample({"messages": talk, "id": 7, **extra}, words)
        found = (sample.prompt_ids, sample.response_ids, sample.response_mask, sample.teacher_prompt_ids)
        right = ((1, 11, 12, 1, 13, 1, 14), (12, 12, 2), (True,) * 3, theirs)
        yield from expect(
            found == right,
            place="gkd_data.conversation_sample",
            evidence=f"{extra}: {found} instead of {right}",
            **where,
        )
    answered = sample.stripped().answered([5, 6], [1, 0])
    found = (answered.on_policy, answered.response_ids, answered.response_mask, sample.on_policy)
    yield from expect(
        found == (True, (5, 6), (True, False), False), place="gkd_data.GkdSample.answered", evidence=f"{found}", **where
    )
    sized = [
        _sample(product, i, [3] * p, [4] * r, [1] * r, [5] * t) for i, (p, r, t) in enumerate(((4, 2, 1), (1, 2, 5)))
    ]
    for limit in range(4, 9):
        encoder = product.Encoder(max_length=limit - 1).extended(1)
        found = [encoder.fits(s) for s in sized]
        right = [max(len(s.prompt_ids), len(s.teacher_prompt_ids)) + 2 <= limit for s in sized]
        yield from expect(
            found == right, place="gkd_data.Encoder.fits", evidence=f"{found} instead of {right} at {limit}", **where
        )
    total = distill_loss.DistillCounts(tokens=5, sft_tokens=1) + distill_loss.DistillCounts(tokens=7, sft_tokens=3)
    found = (total.tokens, total.sft_tokens)
    yield from expect(found == (12, 4), place="distill_loss.DistillCounts", evidence=f"a sum of {found}", **where)
    found = product.numbered(["a", "b", "a", "a"])
    yield from expect(found == ["a#0", "b#0", "a#1", "a#2"], place="gkd_data.numbered", evidence=f"{found}", **where)
    pool = [[_sample(product, 10 * k + i, [3] * n, [4], [1], None) for i, n in enumerate((1, 9))] for k in range(4)]
    rounds = iter(pool[1:])
    kept, missed = product.resample(
        pool[0], fits=lambda s: len(s.prompt_ids) < 5, more=lambda: next(rounds), max_resample_times=2
    )
    found = ([s.sample_id for s in kept], missed)
    yield from expect(found == (["s0", "s10"], 1), place="gkd_data.resample", evidence=f"{found}", **where)
    sets = [product.SampleSet([one]).content_hash for one in (sample, answered, sized[0])]
    again = product.SampleSet([product.GkdSample.from_json(sample.to_json())]).content_hash
    yield from expect(
        len(set(sets)) == 3 and again == sets[0], place="gkd_data.SampleSet.content_hash", evidence=f"{sets}", **where
    )


def update(setting: Setting) -> Iterator[Finding]:
    """What the teacher says about a batch, and the student's gradients from it, whole and in micro batches."""
    from alignment.backends import golden_training
    from alignment.backends.training import OptimizerConfig
    from alignment.faults.checks.training import Watched
    from alignment.rl import gkd_config, gkd_data, gkd_stages

    seed, alpha, vocab = setting.seed, 0.4, 13
    student, teacher = ToyPolicy(seed=seed), ToyPolicy(seed=seed + 1)
    drawn = portable_integers(3, vocab, (60,), seed=seed, stream="distillation/update").tolist()
    samples, at = [], 0
    for number, (p, r) in enumerate(((4, 3), (2, 6), (5, 1), (3, 4))):
        prompt, response = drawn[at : at + p], drawn[at + p : at + p + r]
        samples.append(_sample(gkd_data, number, prompt, response, [1] * r, drawn[-p - 1 :]))
        at += p + r
    batch = gkd_data.collate(samples, gkd_data.Encoder(max_length=20), dp_size=1, pad_token_id=0)
    tokens, supervised = 14, 4
    for beta, temperature, k in ((0.1, 0.7, None), (0.7, 1.6, 4)):
        total, said = torch.zeros((), dtype=torch.float64), []
        for sample in samples:
            p, r = len(sample.prompt_ids), len(sample.response_ids)
            ours = forward_alone(student, [*sample.prompt_ids, *sample.response_ids])[p - 1 : p + r - 1]
            q = len(sample.teacher_prompt_ids)
            with torch.no_grad():
                theirs = forward_alone(teacher, [*sample.teacher_prompt_ids, *sample.response_ids])[q - 1 : q + r - 1]
            labels = torch.tensor(sample.response_ids)
            said.append(torch.log_softmax(theirs, -1)[torch.arange(r), labels])
            support = theirs.topk(k or vocab, -1).indices
            total = (
                total
                + textbook.divergence(
                    ours.gather(-1, support), theirs.gather(-1, support), beta=beta, temperature=temperature
                ).sum()
                / tokens
            )
            if not sample.on_policy:
                log_p = torch.log_softmax(ours, -1)[torch.arange(r), labels]
                total = total - alpha * log_p.sum() / supervised
        rights = torch.autograd.grad(total, list(student.parameters()))
        for size in (None, 1) if k else (2,):
            settings = gkd_config.GkdSettings(
                beta=beta,
                temperature=temperature,
                sft_alpha=alpha,
                gkd_logits_topk=k,
                micro_batch_size=size,
                chunk_size=3,
            )
            config = SimpleNamespace(gkd=settings)
            outputs = partial(gkd_stages.distillation_outputs, settings=settings)
            asked = golden_training.GoldenTrainingEngine(teacher, optimizer=None, device="cpu", outputs=outputs)
            watched = Watched()
            learner = golden_training.GoldenTrainingEngine(
                student,
                optimizer=OptimizerConfig(lr=0.0, weight_decay=0.0),
                device="cpu",
                outputs=outputs,
                ranks=watched,
            )
            cache = gkd_stages.TeacherCache()
            scored = gkd_stages.ask_teacher(partial(_whole_forward, asked), batch, config, cache)
            what = f"β = {beta}, T = {temperature:g}, top-k {k}, micro batches of {size}"
            for row, (sample, right) in enumerate(zip(samples, said)):
                p, r = len(sample.prompt_ids), len(sample.response_ids)
                found = scored["teacher_token_log_probs"][row, p - 1 : p + r - 1]
                yield from differs(
                    found, right, stage=STAGE, place="gkd_stages.teacher_outputs.token_log_probs", what=what
                )
            counts = gkd_stages.count(scored)
            yield from expect(
                (counts.tokens, counts.sft_tokens) == (tokens, supervised),
                stage=UPDATE,
                place="gkd_stages.count",
                evidence=f"{counts}",
            )
            report = gkd_stages.update_student(learner, scored, counts, config, cache).report
            micro = {"micro-batches": -(-4 // (size or 4))}
            for (name, _), found, right in zip(student.named_parameters(), watched.seen[0], rights):
                yield from differs(
                    found,
                    right,
                    stage=UPDATE,
                    place=f"gkd_stages.distill_loss.gradient.{name}",
                    what=what,
                    ratios=micro,
                )
            del report


def _whole_forward(engine, micro_batches):
    """A frozen engine's answers, without the check of finiteness by response mask that these outputs do not have."""
    return engine.forward(micro_batches, stage="teacher_log_prob")


def adapters(setting: Setting) -> Iterator[Finding]:
    """A low-rank adapter: forward, merged weights and export agree, and the model without it is what it was."""
    from alignment.rl import lora

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 6, bias=False, dtype=torch.float64)
            self.second = torch.nn.Linear(6, 3, bias=False, dtype=torch.float64)
            for n, p in self.named_parameters():
                p.data = portable_normal(p.shape, seed=setting.seed, stream=f"distillation/lora/{n}")

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    model = Two()
    plain = {n: p.detach().clone() for n, p in model.named_parameters()}
    x = portable_normal((5, 4), seed=setting.seed, stream="distillation/lora/x")
    before = model(x).detach()
    adapted = lora.LoraModel(model, lora.LoraSettings(rank=2, alpha=3.0))
    yield from differs(
        adapted(x), before, stage=UPDATE, place="lora.forward", what="an adapter that has learned nothing"
    )
    merged = {}
    for name in plain:
        up, down = adapted.up[name.replace(".", "/")], adapted.down[name.replace(".", "/")]
        up.data = portable_normal(up.shape, seed=setting.seed, stream=f"distillation/lora/up/{name}")
        merged[name] = plain[name] + 1.5 * (up.detach() @ down.detach())
    golden = torch.tanh(x @ merged["first.weight"].T) @ merged["second.weight"].T
    for name, right in merged.items():
        yield from differs(adapted.merged_weight(name), right, stage=UPDATE, place=f"lora.merged_weight.{name}")
    yield from differs(adapted(x), golden, stage=UPDATE, place="lora.forward")
    yield from differs(adapted.base(x), before, stage=STAGE, place="lora.base", what="the adapter disabled")
    exported = dict(adapted.merged_state())
    for name, right in merged.items():
        yield from differs(exported[name], right, stage="weight_sync", place=f"lora.merged_state.{name}")


def schedule(setting: Setting) -> Iterator[Finding]:
    """Which generations are on-policy: the share, the sequence of the seed, and the same after a resume."""
    import random

    from alignment.rl import gkd_data

    drawn = random.Random(setting.seed)
    golden = [drawn.random() < 0.3 for _ in range(40)]
    one = gkd_data.OnPolicySchedule(lmbda=0.3, seed=setting.seed)
    first = [one.draw() for _ in range(17)]
    state = one.state_dict()
    one = gkd_data.OnPolicySchedule(lmbda=0.3, seed=setting.seed)
    one.load_state_dict(state)
    found = first + [one.draw() for _ in range(23)]
    for place, mine, right in (
        ("OnPolicySchedule.draw", found[:17], golden[:17]),
        ("OnPolicySchedule.load_state_dict", found[17:], golden[17:]),
    ):
        yield from expect(mine == right, stage="rollout", place=place, evidence=f"{mine} instead of {right}")


CHECKS = (
    Check(
        name="distillation.schedule",
        layer="unit-op",
        cost=0.001,
        run=schedule,
        kept_because="the on-policy schedule is no entry of the catalogue",
    ),
    Check(
        name="distillation.divergence",
        layer="unit-op",
        cost=0.02,
        run=divergence,
        kept_because="it names the piece of the divergence, where tables and updates only differ",
    ),
    Check(
        name="distillation.selection",
        layer="unit-op",
        cost=0.002,
        run=selection,
        kept_because="which samples are trained on is no entry of the catalogue",
    ),
    Check(name="distillation.tables", layer="unit-op", cost=0.03, run=tables),
    Check(name="distillation.views", layer="unit-op", cost=0.002, run=views),
    Check(
        name="distillation.adapters",
        layer="unit-op",
        cost=0.005,
        run=adapters,
        kept_because="adapters are no entry of the catalogue",
    ),
    Check(name="distillation.update", layer="layer-grad", cost=0.1, run=update),
)
