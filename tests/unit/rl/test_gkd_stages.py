"""The two stages: what does not change the gradient must not, and the teacher's word reaches the token it is about."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_cases import EOS, PAD, VOCAB, philox, rounding
from torch import nn

from alignment.backends.golden_training import GoldenTrainingEngine
from alignment.backends.training import OptimizerConfig
from alignment.errors import InputError
from alignment.rl.batch import Batch
from alignment.rl.distill_loss import DistillCounts, active_positions
from alignment.rl.executor import shares
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_data import Encoder, GkdSample, collate
from alignment.rl.gkd_stages import (
    TABLES,
    TeacherCache,
    ask_teacher,
    count,
    cut,
    distillation_outputs,
    place_tables,
    teacher_view,
    trim,
    update_student,
)

LAW = settings(max_examples=25, deadline=None, derandomize=True)


class Toy(nn.Module):
    """Logits from the token and its position: enough to tell every token of every row apart, padding included."""

    def __init__(self, seed: int, *, vocab: int = VOCAB, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        rng = philox(seed)
        self.table = nn.Parameter(torch.from_numpy(rng.standard_normal((VOCAB, vocab))).to(dtype))
        self.place = nn.Parameter(torch.from_numpy(rng.standard_normal((32, vocab))).to(dtype))

    def forward(self, input_ids, *, attention_mask=None, position_ids=None):
        # A running sum over real tokens only, so that a prefix matters and padding must not.
        embedded = self.table[input_ids] * attention_mask.unsqueeze(-1)
        return embedded.cumsum(1) + self.place[position_ids]


def config(**gkd) -> GkdConfig:
    return GkdConfig.from_dict(
        {"data": {"train_batch_size": 60}, "gkd": {"teacher_model": "t", "beta": 0.3, "temperature": 0.8, **gkd}}
    )


def sample(name: str, prompt: int, response: int, rng, *, on_policy: bool = False, teacher: int = 0) -> GkdSample:
    return GkdSample(
        sample_id=name,
        prompt_ids=tuple(rng.integers(2, VOCAB, prompt).tolist()),
        response_ids=(*rng.integers(2, VOCAB, response - 1).tolist(), EOS),
        response_mask=(True,) * response,
        on_policy=on_policy,
        teacher_prompt_ids=tuple(rng.integers(2, VOCAB, teacher).tolist()) if teacher else None,
    )


def some_samples(seed: int, n: int = 6, *, on_policy: bool = False, opsd: bool = False) -> list[GkdSample]:
    rng = philox(seed)
    sizes = rng.integers(1, 6, (n, 3))
    return [
        sample(f"s{i}", int(p), int(r), rng, on_policy=on_policy, teacher=int(t) if opsd else 0)
        for i, (p, r, t) in enumerate(sizes)
    ]


def batched(samples: Sequence[GkdSample]) -> Batch:
    return collate(samples, Encoder(max_length=32), dp_size=1, pad_token_id=PAD)


def student(settings: GkdConfig) -> GoldenTrainingEngine:
    return GoldenTrainingEngine(
        Toy(1),
        optimizer=OptimizerConfig(lr=1.0, clip_grad=0.0, weight_decay=0.0),
        outputs=partial(distillation_outputs, settings=settings.gkd),
        device="cpu",
    )


def scorer(settings: GkdConfig, seed: int = 2):
    engine = GoldenTrainingEngine(
        Toy(seed), optimizer=None, outputs=partial(distillation_outputs, settings=settings.gkd), device="cpu"
    )
    return lambda parts: engine.forward(parts, stage="teacher_log_prob")


def train(batches: Sequence[Batch], settings: GkdConfig, *, counts: DistillCounts | None = None):
    """One step over the shares of several ranks: the sum of their gradients, and of their metrics."""
    counts = counts or sum((count(b) for b in batches), DistillCounts(tokens=0))
    totals: dict[str, torch.Tensor] = {}
    metrics: dict[str, float] = {}
    samples = {}
    for batch in batches:
        engine, cache, gradients = student(settings), TeacherCache(), {}
        step = engine._step
        engine._step = lambda g, norm, lr, into=gradients, step=step: into.update({k: v.clone() for k, v in g.items()})
        asked = ask_teacher(scorer(settings), batch, settings, cache)
        done = update_student(engine, asked, counts, settings, cache)
        for name, gradient in gradients.items():
            totals[name] = totals.get(name, 0) + gradient
        for name, value in done.report.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
        samples |= done.samples
    return totals, metrics, samples


def assert_same(ours, theirs, tokens: int) -> None:
    """Equal up to the order in which the terms of all tokens are added."""
    for name, gradient in theirs[0].items():
        # Every token adds terms of the size of a probability divided by the temperature, times a sum over the prefix.
        room = rounding(torch.float64, tokens * VOCAB * 8, float(gradient.abs().max()) + 1.0)
        assert (ours[0][name] - gradient).abs().max() <= room
    for name, value in theirs[1].items():
        assert abs(ours[1][name] - value) <= rounding(torch.float64, tokens * VOCAB, 1.0 + abs(value))


@LAW
@given(
    seed=st.integers(0, 10_000),
    micro=st.integers(1, 6),
    k=st.sampled_from([None, 4]),
    alpha=st.sampled_from([0.0, 0.7]),
)
def test_micro_batches_change_nothing(seed, micro, k, alpha):
    batch = batched(some_samples(seed))
    whole = train([batch], config(gkd_logits_topk=k, sft_alpha=alpha))
    assert_same(train([batch], config(gkd_logits_topk=k, sft_alpha=alpha, micro_batch_size=micro)), whole, 36)


@LAW
@given(seed=st.integers(0, 10_000), ranks=st.sampled_from([2, 3, 6]), k=st.sampled_from([None, 4]))
def test_ranks_change_nothing(seed, ranks, k):
    batch = batched(some_samples(seed))
    parts = shares("update_student", batch, ranks).split(batch)
    settings = config(gkd_logits_topk=k, sft_alpha=0.5)
    assert_same(train(parts, settings), train([batch], settings), 36)


@LAW
@given(seed=st.integers(0, 10_000), order=st.permutations(range(6)), opsd=st.booleans())
def test_order_changes_nothing(seed, order, opsd):
    samples = some_samples(seed, opsd=opsd)
    ours = train([batched([samples[i] for i in order])], config())
    theirs = train([batched(samples)], config())
    assert_same(ours, theirs, 36)
    for uid, sums in theirs[2].items():
        assert ours[2][uid]["tokens"] == sums["tokens"]
        assert abs(ours[2][uid]["divergence"] - sums["divergence"]) <= rounding(
            torch.float64, 6 * VOCAB, 1 + sums["divergence"]
        )


@LAW
@given(seed=st.integers(0, 10_000), more=st.integers(1, 7), k=st.sampled_from([None, 4]))
def test_padding_changes_nothing(seed, more, k):
    batch = batched(some_samples(seed))
    wider = {}
    for name, tensor in batch.tensors.items():
        fill = {"labels": -100, "input_ids": PAD}.get(name, 0)
        wider[name] = nn.functional.pad(tensor, (0, more), value=fill) if tensor.ndim == 2 else tensor
    wide = Batch(wider, batch.meta, batch.info)
    assert_same(train([wide], config(gkd_logits_topk=k)), train([batch], config(gkd_logits_topk=k)), 36)


@LAW
@given(seed=st.integers(0, 10_000), chunk=st.integers(1, 9))
def test_chunks_change_nothing(seed, chunk):
    batch = batched(some_samples(seed))
    assert_same(train([batch], config(chunk_size=chunk)), train([batch], config()), 36)


def test_the_teacher_s_own_prompt_matters_and_is_aligned_by_label():
    """Under OPSD the student is pulled to what the teacher says behind *its* prompt, token by token."""
    samples = some_samples(3, opsd=True)
    batch = batched(samples)
    answer = ask_teacher(scorer(config()), batch, config(), TeacherCache())
    teacher = Toy(2).requires_grad_(False)
    for row, s in enumerate(samples):
        ids = torch.tensor([[*s.teacher_prompt_ids, *s.response_ids]])
        log_probs = torch.log_softmax(
            teacher(ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(ids.shape[1])[None])[0], -1
        )
        said = [float(log_probs[len(s.teacher_prompt_ids) + i - 1, t]) for i, t in enumerate(s.response_ids)]
        found = answer["teacher_token_log_probs"][row][active_positions(batch["labels"])[row]].tolist()
        assert found == pytest.approx(said, abs=rounding(torch.float64, VOCAB, 32.0))
    plain = train([batched([dataclasses.replace(s, teacher_prompt_ids=None) for s in samples])], config())
    assert abs(train([batch], config())[1]["student/loss"] - plain[1]["student/loss"]) > 1e-3


def test_a_student_equal_to_its_teacher_stays_where_it_is():
    settings = config()
    batch = batched(some_samples(5))
    engine, cache = student(settings), TeacherCache()
    asked = ask_teacher(scorer(settings, seed=1), batch, settings, cache)
    report = update_student(engine, asked, count(batch), settings, cache).report
    assert abs(report.metrics["student/loss"]) <= rounding(torch.float64, VOCAB, 32.0)
    assert report.grad_norm <= rounding(torch.float64, 36 * VOCAB, 32.0) and report.metrics["student/agreement"] == 1.0


def test_an_empty_rank_takes_part_with_zero():
    """A rank whose samples have nothing that counts: no NaN, no hang, no gradient."""
    full = batched(some_samples(7, n=2))
    empty = full.add({"labels": torch.full_like(full["labels"], -100)})
    counts = count(full)
    gradients, metrics, samples = train([empty], config(sft_alpha=0.5), counts=counts)
    assert not any(bool(g.any()) for g in gradients.values()) and metrics["student/loss"] == 0.0
    assert {s["tokens"] for s in samples.values()} == {0}
    both, alone = train([full, empty], config(), counts=counts), train([full], config(), counts=counts)
    assert_same(both, alone, 12)


def test_nothing_at_all_is_zero_and_not_nan():
    empty = batched(some_samples(7, n=2))
    empty = empty.add({"labels": torch.full_like(empty["labels"], -100)})
    _, metrics, _ = train([empty], config())
    assert metrics["student/loss"] == 0.0


@pytest.mark.parametrize("on_policy", [False, True])
def test_the_cross_entropy_counts_on_dataset_responses_only(on_policy):
    batch = batched(some_samples(9, on_policy=on_policy))
    with_sft, without = (train([batch], config(sft_alpha=a))[1] for a in (0.5, 0.0))
    assert ("student/sft_loss" in with_sft) and "student/sft_loss" not in without
    difference = with_sft["student/loss"] - without["student/loss"]
    expected = 0.5 * with_sft["student/sft_loss"]
    assert (difference == 0.0) == on_policy and difference == pytest.approx(
        expected, abs=rounding(torch.float64, 8, 32.0)
    )


def test_a_mixed_batch_divides_each_term_by_its_own_tokens():
    rng = philox(11)
    samples = [sample("d", 2, 3, rng), sample("s", 2, 5, rng, on_policy=True)]
    assert count(batched(samples)) == DistillCounts(tokens=8, sft_tokens=3)
    [alone] = [train([batched(samples[:1])], config(sft_alpha=0.5))[1]["student/sft_loss"]]
    mixed = train([batched(samples)], config(sft_alpha=0.5))[1]["student/sft_loss"]
    assert mixed == pytest.approx(alone, abs=rounding(torch.float64, VOCAB * 8, 32.0))


def test_what_the_teacher_never_scored_is_not_counted():
    batch = batched(some_samples(13, n=2))
    k, active = 3, active_positions(batch["labels"])
    tables = {
        TABLES[0]: torch.full((*active.shape, k), -2.0).masked_fill(~active.unsqueeze(-1), -math.inf),
        TABLES[1]: torch.arange(k).expand(*active.shape, k).contiguous(),
    }
    row, place = active.nonzero()[0].tolist()
    tables[TABLES[0]][row, place] = -math.inf
    with_tables = batch.add(tables)
    assert count(with_tables).tokens == int(active.sum()) - 1
    _, metrics, _ = _update_with(with_tables)
    assert math.isfinite(metrics["student/loss"])


def _update_with(batch: Batch):
    engine = student(config())
    done = update_student(engine, batch, count(batch), config(), TeacherCache())
    return engine, done.report.metrics, done.samples


def test_the_answers_for_other_samples_are_refused():
    settings, cache = config(), TeacherCache()
    asked = ask_teacher(scorer(settings), batched(some_samples(1)), settings, cache)
    other = batched(some_samples(2))
    with pytest.raises(InputError, match="update_student: the teacher has not been asked about these samples"):
        update_student(student(settings), other, count(other), settings, cache)
    update_student(student(settings), asked, count(asked), settings, cache)
    with pytest.raises(InputError, match="expected 1 micro batches that teacher_log_prob saw; found 0 kept"):
        update_student(student(settings), asked, count(asked), settings, cache)


def test_micro_batches_are_consecutive_and_each_is_cut_to_its_longest():
    batch = batched(some_samples(4, opsd=True))
    parts = cut(batch, config(micro_batch_size=2)).split(batch)
    assert [len(p) for p in parts] == [2, 2, 2]
    for part in parts:
        trimmed = trim(part)
        assert trimmed["input_ids"].shape[1] == int(part["attention_mask"].sum(1).max())
        assert trimmed["teacher_labels"].shape[1] == int(part["teacher_attention_mask"].sum(1).max())
        assert teacher_view(part)["input_ids"].shape == trimmed["teacher_input_ids"].shape


def test_tables_move_from_the_teacher_s_frame_to_the_student_s():
    batch = batched(some_samples(6, n=2, opsd=True))
    theirs, ours = active_positions(batch["teacher_labels"]), active_positions(batch["labels"])
    tables = [torch.arange(row.numel(), dtype=torch.float32).unsqueeze(-1) * -1 for row in theirs]
    ids = [torch.arange(row.numel()).unsqueeze(-1) for row in theirs]
    placed = place_tables(tables, ids, batch, k=1)
    for row in range(2):
        assert placed[TABLES[1]][row, ours[row], 0].tolist() == theirs[row].nonzero().flatten().tolist()
        assert torch.isneginf(placed[TABLES[0]][row, ~ours[row]]).all()


def test_a_larger_vocabulary_of_the_teacher():
    settings = config()
    batch, cache = batched(some_samples(8)), TeacherCache()
    engine = GoldenTrainingEngine(
        Toy(2, vocab=VOCAB + 5),
        optimizer=None,
        outputs=partial(distillation_outputs, settings=settings.gkd),
        device="cpu",
    )
    asked = ask_teacher(lambda parts: engine.forward(parts, stage="teacher_log_prob"), batch, settings, cache)
    report = update_student(student(settings), asked, count(batch), settings, cache).report
    assert math.isfinite(report.metrics["student/loss"]) and report.metrics["student/loss"] > 0
