"""The golden rollout engine: :class:`alignment.models.causal_lm.CausalLM` behind the rollout protocol.

Prompts are prefilled in the expanded form of MLA, tokens decoded in the absorbed form over a latent cache, as vLLM and
vLLM-Ascend do, so a fault of the absorbed weights shows on the second token and not on the first. It behaves like those
engines where the faults of weight sync live: derived weights made after loading, sleep levels, in-place updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor, nn

from alignment.backends.rollout import (
    DerivedTensor,
    Generation,
    Probe,
    SamplingParams,
    check_load_format,
    check_prompts,
    check_streamed,
    model_config_of,
)
from alignment.devices.base import Device, get_device
from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig
from alignment.models.precision import at_least_float32
from alignment.numerics.random import portable_uniform_grid

STREAM = "rollout/tokens"
HEAD = "lm_head.weight"
_DERIVED = ("w_uk_t", "w_uv")


class GoldenRollout:
    """A rollout engine in plain PyTorch.

    Args:
        config: the model; with a checkpoint it may be None and is read from there.
        dtype: dtype of the weights and of the computation.
        device: where it runs.
        load_format: ``dummy`` draws weights from ``seed``, ``safetensors`` and ``auto`` read ``checkpoint``.
        checkpoint: a Hugging Face checkpoint directory.
        seed: seed of the dummy weights.
        alias: what ``w_uk_t`` and ``w_uv`` are. False: contiguous copies, as the Ascend plugin makes them, stale after
            every update until :meth:`process_weights_after_loading` runs again. True: views of ``kv_b_proj.weight``, as
            on a GPU.
        internal_format: on an NPU, keep ``kv_b_proj.weight`` in the FRACTAL_NZ format, as the Ascend plugin may.

    Raises:
        InputError: an unknown load format, a missing checkpoint, or a checkpoint that does not fit the model.
    """

    def __init__(
        self,
        config: ModelConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: Device | None = None,
        load_format: str = "dummy",
        checkpoint: str | Path | None = None,
        seed: int = 0,
        alias: bool = False,
        internal_format: bool = False,
    ) -> None:
        check_load_format(load_format, checkpoint)
        self.device = device or get_device("cpu")
        self.load_format, self.alias, self.internal_format = load_format, alias, internal_format
        place = {"dtype": dtype, "device": self.device.torch_device}
        if load_format == "dummy":
            self._model = CausalLM(model_config_of(config, checkpoint), **place).init_weights(seed)
        else:
            self._model = _loaded_model(config, checkpoint, place)
        self._model.requires_grad_(False).eval()
        self._sleeping = 0
        self._host: list[tuple[Tensor, Tensor | None, torch.Size]] = []  # weight, its values on the host, its shape
        self._unsynced: set[str] = set()
        if internal_format:
            self._to_internal_format()
        self.process_weights_after_loading()

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self._model.config

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self._model.dtype

    # --- weights ---------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers in the checkpoint's names, a tied head once. Refused while asleep."""
        self._require_awake("named_parameters")
        return iter(self._held().items())

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules of the model."""
        return self._model.named_modules()

    def constant_tensors(self) -> Mapping[str, str]:
        """The rotary tables: a function of the configuration alone."""
        return {"model.rotary": "cos and sin of every position, from the configuration alone"}

    def derived_tensors(self) -> dict[str, DerivedTensor]:
        """``w_uk_t`` and ``w_uv`` of every layer, with their recomputation."""
        self._require_awake("derived_tensors")
        return {
            f"{module}.{quantity}": DerivedTensor(
                tensor=getattr(attention, quantity),
                recompute=_recompute(attention, quantity),
                module=module,
                quantity=quantity,
                sources=(f"{module}.kv_b_proj.weight",),
            )
            for module, attention in self._attentions()
            for quantity in _DERIVED
        }

    def process_weights_after_loading(self) -> None:
        """Compute the derived weights from the parameters: at start-up, and after every update (verl PR 4130)."""
        self._require_awake("process_weights_after_loading")
        self._model.absorb(contiguous=not self.alias)

    @torch.no_grad()
    def update_weights(
        self, stream: Iterable[tuple[str, Tensor]], *, post_process: bool = True, partial: bool = False
    ) -> None:
        """See :meth:`alignment.backends.rollout.RolloutEngine.update_weights`.

        One streamed tensor is alive at a time; nothing of the engine is allocated anew. An update that fails half-way
        leaves the engine unusable until a complete one succeeds, instead of letting it generate with a mixture.
        """
        self._require_awake("update_weights")
        held = self._held()
        seen: set[str] = set()
        try:
            for name, tensor in stream:
                check_streamed(name, tensor, held, seen)
                held[name].copy_(tensor)
                seen.add(name)
        except BaseException:
            if seen:  # a mixture of two updates: nothing the engine holds may be used
                self._unsynced = set(held)
            raise
        missing = set(held) - seen
        if missing and not partial:
            self._unsynced = missing
            raise InputError(
                f"the update lacks {len(missing)} of {len(held)} tensors",
                where="update_weights",
                expected=_named(sorted(missing)),
                next_step="stream every tensor of the checkpoint, or say partial=True",
            )
        self._unsynced -= seen
        if post_process:
            self.process_weights_after_loading()

    def _to_internal_format(self) -> None:
        from alignment.devices import npu

        for _, attention in self._attentions():
            weight = attention.kv_b_proj.weight
            weight.data = npu.internal_format(weight.data)

    def _attentions(self) -> Iterator[tuple[str, nn.Module]]:
        for index, layer in enumerate(self._model.model.layers):
            yield f"model.layers.{index}.self_attn", layer.self_attn

    # --- sleep -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sleep(self, level: int = 1) -> None:
        """Give the weights' storage back: level 1 keeps their values on the host, level 2 keeps nothing.

        Derived weights that are views go with their parameter. Copies go to the host at level 1 and stay where they are
        at level 2, as the reported fault shows they do: with ``post_process=False`` they still hold the values of
            start-up after the sync.
        """
        self._require_awake("sleep")
        if level not in (1, 2):
            raise InputError("unknown sleep level", where="sleep", expected="1 or 2", found=level)
        self._sleeping = level
        for weight in self._weights():
            self._host.append((weight, weight.detach().to("cpu", copy=True) if level == 1 else None, weight.shape))
            weight.data = weight.new_empty(0)
        for _, attention in self._attentions():
            for quantity in _DERIVED:
                derived = getattr(attention, quantity)
                if self.alias:
                    setattr(attention, quantity, None)
                elif level == 1:
                    self._host.append((derived, derived.to("cpu", copy=True), derived.shape))
                    derived.data = derived.new_empty(0)
        self.device.empty_cache()

    @torch.no_grad()
    def wake(self) -> None:
        """Allocate the weights' storage again and, after level 1, bring their values back.

        After level 2 they are NaN, and using the engine before every one of them was synced is an error.
        """
        if not self._sleeping:
            raise InputError("the engine is awake", where="wake", expected="a sleeping engine")
        for weight, kept, shape in self._host:
            weight.data = weight.new_full(shape, float("nan"))
            if kept is not None:
                weight.copy_(kept)
        if self._sleeping == 2:
            self._unsynced = set(self._held())
        self._sleeping, self._host = 0, []
        if self.internal_format:
            self._to_internal_format()
        if self.alias:
            self._model.absorb()

    def weight_bytes(self) -> int:
        """Bytes of storage the weights hold now; 0 while asleep."""
        return sum(weight.untyped_storage().nbytes() for weight in self._weights())

    def _weights(self) -> list[Tensor]:
        return list(self._held(keep_vars=True).values())

    def _held(self, *, keep_vars: bool = False) -> dict[str, Tensor]:
        """What a checkpoint of this model stores: a tied head is the embedding's tensor and not stored."""
        state = self._model.state_dict(keep_vars=keep_vars)
        return {n: t for n, t in state.items() if not (n == HEAD and self.config.tie_word_embeddings)}

    def _require_awake(self, what: str) -> None:
        if self._sleeping:
            raise InputError(
                f"the engine is asleep (level {self._sleeping})", where=what, next_step="call wake() first"
            )

    def _require_usable(self, what: str) -> None:
        self._require_awake(what)
        if self._unsynced:
            raise InputError(
                f"{len(self._unsynced)} weights have no valid value since they were destroyed or half updated",
                where=what,
                expected="a complete weight update before the engine is used",
                found=_named(sorted(self._unsynced)),
                next_step="stream all weights with update_weights()",
            )

    # --- generation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, prompts: Tensor, attention_mask: Tensor, params: SamplingParams, keys: Tensor) -> Generation:
        """See :class:`~alignment.backends.rollout.Generation` for shapes and the log-prob convention.

        The draw of a token is inverse-CDF with a Philox uniform keyed by (``params.seed``, key of the sample,
        position), taken on the CPU over float32 log-probs from the device: it depends on no generator state, no batch
        layout and no sharding.

        Args:
            prompts: int64 ``[b, p]``, left padded; the last column is real in every row.
            attention_mask: ``[b, p]``.
            params: how to sample.
            keys: int64 ``[b]``, one per sample (:func:`alignment.numerics.random.portable_key`); equal keys on equal
                prompts give equal responses.

        Raises:
            InputError: asleep, unsynced, shapes or padding that do not fit, or logits that are not finite.
        """
        self._require_usable("generate")
        check_prompts(prompts, attention_mask, keys)
        place = self.device.torch_device
        batch, steps = prompts.shape[0], params.max_new_tokens
        draws = portable_uniform_grid(params.seed, STREAM, keys, steps)
        responses = torch.full((batch, steps), params.pad_token_id, dtype=torch.int64)
        mask = torch.zeros((batch, steps), dtype=torch.int64)
        log_probs = torch.zeros((batch, steps), dtype=torch.float32)
        ends = torch.tensor(params.eos_token_ids, dtype=torch.int64)

        cache = self._model.new_cache(batch, prompts.shape[1] + steps - 1)
        logits = self._model.prefill(
            prompts.to(place), cache, attention_mask=attention_mask.to(place), logits_to_keep=1
        )[:, -1]
        rows = torch.arange(batch)  # rows of the batch that the cache still holds
        running = torch.ones(batch, dtype=torch.bool)
        for step in range(steps):
            active = rows[running]
            tokens, chosen = _sample(logits[running.to(place)], params, draws[active, step])
            responses[active, step], log_probs[active, step], mask[active, step] = tokens, chosen, 1
            running[running.clone()] = ~torch.isin(tokens, ends)
            if step + 1 == steps or not bool(running.any()):
                break
            if 2 * int(running.sum()) <= len(rows):  # half of the cache is of finished responses
                cache, rows = cache.select(running.nonzero()[:, 0].to(place)), rows[running]
                running = torch.ones(len(rows), dtype=torch.bool)
            logits = self._model.decode(
                responses[rows, step : step + 1].to(place), cache, attention_mask=running.to(place)[:, None]
            )[:, -1]
        return Generation(responses=responses.to(place), response_mask=mask.to(place), log_probs=log_probs.to(place))

    @torch.no_grad()
    def probe(self, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> Probe:
        """Log-probs of the last ``response_length`` tokens by prefill and by forced decode; see :class:`Probe`.

        Args:
            input_ids: int64 ``[b, p + r]``: prompts left padded, responses right padded.
            attention_mask: ``[b, p + r]``, non-zero at real tokens.
            response_length: r.

        Raises:
            InputError: asleep, unsynced, or shapes that do not fit.
        """
        self._require_usable("probe")
        place = self.device.torch_device
        return probe_model(self._model, input_ids.to(place), attention_mask.to(place), response_length)


def probe_model(model: CausalLM, ids: Tensor, mask: Tensor, response_length: int) -> Probe:
    """:meth:`GoldenRollout.probe` on a bare model that has its absorbed weights; tensors are on the model's device."""
    if not 1 <= response_length < ids.shape[1]:
        raise InputError(
            "the response must be shorter than the sequence",
            where="probe",
            expected=f"1 ≤ response_length < {ids.shape[1]}",
            found=response_length,
        )
    batch, length = ids.shape
    prompt = length - response_length
    check_prompts(ids[:, :prompt], mask[:, :prompt], ids[:, 0])
    targets, kept = ids[:, prompt:], mask[:, prompt:].bool()

    cache = model.new_cache(batch, length)
    logits = model.prefill(ids, cache, attention_mask=mask, logits_to_keep=response_length + 1)
    prefill = _gather_log_probs(logits[:, :-1], targets).masked_fill(~kept, 0)

    cache = model.new_cache(batch, length)
    logits = model.prefill(ids[:, :prompt], cache, attention_mask=mask[:, :prompt], logits_to_keep=1)
    columns = [_gather_log_probs(logits, targets[:, :1])]
    for step in range(response_length - 1):
        now = slice(prompt + step, prompt + step + 1)
        logits = model.decode(ids[:, now], cache, attention_mask=mask[:, now])
        columns.append(_gather_log_probs(logits, targets[:, step + 1 : step + 2]))
    return Probe(prefill=prefill, decode=torch.cat(columns, dim=1).masked_fill(~kept, 0))


def _loaded_model(config: ModelConfig | None, checkpoint: str | Path, place: Mapping) -> CausalLM:
    from alignment.weights.checkpoint import load_model

    model = load_model(checkpoint, **place)
    if config is not None and model.config != config:
        differing = [f.name for f in fields(config) if getattr(config, f.name) != getattr(model.config, f.name)]
        raise InputError(
            "the checkpoint is of another model",
            where=checkpoint,
            expected=", ".join(f"{name}={getattr(config, name)}" for name in differing),
            found=", ".join(f"{name}={getattr(model.config, name)}" for name in differing),
        )
    return model


def _recompute(attention: nn.Module, quantity: str):
    def compute() -> Tensor:
        # On the host: there a view of the weight is a view, whatever the device's formats do.
        c = attention.config
        weight = attention.kv_b_proj.weight.detach().cpu()
        per_head = weight.reshape(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        if quantity == "w_uk_t":
            return per_head[:, : c.qk_nope_head_dim].clone(memory_format=torch.contiguous_format)
        return per_head[:, c.qk_nope_head_dim :].transpose(1, 2).clone(memory_format=torch.contiguous_format)

    return compute


def _gather_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    return _log_softmax(logits).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise InputError(
            "the engine's logits are not finite",
            where="rollout",
            found="NaN or infinity",
            next_step="check the weights with alignment.backends.weight_sync.check_weight_sync",
        )
    return torch.log_softmax(logits.to(at_least_float32(logits.dtype)), dim=-1)


def _sample(logits: Tensor, params: SamplingParams, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 ``[n]`` and float32 log-probs ``[n]`` on the CPU, from logits ``[n, v]`` and uniforms ``[n]``."""
    if params.temperature == 0:
        log_probs = _log_softmax(logits).float().cpu()
        # argmax may return any of equal maxima; the first is the same on every device.
        tokens = (log_probs == log_probs.max(-1, keepdim=True).values).long().argmax(-1)
        return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]
    wide = logits.to(at_least_float32(logits.dtype))
    log_probs = _truncate(_log_softmax(wide / params.temperature).float().cpu(), params)
    cumulative = log_probs.double().exp().cumsum(-1)
    threshold = draws[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    # A draw that rounds up to the total would fall behind the last token, or onto one of probability zero.
    last = (log_probs > float("-inf")).long().cumsum(-1).argmax(-1)
    tokens = torch.minimum(tokens, last)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _truncate(log_probs: Tensor, params: SamplingParams) -> Tensor:
    vocabulary = log_probs.shape[-1]
    if (params.top_k == -1 or params.top_k >= vocabulary) and params.top_p == 1:
        return log_probs
    order = log_probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.ones_like(order.values, dtype=torch.bool)
    if params.top_k != -1:
        kept[:, params.top_k :] = False
    values = order.values.masked_fill(~kept, float("-inf")).log_softmax(-1)
    before = values.double().exp().cumsum(-1) - values.double().exp()
    kept &= (before < params.top_p) | (torch.arange(vocabulary) == 0)
    values = order.values.masked_fill(~kept, float("-inf")).log_softmax(-1)
    return torch.empty_like(log_probs).scatter_(-1, order.indices, values)


def _named(names: list[str], shown: int = 3) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest
