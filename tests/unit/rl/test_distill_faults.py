"""Public defects of distillation, put into the seams of the product: each is caught by a check that knows no defect.

A check is a law or an identity on small inputs; it passes as the product is, and fails with any of its defects switched on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import pytest
import torch
from rl_cases import EOS, PAD, VOCAB, philox, rounding

from alignment.backends.golden_training import GoldenTrainingEngine
from alignment.backends.training import OptimizerConfig
from alignment.devices.base import get_device
from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.rl import distill_loss, gkd_data, gkd_stages, vocab_parallel
from alignment.rl.contracts import check
from alignment.rl.distill_loss import DistillCounts, TeacherTokens
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_data import Encoder, GkdSample, collate
from alignment.rl.gkd_stages import TeacherCache, ask_teacher, count, update_student
from alignment.rl.teacher_colocated import ColocatedTeacher
from alignment.rl.teacher_replicas import GoldenReplica, TeacherReplicas
from alignment.weights import checkpoint

MODEL = dataclasses.replace(preset("tiny-moonlight"), num_hidden_layers=1, vocab_size=VOCAB, initializer_range=0.3)


def logits(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(philox(seed).standard_normal(shape)) * 2


# Checks: each raises AssertionError or the product's own InputError.


def check_limits_of_the_divergence() -> None:
    """Near its ends the quotient is the KL divergence of that end, and the ends are not each other's."""
    student, teacher = (torch.log_softmax(logits(5, 9, seed=s) / 2, -1) for s in (1, 2))
    forward = (teacher.exp() * (teacher - student)).sum(-1)
    reverse = (student.exp() * (student - teacher)).sum(-1)
    step = 1e-6
    # The next term of the quotient's expansion is of the order of the step times χ², which e⁴ bounds here.
    room = step * math.exp(4.0)
    for beta, goal, scale in (
        (0.0, forward, 1.0),
        (1.0, reverse, 1.0),
        (step, forward, step),
        (1 - step, reverse, step),
    ):
        assert ((distill_loss.jsd(student, teacher, beta) / scale - goal).abs() <= room).all()


def check_a_student_that_is_its_teacher() -> None:
    """No loss and no gradient, at a temperature and for narrow logits."""
    for dtype in (torch.float64, torch.bfloat16):
        student = logits(6, 11, seed=3).to(dtype).requires_grad_()
        value, _ = distill_loss.token_divergence(
            student, TeacherTokens(logits=student.detach().clone()), beta=0.3, temperature=0.6
        )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert value.dtype == wide and value.abs().max() <= rounding(
            wide, 11, float(student.detach().abs().max()) / 0.6
        )


def check_float32_for_narrow_logits() -> None:
    student, teacher = (logits(6, 33, seed=s).bfloat16() for s in (4, 5))
    value, _ = distill_loss.token_divergence(student, TeacherTokens(logits=teacher), beta=0.5, temperature=0.7)
    exact, _ = distill_loss.token_divergence(
        student.double(), TeacherTokens(logits=teacher.double()), beta=0.5, temperature=0.7
    )
    size = float(torch.maximum(student.abs().max(), teacher.abs().max())) / 0.7
    assert (value.double() - exact).abs().max() <= rounding(torch.float32, 33, size)


def check_finite_with_forbidden_tokens_and_open_slots() -> None:
    """A value and a gradient for every token that counts, whatever the padding holds."""
    student = logits(3, 8, seed=6).requires_grad_()
    tables = TeacherTokens(
        topk_log_probs=torch.tensor([[-0.1, -3.0], [-0.2, -math.inf], [-math.inf, -math.inf]]).double(),
        topk_indices=torch.tensor([[1, 2], [3, 0], [0, 0]]),
    )
    for beta in (0.0, 0.3, 1.0):
        value, _ = distill_loss.token_divergence(student, tables, beta=beta)
        (gradient,) = torch.autograd.grad(value.sum(), student)
        assert torch.isfinite(value).all() and torch.isfinite(gradient).all()


def check_top_k_of_a_split_vocabulary() -> None:
    whole = logits(4, 12, seed=7)
    values, ids = vocab_parallel.vocab_parallel_top_k(whole.split(4, -1), 3)
    expected = whole.topk(3)
    assert torch.equal(values, expected.values) and torch.equal(ids, expected.indices)


def check_micro_batches() -> None:
    """One step's loss does not depend on how the batch is cut."""
    losses = []
    for size in (None, 1):
        settings = config(micro_batch_size=size)
        batch, cache = collated(samples()), TeacherCache()
        student = engine(settings, seed=1, optimizer=OptimizerConfig())
        teacher = engine(settings, seed=2)
        asked = ask_teacher(lambda parts: teacher.forward(parts, stage="teacher_log_prob"), batch, settings, cache)
        losses.append(update_student(student, asked, count(batch), settings, cache).report.metrics["student/loss"])
    assert abs(losses[0] - losses[1]) <= rounding(torch.float32, 12 * VOCAB, 1.0)


def check_both_views_hold_the_response() -> None:
    """A sample whose two views are cut: by one rule, or refused."""
    long = [dataclasses.replace(s, teacher_prompt_ids=s.prompt_ids[:1] * 9) for s in samples()]
    batch = collate(long, Encoder(max_length=8, truncation_strategy="left"), dp_size=1, pad_token_id=PAD)
    check("teacher_log_prob", batch, moment="before")


