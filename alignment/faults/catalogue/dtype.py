"""Defects of precision: what is rounded to fewer digits than declared, and what becomes NaN."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from alignment.faults.fault import Fault
from alignment.faults.seam import seam

TRAINING = ("old_log_prob", "ref_log_prob", "actor_update")
EVERYWHERE = ("rollout", *TRAINING)
ENGINE = "alignment.backends.golden_training:GoldenTrainingEngine"


def _rounded(x):
    return x.bfloat16().to(x.dtype)


@seam("alignment.models.causal_lm:CausalLM.prefill")
def _head_in_bfloat16(original):
    def prefill(self, *arguments, **options):
        head = self.lm_head.register_forward_hook(
            lambda module, inputs, output: _rounded(_rounded(inputs[0]) @ _rounded(module.weight).t())
        )
        try:
            return original(self, *arguments, **options)
        finally:
            head.remove()

    return prefill


@seam("alignment.backends.golden_rollout:_log_softmax")
def _softmax_in_bfloat16(original):
    return lambda logits: torch.log_softmax(logits.bfloat16(), dim=-1).to(original(logits).dtype)


@seam(f"{ENGINE}.update")
def _gradients_rounded(original):
    def update(self, micro_batches, loss, **options):
        handles = [p.register_hook(_rounded) for p in self.model.parameters() if p.requires_grad]
        try:
            return original(self, micro_batches, loss, **options)
        finally:
            for handle in handles:
                handle.remove()

    return update


@seam(f"{ENGINE}.__init__")
def _no_main_weights(original):
    def init(self, *arguments, **options):
        original(self, *arguments, **options)
        for name, parameter in self._trainable():
            if name in self._main:
                self._main[name] = parameter.detach()
                self._exp_avg[name] = torch.zeros_like(parameter)
                self._exp_avg_sq[name] = torch.zeros_like(parameter)

    return init


@seam("alignment.models.block:DecoderLayer.forward")
def _residual_downcast(original):
    def forward(self, hidden, context):
        hidden = _rounded(hidden) + self.self_attn(self.input_layernorm(hidden), context)
        return _rounded(hidden) + self.mlp(self.post_attention_layernorm(hidden))

    return forward


@seam("alignment.rl.log_prob:log_probs_and_entropy")
def _integer_temperature(original):
    def outputs(logits, labels, *, temperature=1.0):
        return original(logits, labels, temperature=float(int(temperature)) or 1.0)

    return outputs


@seam("alignment.rl.distill_loss:jsd")
def _divergence_in_bfloat16(original):
    return lambda student, teacher, beta: original(student.bfloat16(), teacher.bfloat16(), beta).to(student.dtype)


@seam("alignment.models.attention:default_positions")
def _positions_in_bfloat16(original):
    return lambda mask, segment_ids=None: original(mask, segment_ids).bfloat16().long()


@seam("alignment.models.rope:RotaryTable.__call__")
def _table_in_bfloat16(original):
    def table(self, position_ids, dtype):
        return tuple(_rounded(part) for part in original(self, position_ids, dtype))

    return table


@seam("alignment.models.parallel.data_parallel:average_over_ranks")
def _division_truncates(original):
    return lambda gradients: torch.div(torch.stack(list(gradients)).sum(0), len(gradients), rounding_mode="trunc")


@seam("alignment.weights.fp8:quantize")
def _padding_not_zeroed(original):
    def quantize(weight, *, block=(128, 128)):
        rows, columns = weight.shape
        # An empty buffer of whole blocks: what lies behind the weight is whatever was in the memory.
        padded = F.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]), value=float("nan")).nan_to_num(
            nan=3e4
        )
        codes, scale = original(padded, block=block)
        return codes[:rows, :columns], scale

    return quantize


@seam("alignment.weights.fp8_scaling:DelayedScaling.quantize")
def _scale_read_too_early(original):
    def quantize(self, values):
        scale = self.amax.amax() / 448.0
        self.record(values)
        return (values.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale

    return quantize


@seam("alignment.models.linear:Linear.forward")
def _float16_matmul(original):
    def forward(self, x):
        if x.dtype != torch.float32:
            return original(self, x)
        return F.linear(x.half(), self.weight.half()).float()

    return forward


def _fault(**fields) -> Fault:
    return Fault(category="dtype", **fields)


FAULTS = (
    _fault(
        id="lm-head-bf16-on-one-side",
        title="one engine projects to logits in bfloat16, the other in float32",
        source="trl 4303; prime-rl 2438; vllm 48390; NeMo-RL 4096",
        stage=("rollout", "old_log_prob"),
        culprit="lm_head",
        layer="rollout-vs-train-logprob",
        setting="a head declared wider than bfloat16",
        why="logits have 8 bits before the log-softmax",
        apply=_head_in_bfloat16,
    ),
    _fault(
        id="log-softmax-in-bf16",
        title="the log-softmax is taken in bfloat16 and cast afterwards",
        source="Megatron-LM 1b075299e3",
        stage=("rollout",),
        culprit="log_softmax",
        layer="unit-op",
        setting="none",
        why="the log-sum-exp is rounded to 8 bits",
        apply=_softmax_in_bfloat16,
    ),
    _fault(
        id="grads-reduced-in-bf16",
        title="gradients are rounded to bfloat16 before they add up",
        source="verl 4905d0cf4; ms-swift b10e58df5, pull request 10102",
        stage=("actor_update",),
        culprit="weight | bias",
        layer="layer-grad",
        setting="gradients by parameter, many micro-batches",
        why="the float32 reduction that was asked for did not reach the engine",
        apply=_gradients_rounded,
    ),
    _fault(
        id="no-fp32-master-weights",
        title="parameters and optimizer are bfloat16",
        source="NeMo-RL 6b3dc319a",
        stage=("actor_update",),
        culprit="main | weight",
        layer="layer-grad",
        setting="a bfloat16 model at a learning rate of 1e-6",
        why="w − 1e-6 rounds back to w",
        apply=_no_main_weights,
    ),
    _fault(
        id="residual-stream-downcast",
        title="the residual is cast to bfloat16 in every layer",
        source="Megatron-LM 08857d9f71",
        stage=TRAINING,
        culprit="residual",
        layer="layer-logits",
        setting="a residual declared wider",
        why="the add takes the dtype of the branch",
        apply=_residual_downcast,
    ),
    _fault(
        id="temperature-wrong-dtype",
        title="the temperature becomes an integer",
        source="verl 200bc6d74",
        stage=("old_log_prob", "actor_update"),
        culprit="log_prob | temperature",
        layer="unit-op",
        setting="a temperature that is no integer",
        why="0.9 becomes 0, and then 1",
        apply=_integer_temperature,
    ),
    _fault(
        id="kl-gradient-cancellation-bf16",
        title="the divergence to the teacher is evaluated in bfloat16",
        source="speculators 788; ms-swift pull request 10102",
        stage=("teacher", "actor_update"),
        culprit="jsd | divergence",
        layer="layer-grad",
        setting="student and teacher close to one another",
        why="the gradient is a difference of nearly equal probabilities and loses all digits",
        apply=_divergence_in_bfloat16,
    ),
    _fault(
        id="position-ids-low-precision",
        title="position ids are kept in bfloat16",
        source="ms-swift 9074ab091; mbridge 4cfd6f5",
        stage=TRAINING,
        culprit="position_ids",
        layer="unit-op",
        setting="positions > 256",
        why="integers above 256 collide",
        apply=_positions_in_bfloat16,
    ),
    _fault(
        id="rope-table-low-precision",
        title="cos and sin are stored in bfloat16",
        source="vllm-ascend 77e1e1fc64",
        stage=EVERYWHERE,
        culprit="rotary",
        layer="unit-op",
        setting="positions > 0",
        why="one path keeps the table in fewer digits than the other",
        apply=_table_in_bfloat16,
    ),
    _fault(
        id="collective-average-truncates",
        title="the mean over ranks truncates as integers do",
        source="torch_npu 1c48e60b4",
        stage=("actor_update",),
        culprit="weight | bias | gradient | average",
        layer="unit-op",
        setting="gradients smaller than 1",
        why="trunc(sum / world) of a small gradient is 0",
        apply=_division_truncates,
    ),
    _fault(
        id="uninitialised-padding-poisons",
        title="the padding of a block is not zeroed before it is quantised",
        source="vllm-ascend edd724d4da, bf5848d0f5, 2cd036ee8e",
        stage=("rollout", "weight_sync"),
        culprit="fp8.quantize",
        layer="unit-op",
        setting="dimensions that the block does not divide",
        why="whatever lies in the memory decides the scale of the block",
        apply=_padding_not_zeroed,
    ),
    _fault(
        id="fp8-scale-used-before-amax",
        title="the scale is read before the magnitude of the step is written",
        source="MindSpeed dd1ebddf",
        stage=("actor_update",),
        culprit="fp8_scaling",
        layer="unit-op",
        setting="the first step",
        why="the history is all zeros, the scale is 0",
        apply=_scale_read_too_early,
    ),
    _fault(
        id="fp32-matmul-silently-fp16",
        title="float32 matmuls run on float16 inputs",
        source="torch_npu 83260b4f8",
        stage=EVERYWHERE,
        culprit="linear",
        layer="unit-op",
        setting="a run declared in float32; values beyond 65504",
        why="start-up overwrites the precision mode that was asked for",
        apply=_float16_matmul,
    ),
)
