"""The three kinds of teacher, and that they say the same."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from rl_cases import PAD, philox

from alignment.devices.base import get_device
from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.rl.contracts import check
from alignment.rl.distill_loss import active_positions
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_data import Encoder, GkdSample, collate
from alignment.rl.gkd_stages import TABLES, TeacherCache, active_tables, ask_teacher
from alignment.rl.teacher import require_own_config
from alignment.rl.teacher_colocated import ColocatedTeacher
from alignment.rl.teacher_replicas import GoldenReplica, TeacherReplicas
from alignment.weights.checkpoint import save_checkpoint

MODEL = dataclasses.replace(preset("tiny-moonlight"), num_hidden_layers=2, vocab_size=30, initializer_range=0.3)
K = 4


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    save_checkpoint(folder, MODEL, CausalLM(MODEL).init_weights(5).state_dict())
    return folder


def config(teacher, **gkd) -> GkdConfig:
    tree = {"data": {"train_batch_size": 4}, "gkd": {"teacher_model": str(teacher), "gkd_logits_topk": K, **gkd}}
    return GkdConfig.from_dict(tree)


def batch(*, opsd: bool = False):
    rng = philox(1)
    samples = [
        GkdSample(
            sample_id=f"s{i}",
            prompt_ids=tuple(rng.integers(3, 30, p).tolist()),
            response_ids=tuple(rng.integers(3, 30, r).tolist()),
            response_mask=(True,) * r,
            teacher_prompt_ids=tuple(rng.integers(3, 30, p + 2).tolist()) if opsd else None,
        )
        for i, (p, r) in enumerate([(2, 4), (5, 1), (3, 3), (1, 5)])
    ]
    return collate(samples, Encoder(max_length=32), dp_size=1, pad_token_id=PAD)


@pytest.mark.parametrize("opsd", [False, True])
def test_replicas_say_what_a_teacher_on_the_worker_says(teacher, opsd):
    """Two paths to one table: logits cut to their k best, and prompt log-probs of a server, parsed and moved."""
    settings, given = config(teacher), batch(opsd=opsd)
    device = get_device("cpu")
    cache = TeacherCache()
    on_worker = ask_teacher(ColocatedTeacher(settings, device=device).score, given, settings, cache)
    served = TeacherReplicas([GoldenReplica(settings, device=device).prompt_log_probs], k=K).score(given)
    check("teacher_log_prob", on_worker)
    check("teacher_log_prob", served)
    [said] = cache.said
    tables = active_tables(served)
    # Batched with padding or alone, float32: a sum over the hidden width per layer.
    room = (
        torch.finfo(torch.float32).eps
        * MODEL.hidden_size
        * MODEL.num_hidden_layers
        * float(said[TABLES[0]].abs().max())
    )
    assert (tables[TABLES[0]] - said[TABLES[0]]).abs().max() <= room
    assert torch.equal(tables[TABLES[1]], said[TABLES[1]])
    gap = (on_worker["teacher_token_log_probs"] - served["teacher_token_log_probs"]).abs().max()
    assert gap <= room and bool(served["teacher_token_log_probs"].any())


def test_an_off_by_one_table_fails_the_contract(teacher):
    """The public defect: rows that belong to the next position."""
    settings, given = config(teacher, gkd_logits_topk=30), batch()
    served = TeacherReplicas([GoldenReplica(settings, device=get_device("cpu")).prompt_log_probs], k=30).score(given)
    active = active_positions(given["labels"])
    shifted = {}
    for name in TABLES:
        moved = served[name].clone()
        moved[active] = served[name][active].roll(1, dims=0)
        shifted[name] = moved
    with pytest.raises(
        InputError, match="the table and the teacher's log-prob disagree about the token that stands there"
    ):
        check("teacher_log_prob", served.add(shifted))


@pytest.mark.parametrize(
    ("n", "replicas", "expected"), [(7, 3, [3, 3, 1]), (4, 3, [2, 2]), (2, 3, [1, 1]), (6, 2, [3, 3]), (5, 1, [5])]
)
def test_sequences_are_shared_out_in_order(n, replicas, expected):
    """⌈n / replicas⌉ consecutive sequences for each, some with none; answers keep the order."""
    sizes: dict[int, int] = {}

    def replica(i):
        def answer(sequences, k):
            sizes[i] = len(sequences)
            return [("answer", s[0]) for s in sequences]

        return answer

    made = TeacherReplicas([replica(i) for i in range(replicas)], k=2)
    assert made.ask([[i] for i in range(n)]) == [("answer", i) for i in range(n)]
    assert [sizes[i] for i in sorted(sizes)] == expected


def test_replicas_work_at_the_same_time():
    """Each waits for the other: asked one after the other they would wait for ever."""
    meeting = threading.Barrier(2, timeout=60)

    def answer(sequences, k):
        meeting.wait()
        return [None for _ in sequences]

    assert len(TeacherReplicas([answer, answer], k=1).ask([[1], [2]])) == 2


def test_a_missing_answer_is_refused():
    with pytest.raises(
        InputError, match="teacher replicas: the replicas did not answer every sequence; expected 2; found 1"
    ):
        TeacherReplicas([lambda sequences, k: [None]], k=1).ask([[1], [2]])
    with pytest.raises(InputError, match="gkd.teacher_replicas: there are no teacher replicas"):
        TeacherReplicas([], k=1)


def test_a_teacher_that_waits_on_the_host(teacher):
    settings = config(teacher, offload_teacher_model=True)
    made = ColocatedTeacher(settings, device=get_device("cpu"))
    with pytest.raises(InputError, match="the training engine is offloaded"):
        made.engine.forward([], stage="teacher_log_prob")
    given = batch()
    answer = ask_teacher(made.score, given, settings, TeacherCache())
    assert bool(answer["teacher_token_log_probs"].any())
    with pytest.raises(InputError, match="the training engine is offloaded"):
        made.engine.forward([], stage="teacher_log_prob")


def test_a_teacher_built_from_another_configuration_is_refused(teacher):
    require_own_config(CausalLM(MODEL), teacher)
    with pytest.raises(
        InputError, match="rope_theta: the teacher was not built from its own configuration; expected .*; found 1234"
    ):
        require_own_config(CausalLM(dataclasses.replace(MODEL, rope_theta=1234.0)), teacher)
