"""Modules, losses, optimizers, autocast and autograd on the emulated NPU give what the CPU gives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from alignment.devices import emulated_npu

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(not emulated_npu.is_installed(), reason="tests the emulated NPU; run with --emulate-npu"),
]

SEED = 7


def normal(*shape: int, seed: int = SEED) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rounding_only(npu: torch.Tensor, cpu: torch.Tensor, terms: int) -> None:
    """Equal but for the order of sums of ``terms`` float32 products: |difference| <= eps * terms * largest value."""
    bound = torch.finfo(torch.float32).eps * terms * cpu.detach().abs().max().clamp(min=1)
    difference = (npu.detach().cpu() - cpu.detach()).abs().max()
    assert difference <= bound, f"differs by {difference}, rounding explains {bound}"


class TinyTransformer(nn.Module):
    vocabulary, width, length = 64, 32, 16

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, self.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(self.width, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, self.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def train(device: str, optimizer=torch.optim.AdamW, steps: int = 3, autocast: bool = False, **options):
    torch.manual_seed(SEED)
    model = TinyTransformer().to(device)
    tokens = torch.randint(0, model.vocabulary, (2, model.length)).to(device)
    optimizer = optimizer(model.parameters(), lr=1e-2, **options)
    losses, norms = [], []
    for _ in range(steps):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = model(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), torch.tensor(norms), model


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or ",".join(value) or "default",
)
def test_training_steps(optimizer, options):
    cpu_losses, cpu_norms, cpu_model = train("cpu", optimizer, **options)
    npu_losses, npu_norms, npu_model = train("npu", optimizer, **options)
    # Attention takes another path on the CPU. An Adam step divides by the gradient's own size, so what rounding leaves
    # of an almost vanishing gradient enters the next loss at full learning rate: allow one eps per parameter.
    parameters = sum(p.numel() for p in cpu_model.parameters())
    assert_rounding_only(npu_losses, cpu_losses, parameters)
    assert_rounding_only(npu_norms, cpu_norms, parameters)
    assert all(p.device.type == "npu" and p.grad.device.type == "npu" for p in npu_model.parameters())
    assert npu_losses[-1] < npu_losses[0]


def test_a_wrong_learning_step_is_seen():
    cpu_losses, _, model = train("cpu")
    npu_losses, _, _ = train("npu", weight_decay=1.0)
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_rounding_only(npu_losses, cpu_losses, sum(p.numel() for p in model.parameters()))


def test_autocast_dtypes():
    x = normal(4, 4).npu()
    with torch.autocast("npu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert F.linear(x, x).dtype == torch.bfloat16
        assert F.softmax(x @ x, -1).dtype == torch.float32
        assert torch.cat([x, x.bfloat16()]).dtype == torch.float32
    with torch.npu.amp.autocast(dtype=torch.float16):
        assert (x @ x).dtype == torch.float16
    assert (x @ x).dtype == torch.float32


def test_autocast_training_learns():
    losses, _, _ = train("npu", autocast=True)
    assert losses[-1] < losses[0]


def test_gradient_scaler():
    module = nn.Linear(4, 4).npu()
    before = module.weight.detach().clone()
    scaler = torch.amp.GradScaler("npu")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scaler.scale(module(torch.ones(2, 4).npu()).sum()).backward()
    scaler.step(optimizer)
    assert (before - module.weight.detach()).cpu().allclose(torch.full((4, 4), 0.2))
    scale = scaler.get_scale()
    scaler.update()
    module.weight.grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < scale, "an overflow lowers the scale"


@pytest.mark.parametrize("causal", [True, False])
def test_scaled_dot_product_attention(causal):
    cpu = [normal(2, 4, 8, 16, seed=seed).requires_grad_() for seed in range(3)]
    npu = [t.detach().npu().requires_grad_() for t in cpu]
    theirs = F.scaled_dot_product_attention(*cpu, is_causal=causal)
    mine = F.scaled_dot_product_attention(*npu, is_causal=causal)
    assert_rounding_only(mine, theirs, 8 * 16)
    theirs.sum().backward()
    mine.sum().backward()
    for n, c in zip(npu, cpu, strict=True):
        assert_rounding_only(n.grad, c.grad, 8 * 16)


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"reduction": "none"}, {"reduction": "sum"}], ids=str
)
def test_cross_entropy(options):
    cpu = normal(6, 9).requires_grad_()
    npu = cpu.detach().npu().requires_grad_()
    target = torch.tensor([0, -100, 8, 3, 3, 1])
    theirs, mine = F.cross_entropy(cpu, target, **options), F.cross_entropy(npu, target.npu(), **options)
    assert mine.cpu().equal(theirs)
    theirs.sum().backward()
    mine.sum().backward()
    assert npu.grad.cpu().equal(cpu.grad)


MODULES = {
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), lambda: (normal(2, 3, 8),)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), lambda: (normal(2, 3, 8, 8),)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), lambda: (normal(2, 3, 4, 4),)),
    "batch_norm": (lambda: nn.BatchNorm2d(3), lambda: (normal(2, 3, 4, 4),)),
    "group_norm": (lambda: nn.GroupNorm(1, 3), lambda: (normal(2, 3, 4),)),
    "layer_norm": (lambda: nn.LayerNorm(8), lambda: (normal(2, 8),)),
    "rms_norm": (lambda: nn.RMSNorm(8), lambda: (normal(2, 8),)),
    "gelu": (nn.GELU, lambda: (normal(3, 4),)),
    "silu": (nn.SiLU, lambda: (normal(3, 4),)),
    "max_pool": (lambda: nn.MaxPool2d(2), lambda: (normal(1, 2, 4, 4),)),
    "upsample": (lambda: nn.Upsample(scale_factor=2), lambda: (normal(1, 2, 4, 4),)),
    "embedding_bag": (lambda: nn.EmbeddingBag(9, 4), lambda: (torch.tensor([1, 2, 8, 0, 5]), torch.tensor([0, 3]))),
    "attention": (lambda: nn.MultiheadAttention(8, 2), lambda: (normal(4, 2, 8),) * 3),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0),
        lambda: (normal(4, 2, 8), normal(3, 2, 8, seed=SEED + 1)),
    ),
    "rnn": (lambda: nn.RNN(4, 5), lambda: (normal(3, 2, 4),)),
    "lstm": (lambda: nn.LSTM(4, 5, 2, bidirectional=True), lambda: (normal(3, 2, 4),)),
    "lstm_without_bias": (lambda: nn.LSTM(4, 5, bias=False), lambda: (normal(3, 2, 4),)),
    "lstm_cell": (lambda: nn.LSTMCell(4, 5), lambda: (normal(2, 4),)),
    "gru": (lambda: nn.GRU(4, 5, 2, bidirectional=True), lambda: (normal(3, 2, 4),)),
    "gru_without_bias": (lambda: nn.GRU(4, 5, bias=False), lambda: (normal(3, 2, 4),)),
}


@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    make, arguments = MODULES[name]
    torch.manual_seed(SEED)
    cpu = make()
    npu = copy.deepcopy(cpu).npu()
    inputs = arguments()
    moved = {id(t): t.npu() for t in inputs}  # one tensor given twice stays one tensor
    npu_inputs = [moved[id(t)] for t in inputs]
    if inputs[0].is_floating_point():
        inputs[0].requires_grad_()
        npu_inputs[0].requires_grad_()
    theirs, mine = cpu(*inputs), npu(*npu_inputs)
    theirs, mine = (out[0] if isinstance(out, tuple) else out for out in (theirs, mine))
    assert mine.device.type == "npu"
    terms = 64  # no module here sums more products than this into one number
    assert_rounding_only(mine, theirs, terms)
    theirs.square().sum().backward()
    mine.square().sum().backward()
    for n, c in zip(npu.parameters(), cpu.parameters(), strict=True):
        assert_rounding_only(n.grad, c.grad, terms)
    if inputs[0].is_floating_point():
        assert_rounding_only(npu_inputs[0].grad, inputs[0].grad, terms)


def test_fused_cells_have_second_derivatives():
    cell = nn.LSTMCell(2, 2).double().npu()
    x = normal(1, 2).double().npu().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: cell(t)[0], (x,))
    assert torch.autograd.gradgradcheck(lambda t: cell(t)[0], (x,))
    gru = nn.GRUCell(2, 2).double().npu()
    assert torch.autograd.gradcheck(gru, (x,))
    assert torch.autograd.gradgradcheck(gru, (x,))


def test_autograd_tools():
    x = normal(3, 3).double().npu().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: (t.sin() @ t).cumsum(0), (x,))
    jacobian = torch.autograd.functional.jacobian(lambda t: t.sin().sum(0), normal(3, 2).npu())
    assert jacobian.shape == (2, 3, 2) and jacobian.device.type == "npu"
    batched = torch.func.vmap(lambda t: t @ t)(normal(4, 3, 3).npu())
    assert batched.cpu().equal(normal(4, 3, 3) @ normal(4, 3, 3))
    gradient = torch.func.grad(lambda t: (t * t).sum())(normal(3).npu())
    assert gradient.cpu().equal(2 * normal(3))


def test_custom_function_and_hooks():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            assert saved.device.type == "npu"
            return grad * 2

    x = normal(3).npu().requires_grad_()
    seen = []
    x.register_hook(lambda grad: seen.append(grad.device.type))
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3 and seen == ["npu"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoint_restores_the_npu_generator(reentrant):
    from torch.utils.checkpoint import checkpoint

    module = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5)).npu()
    x = normal(2, 3).npu().requires_grad_()
    torch.manual_seed(SEED)
    module(x).sum().backward()
    plain, x.grad = x.grad, None
    torch.manual_seed(SEED)
    checkpoint(module, x, use_reentrant=reentrant).sum().backward()
    assert x.grad.equal(plain)


def test_a_parameter_over_a_flat_buffer_follows_it():
    flat = torch.zeros(10, device="npu")
    parameter = nn.Parameter(flat.split([4, 6])[0].view(2, 2))
    (parameter.sum() * 3).backward()
    assert parameter.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    flat.fill_(2)
    assert parameter.sum().item() == 8


def test_low_precision_casts():
    x = normal(4, 4).npu()
    assert x.to(torch.float8_e4m3fn).float().cpu().equal(x.cpu().to(torch.float8_e4m3fn).float())
    assert x.bfloat16().sum().cpu().equal(x.cpu().bfloat16().sum())


def test_compile_without_inductor():
    function = torch.compile(lambda t: torch.sin(t) @ t, backend="aot_eager")
    x = normal(3, 3).npu()
    assert function(x).equal(torch.sin(x) @ x)