def check_the_teacher_is_the_checkpoint_s(tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("teacher")
    checkpoint.save_checkpoint(folder, MODEL, CausalLM(MODEL).init_weights(2).state_dict())
    ColocatedTeacher(config(teacher_model=str(folder)), device=get_device("cpu"))


def check_tables_are_about_their_tokens(tmp_path_factory) -> None:
    """Replicas and the teacher's log-prob of the token that stands there agree, position by position."""
    folder = tmp_path_factory.mktemp("replica")
    checkpoint.save_checkpoint(folder, MODEL, CausalLM(MODEL).init_weights(2).state_dict())
    settings = config(teacher_model=str(folder), gkd_logits_topk=VOCAB)
    replica = GoldenReplica(settings, device=get_device("cpu"))
    check("teacher_log_prob", TeacherReplicas([replica.prompt_log_probs], k=VOCAB).score(collated(samples())))


# What they need.


def config(**gkd) -> GkdConfig:
    return GkdConfig.from_dict({"data": {"train_batch_size": 4}, "gkd": {"teacher_model": "t", "beta": 0.3, **gkd}})


def samples() -> list[GkdSample]:
    rng = philox(9)
    return [
        GkdSample(
            sample_id=f"s{i}",
            prompt_ids=tuple(rng.integers(3, VOCAB, p).tolist()),
            response_ids=(*rng.integers(3, VOCAB, r - 1).tolist(), EOS),
            response_mask=(True,) * r,
        )
        for i, (p, r) in enumerate([(2, 1), (3, 5), (4, 2), (2, 4)])
    ]


def collated(made: list[GkdSample]):
    return collate(made, Encoder(max_length=16), dp_size=1, pad_token_id=PAD)


def engine(settings: GkdConfig, *, seed: int, optimizer: OptimizerConfig | None = None) -> GoldenTrainingEngine:
    return GoldenTrainingEngine(
        CausalLM(MODEL).init_weights(seed),
        optimizer=optimizer,
        outputs=partial(gkd_stages.distillation_outputs, settings=settings.gkd),
        device="cpu",
    )


# Defects, in seams of the product.


@contextlib.contextmanager
def patched(where: object, name: str, wrap: Callable) -> Iterator[None]:
    with mock.patch.object(where, name, wrap(getattr(where, name))):
        yield


def own_counts(original):
    def distill(settings, counts, outputs, micro_batch):
        tokens = int(distill_loss.active_positions(micro_batch["labels"]).sum())
        return original(settings, DistillCounts(tokens=tokens), outputs, micro_batch)

    return distill


def masked_after_exp(original):
    def kl(p_log, q_log):
        return (p_log.exp() * (p_log - q_log) * (p_log > -1e30)).sum(-1)

    return kl


def untempered_teacher(original):
    def divergence(student, teacher, *, beta, temperature=1.0, **more):
        return original(
            student, TeacherTokens(logits=teacher.logits * temperature), beta=beta, temperature=temperature, **more
        )

    return divergence


def other_end_cut(original):
    def encode(made, encoder):
        ours, _ = original(made, encoder)
        other = dataclasses.replace(encoder, truncation_strategy="right")
        return ours, [gkd_data.encode_view(s.teacher_prompt_ids, s, other) for s in made]

    return encode


def student_s_numbers(original):
    return lambda folder: dataclasses.replace(original(folder), rope_theta=MODEL.rope_theta * 2, rms_norm_eps=1e-3)


def next_position(original):
    def place(log_probs, indices, batch, *, k):
        return original([t.roll(1, 0) for t in log_probs], [t.roll(1, 0) for t in indices], batch, k=k)

    return place


def in_half(original):
    return lambda *tensors: tensors


DEFECTS = {
    "jsd-mixture-weights-swapped": (
        distill_loss, "mixture", lambda f: lambda s, t, beta: f(t, s, beta), check_limits_of_the_divergence,
    ),
    "kl-div-arguments-swapped": (
        distill_loss, "kl_divergence", lambda f: lambda p, q: f(q, p), check_limits_of_the_divergence,
    ),
    "ends-by-the-mixture": (
        distill_loss, "jsd", lambda f: lambda s, t, beta: f(s, t, min(max(beta, 1e-7), 1 - 1e-7)), check_limits_of_the_divergence,
    ),
    "teacher-scored-at-other-temperature": (
        distill_loss, "token_divergence", untempered_teacher, check_a_student_that_is_its_teacher,
    ),
    "jsd-in-half-precision": (distill_loss, "_widened", in_half, check_float32_for_narrow_logits),
    "padding-sentinel-overflows-exp": (
        distill_loss, "kl_divergence", masked_after_exp, check_finite_with_forbidden_tokens_and_open_slots,
    ),
    "vocab-parallel-topk-local-ids": (
        vocab_parallel, "local_top_k", lambda f: lambda x, k, *, start: f(x, k, start=0), check_top_k_of_a_split_vocabulary,
    ),
    "distill-loss-per-micro-batch": (gkd_stages, "distill_loss", own_counts, check_micro_batches),
    "student-teacher-truncated-differently": (
        gkd_data, "encode_samples", other_end_cut, check_both_views_hold_the_response,
    ),
    "teacher-built-with-student-config": (
        checkpoint, "load_config", student_s_numbers, check_the_teacher_is_the_checkpoint_s,
    ),
    "teacher-shifted-by-one-token": (
        "alignment.rl.teacher_replicas", "place_tables", next_position, check_tables_are_about_their_tokens,
    ),
}  # fmt: skip


def run(checking: Callable, tmp_path_factory) -> None:
    checking(tmp_path_factory) if checking.__code__.co_argcount else checking()


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught_and_the_product_is_not(name, tmp_path_factory):
    where, attribute, wrap, checking = DEFECTS[name]
    if isinstance(where, str):
        import importlib

        where = importlib.import_module(where)
    run(checking, tmp_path_factory)
    with patched(where, attribute, wrap), pytest.raises((AssertionError, InputError)):
        run(checking, tmp_path_factory)
    run(checking, tmp_path_factory)
