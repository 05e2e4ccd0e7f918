"""The memory model against the published table, and against counts made another way."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from typer.testing import CliRunner

from alignment.cli import app
from alignment.diagnose import memory_model as model
from alignment.diagnose.memory_model import GB, RolloutPlan, TrainingPlan, estimate
from alignment.errors import InputError
from alignment.models.config import preset
from alignment.weights.checkpoint import expected_shapes
from alignment.weights.megatron_layout import ParallelSizes

V3 = preset("deepseek-v3-671b")
SIZES = ParallelSizes(
    tensor_model_parallel_size=8,
    pipeline_model_parallel_size=16,
    expert_model_parallel_size=16,
    expert_tensor_parallel_size=1,
    num_layers_in_first_pipeline_stage=3,
    num_layers_in_last_pipeline_stage=2,
)
TOKENS = {"tokens": 4096, "tensor_parallel": 8}


def digits(published: str) -> int:
    return len(published.partition(".")[2])


@pytest.mark.parametrize(
    "published, computed",
    [
        ("0.246582031", lambda: model.logits_bytes(V3.vocab_size, **TOKENS)),
        ("0.006835938", lambda: model.embedding_bytes(V3, **TOKENS)),
        ("0.15435791", lambda: model.dense_layer_bytes(V3, **TOKENS)),
        ("0.578186035", lambda: model.moe_layer_bytes(V3, **TOKENS)),
        (
            "34.2444458",
            lambda: (
                3 * model.dense_layer_bytes(V3, **TOKENS)
                + 58 * model.moe_layer_bytes(V3, **TOKENS)
                + model.logits_bytes(V3.vocab_size, **TOKENS)
            ),
        ),
        ("0.253417969", lambda: model.embedding_bytes(V3, **TOKENS) + model.logits_bytes(V3.vocab_size, **TOKENS)),
        ("35", lambda: model.logits_bytes(128 * 1024, tokens=5 * 14 * 1024)),
    ],
    ids=["logits", "embedding", "dense layer", "MoE layer", "no recompute", "full recompute", "dynamic batching"],
)
def test_the_published_figures_to_all_printed_digits(published, computed):
    assert f"{computed() / GB:.{digits(published)}f}" == published


def whole(recompute: str, **changes):
    plan = TrainingPlan(recompute=recompute, recompute_num_layers=61, element_bytes=2, **changes)
    sizes = ParallelSizes(tensor_model_parallel_size=8, expert_model_parallel_size=16, expert_tensor_parallel_size=1)
    return estimate(V3, dataclasses.replace(plan, sizes=sizes), RolloutPlan()).stages[0]


def test_the_published_sums_are_those_of_one_stage_with_all_layers():
    """The estimate adds up what the table adds up: 3 dense, 58 MoE and the loss; or embedding and loss alone."""
    kept = whole("none")
    assert f"{(kept.activations + kept.logits) / GB:.7f}" == "34.2444458"
    full = whole("full")
    assert (full.activations, f"{(full.embedding + full.logits) / GB:.9f}") == (0, "0.253417969")


def test_selective_recomputation_drops_the_scores_and_nothing_else():
    fused, scores = whole("none").activations, whole("none", fused_attention=False).activations
    assert scores - fused == 61 * 128 // 8 * 4096 * 4096 * 2
    assert whole("selective", fused_attention=False).activations == fused


@pytest.mark.parametrize("name", ("tiny-moonlight", "tiny-deepseek", "moonlight-16b-a3b"))
def test_parameters_of_one_rank_are_those_of_the_checkpoint(name):
    config = preset(name)
    ((dense, routed),) = model.stage_parameters(config, ParallelSizes())
    shapes = expected_shapes(config)
    assert dense + routed == sum(map(math.prod, shapes.values()))
    assert routed == sum(math.prod(s) for n, s in shapes.items() if ".experts." in n)


def test_the_671b_model_has_671_billion_parameters():
    ((dense, routed),) = model.stage_parameters(V3, ParallelSizes())
    assert round((dense + routed) / 1e9) == 671


def test_stages_and_ranks_add_up_to_the_model():
    """Sum over stages and ranks of what is cut, with what is replicated counted once."""
    config = preset("tiny-deepseek")
    one = model.stage_parameters(config, ParallelSizes())[0]
    sizes = ParallelSizes(
        pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=1,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )
    two = model.stage_parameters(config, sizes)
    assert sum(dense for dense, _ in two) == one[0]
    assert 2 * sum(routed for _, routed in two) == one[1]


@pytest.mark.parametrize("virtual, expected", [(1, [4, 3, 2, 1]), (2, [11, 9, 7, 5])])
def test_micro_batches_in_flight(virtual, expected):
    """1F1B holds as many as there are stages after (and with) one; interleaving holds more, in smaller chunks."""
    sizes = ParallelSizes(
        pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None
    )
    assert [model.in_flight(sizes, stage, None) for stage in range(4)] == expected
    assert model.in_flight(sizes, 0, 1) == virtual


def test_the_mask_of_an_unfused_prefill_is_what_ran_out_of_memory():
    place = {"rows": 8, "length": 4096, "tensor_parallel": 8}
    broadcast = model.mask_bytes(V3, fused=False, **place)
    assert broadcast == 8 * 16 * 4096 * 4096
    assert model.mask_bytes(V3, fused=True, **place) == 2048 * 2048


def test_buffers_of_hccl():
    assert model.hccl_bytes(20) == 20 * 400 * 1024**2
    assert model.hccl_bytes(1, buffer_mb=100) == 200 * 1024**2
    alone = model.communicators(ParallelSizes(), 1, RolloutPlan())
    assert alone == 1 < model.communicators(SIZES, 2, RolloutPlan(tensor_parallel=8, expert_parallel=64))


def test_more_than_the_card_holds_is_said_with_what_would_fit():
    """The out-of-memory of the field: garbled text runs every response to the limit, and the logits grow with it."""
    plan = TrainingPlan(sizes=SIZES, sequence_length=14 * 1024, micro_batch=5, data_parallel=2, recompute="full")
    found = estimate(V3, plan, RolloutPlan(tensor_parallel=8, expert_parallel=64))
    late = [line for line in found.advice if line.startswith("update_actor")]
    assert late and "tokens in a micro batch would fit" in late[0]
    fitting = int(late[0].partition("; ")[2].split()[0])
    smaller = dataclasses.replace(plan, micro_batch=1, sequence_length=fitting)
    refitted = estimate(V3, smaller, RolloutPlan(tensor_parallel=8, expert_parallel=64))
    worst = max(stage.phases["update_actor"] for stage in refitted.stages)
    assert worst <= refitted.card_bytes * 1.01


FIELD = ("memory", "estimate", "deepseek-v3-671b", "--tp", "8", "--pp", "16", "--ep", "16", "--etp", "1",
         "--first-pp", "3", "--last-pp", "2", "--dp", "2")  # fmt: skip


@pytest.mark.parametrize(("arguments", "phase", "fits"), [
    ((), "rollout", "--rollout-ep 32"),
    (("--rollout-ep", "64"), "update_actor", "--recompute full"),
    (("--rollout-ep", "64", "--sequences", "6000"), "rollout", "--sequences 134"),
    (("--rollout-ep", "64", "--recompute", "full", "--card-gb", "30"), "old_log_prob", "--optimizer-offload"),
    (("--rollout-ep", "64", "--unfused-attention", "--sequence", "16384"), "update_actor",
     "--recompute full --optimizer-offload"),
    (("--rollout-ep", "64", "--recompute", "full", "--optimizer-offload", "--card-gb", "8"), "update_actor", ""),
])  # fmt: skip
def test_what_would_fit_is_printed_and_fits(arguments, phase, fits):
    """The first change that is enough, by the options of this command: with them the phase is no longer named."""

    def told(*more: str) -> list[str]:
        shown = CliRunner().invoke(app, [*FIELD, *arguments, *more])
        assert shown.exit_code in (0, 1), shown.output
        return [line for line in shown.stdout.splitlines() if line.startswith(f"{phase}: stage ")]

    (line,) = told()
    if not fits:
        assert line.endswith("; it takes more pipeline, tensor or expert parallel ranks")
        assert told("--dp", "16")
        return
    assert f"; {fits} would fit" in line
    assert not told(*fits.split())


def test_one_row_more_than_would_fit_does_not():
    plan = TrainingPlan(sizes=SIZES, data_parallel=2, recompute="full")
    rollout = RolloutPlan(tensor_parallel=8, expert_parallel=64, sequences=6000)
    (line,) = estimate(V3, plan, rollout).advice
    rows = int(line.partition("--sequences ")[2].split()[0])
    assert estimate(V3, plan, dataclasses.replace(rollout, sequences=rows)).advice == ()
    assert estimate(V3, plan, dataclasses.replace(rollout, sequences=rows + 1)).advice


def test_the_layout_of_the_table_is_3_and_14_times_4_and_2():
    stages = estimate(V3, TrainingPlan(sizes=SIZES, data_parallel=2), RolloutPlan(tensor_parallel=8)).stages
    assert [stage.layers for stage in stages] == [(3, 0), *[(0, 4)] * 14, (0, 2)]


def test_elements_per_token_are_the_published_sum():
    """3h + q_lora + 3·kv_lora + rope + 2·n_h·q_head_dim + 2·n_h·v_head_dim (+ 3·ffn), with the numbers of the 671B."""
    attention = 3 * 7168 + 1536 + 3 * 512 + 64 + 2 * 128 * (128 + 64) + 2 * 128 * 128
    assert model.attention_elements(V3) == attention
    assert model.dense_layer_bytes(V3, tokens=1, tensor_parallel=8) == (attention + 3 * 18432) * 2 / 8
    routed, shared = (7 * 7168 + 3 * 2048) * 8, 3 * 2048
    assert model.moe_layer_bytes(V3, tokens=1, tensor_parallel=8) == ((attention + routed) / 8 + shared) * 2


def test_optimizer_states_are_shared_by_every_rank_that_holds_equal_weights():
    """Context parallel ranks are replicas, and experts have replicas of their own even without data parallelism."""
    config = preset("tiny-deepseek")

    def optimizer(dp: int = 1, **sizes: int) -> int:
        plan = TrainingPlan(sizes=ParallelSizes(**sizes), data_parallel=dp)
        return estimate(config, plan, RolloutPlan()).stages[0].optimizer

    assert optimizer(context_parallel_size=2) == optimizer(dp=2) == optimizer() // 2
    dense, routed = model.stage_parameters(
        config, ParallelSizes(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    )[0]
    spread = optimizer(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    assert spread == 12 * (dense + routed // 2)


def test_later_stages_keep_the_inputs_of_their_first_layer_under_full_recomputation():
    plan = TrainingPlan(sizes=SIZES, recompute="full", data_parallel=2)
    stages = estimate(V3, plan, RolloutPlan(tensor_parallel=8, expert_parallel=64)).stages
    one_input = model.embedding_bytes(V3, **TOKENS)
    assert stages[1].activations == round(4 * one_input * stages[1].in_flight)
    assert stages[0].activations == round(2 * one_input * stages[0].in_flight)


def test_the_command_prints_stages_and_exits_by_fit():
    arguments = ["memory", "estimate", "deepseek-v3-671b", "--tp", "8", "--pp", "16", "--ep", "16", "--etp", "1"]
    arguments += ["--first-pp", "3", "--last-pp", "2", "--dp", "2", "--recompute", "full", "--rollout-ep", "64"]
    fits = CliRunner().invoke(app, arguments)
    assert fits.exit_code == 0, fits.output
    assert "peak: 53.33 GB in update_actor on stage 1, of 64 GB" in fits.output
    assert "it fits: 10.67 GB are left on the fullest card" in fits.output
    tight = CliRunner().invoke(app, [*arguments, "--card-gb", "20", "--json"])
    assert tight.exit_code == 1
    document = json.loads(tight.output)
    assert document["advice"] and document["peak"]["bytes"] > 20 * GB
    assert len(document["stages"]) == 16


def test_bad_sizes_are_refused():
    with pytest.raises(InputError, match="num_attention_heads = 128"):
        estimate(V3, TrainingPlan(sizes=ParallelSizes(tensor_model_parallel_size=3)), RolloutPlan())
    with pytest.raises(InputError, match="(?s)recompute.*none, selective or full"):
        TrainingPlan(recompute="some")
    with pytest.raises(InputError, match="sequences"):
        RolloutPlan(sequences=0)
    refused = CliRunner().invoke(app, ["memory", "estimate", "deepseek-v3"])
    assert isinstance(refused.exception, InputError) and "deepseek-v3-671b" in str(refused.exception)
