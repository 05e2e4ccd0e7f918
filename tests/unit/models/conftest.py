"""transformers' DeepseekV3ForCausalLM brought to float64: the oracle of the golden model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig
from alignment.numerics.random import portable_integers

_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")


class _Float64Torch:
    """The name ``torch`` as a module sees it, except that its float32 is float64."""

    def __getattr__(self, name: str) -> object:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


class Oracle:
    """A ``DeepseekV3ForCausalLM`` with the weights of a golden model, in float64 throughout.

    The modelling code casts norms, rope, router and softmax to float32 by name, also in a float64 model. A looser
    bound would hide what this oracle is for, so the casts themselves are neutralised: within :meth:`running`,
    ``torch.float32`` means float64 to the two modules that hold the model's arithmetic, and ``Tensor.float()`` (how
    transformers before 5 casts positions) gives doubles. Nothing else of transformers is touched.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, golden: CausalLM) -> None:
        transformers = pytest.importorskip("transformers")
        self._monkeypatch = monkeypatch
        # The grouped kernels transformers 5 prefers for experts have no float64 form.
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        config = transformers.DeepseekV3Config(**golden.config.to_hf(), **plain)
        with self.running(), warnings.catch_warnings():
            # Without shared experts transformers keeps an empty layer in their place.
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            self.model = transformers.DeepseekV3ForCausalLM(config).double().eval()
        self._load(golden)

    @contextmanager
    def running(self) -> Iterator[None]:
        import transformers.modeling_rope_utils as rope
        import transformers.models.deepseek_v3.modeling_deepseek_v3 as modeling

        before = torch.get_default_dtype()
        with self._monkeypatch.context() as patch:
            patch.setattr(rope, "torch", _Float64Torch())
            patch.setattr(modeling, "torch", _Float64Torch())
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            torch.set_default_dtype(torch.float64)
            try:
                yield
            finally:
                torch.set_default_dtype(before)

    def logits(self, input_ids: Tensor, **arguments: object) -> Tensor:
        with self.running():
            return self.model(input_ids=input_ids, use_cache=False, **arguments).logits

    def tensors(self, pick: Callable[[Tensor], Tensor | None] = lambda tensor: tensor) -> dict[str, Tensor]:
        """``pick`` of every parameter and buffer under the names on disk, one per expert."""
        named: dict[str, Tensor] = {}
        for name, tensor in _tensors_of(self.model):
            picked = pick(tensor)
            fused = _FUSED.match(name)
            if picked is None or tensor.numel() == 0:
                continue
            if not fused:
                named[name] = picked
                continue
            for expert, part in enumerate(picked):
                if fused[2] == "down_proj":
                    named[f"{fused[1]}.{expert}.down_proj.weight"] = part
                else:
                    gate, up = part.chunk(2)
                    named[f"{fused[1]}.{expert}.gate_proj.weight"] = gate
                    named[f"{fused[1]}.{expert}.up_proj.weight"] = up
        return named

    @torch.no_grad()
    def _load(self, golden: CausalLM) -> None:
        source = dict(_tensors_of(golden))
        # The slices of a fused tensor are views of it, so copying into them fills it.
        mine = self.tensors()
        assert mine.keys() == source.keys()
        for name, tensor in mine.items():
            assert tensor.dtype is torch.float64, name
            tensor.copy_(source[name])


def _tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Each parameter once, and the buffers that a checkpoint holds."""
    buffers = [(name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return [*model.named_parameters(), *buffers]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[[CausalLM], Oracle]:
    return lambda golden: Oracle(monkeypatch, golden)


@pytest.fixture
def golden() -> Callable[..., CausalLM]:
    """A golden model with seeded weights."""

    def build(config: ModelConfig, *, dtype: torch.dtype = torch.float64, seed: int = 7) -> CausalLM:
        return CausalLM(config, dtype=dtype).init_weights(seed)

    return build


@pytest.fixture
def tokens() -> Callable[..., Tensor]:
    """Seeded token ids."""

    def draw(config: ModelConfig, *shape: int, stream: str = "tokens") -> Tensor:
        return portable_integers(3, config.vocab_size, shape, seed=11, stream=stream)

    return draw


@pytest.fixture
def rounding() -> Callable[..., float]:
    """Relative distance that rounding and the order of sums may put between two computations of one model in one dtype.

    Unit roundoff times the longest sum of a layer, once per layer: first-order error analysis of a chain of dot
    products (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1).
    """

    def bound(config: ModelConfig, dtype: torch.dtype = torch.float64) -> float:
        longest = max(config.vocab_size, config.intermediate_size, config.num_attention_heads * config.v_head_dim)
        return torch.finfo(dtype).eps * longest * config.num_hidden_layers

    return bound
