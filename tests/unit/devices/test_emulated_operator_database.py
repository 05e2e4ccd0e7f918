"""PyTorch's own operator database on the emulated NPU against the CPU: values, dtypes, shapes, strides and gradients.

A fast sample runs always; the whole database is for the nightly (``-m slow``).
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from alignment.devices import emulated_npu

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(not emulated_npu.is_installed(), reason="tests the emulated NPU; run with --emulate-npu"),
]

SAMPLES_PER_OPERATOR = 6
SEED = 20240607

# The whole database, measured: the share of float32 entries that are equal. What is allowed to differ is listed by name
# in the failure message.
REQUIRED_EQUAL, REQUIRED_OF = 670, 677

# Their results are memory that nobody wrote.
UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided")

# One or more of each family: views, in-place forms through the database's variants, reductions, indexing, sorting,
# products, normalisation, losses, linear algebra, random numbers, lists of tensors, complex numbers.
FAST_SAMPLE = (
    "add",
    "addmm",
    "allclose",
    "argsort",
    "as_strided",
    "baddbmm",
    "bernoulli",
    "cat",
    "chunk",
    "clone",
    "cumsum",
    "diagonal",
    "einsum",
    "expand",
    "gather",
    "index_add",
    "index_put",
    "linalg.cholesky",
    "linalg.svd",
    "logsumexp",
    "masked_fill",
    "matmul",
    "mul",
    "nn.functional.conv2d",
    "nn.functional.cross_entropy",
    "nn.functional.dropout",
    "nn.functional.embedding",
    "nn.functional.layer_norm",
    "nn.functional.rms_norm",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.silu",
    "nonzero",
    "normal",
    "permute",
    "reshape",
    "resize_",
    "scatter_add",
    "select",
    "softmax",
    "split",
    "sum",
    "t",
    "topk",
    "unbind",
    "unfold",
    "view",
    "view_as_complex",
    "where",
)


class Difference(AssertionError):
    """One way in which the two devices disagree on one sample."""


@functools.cache
def float32_entries() -> list:
    try:
        import expecttest  # noqa: F401
    except ModuleNotFoundError:
        # torch's internal test package derives its own test cases from it; the operator database does not use it.
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.dtypes]


def full_name(op) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def on_npu(value):
    if isinstance(value, torch.Tensor):
        moved = value.detach().to("npu")
        if value.layout == torch.strided and moved.untyped_storage().nbytes() != value.untyped_storage().nbytes():
            # `.to` moves the elements of a view alone; some samples read their base through it
            whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
            moved = whole.npu().as_strided(value.shape, value.stride(), value.storage_offset())
        return moved.requires_grad_(value.requires_grad)
    if isinstance(value, torch.device):
        return torch.device("npu")
    return "npu" if value == "cpu" and isinstance(value, str) else value


def tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def run(op, sample_input, args, kwargs):
    torch.manual_seed(SEED)  # seeds the CPU's and the npu's generator alike, so random operators are comparable
    return op(sample_input, *args, **kwargs)


def scalar(outputs: list[torch.Tensor]) -> torch.Tensor:
    return sum((t.abs() if t.is_complex() else t).sum() for t in outputs if t.requires_grad)


def compare(npu: list[torch.Tensor], cpu: list[torch.Tensor], what: str) -> None:
    if len(npu) != len(cpu):
        raise Difference(f"{what}: {len(npu)} tensors, on the cpu {len(cpu)}")
    for mine, theirs in zip(npu, cpu, strict=True):
        if mine.device.type != "npu":
            raise Difference(f"{what}: came back on {mine.device}")
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            raise Difference(
                what=f"{what}: {mine.dtype}{list(mine.shape)}, on the cpu {theirs.dtype}{list(theirs.shape)}"
            )
        if mine.stride() != theirs.stride() and mine.numel() > 1:
            raise Difference(f"{what}: strides {mine.stride()}, on the cpu {theirs.stride()}")
        try:
            torch.testing.assert_close(mine.cpu(), theirs, equal_nan=True)
        except AssertionError as error:
            raise Difference(f"{what}: {str(error).splitlines()[0]}") from None


def check(op) -> None:
    """Raise a Difference, or whatever the operator raises on the npu, on the first sample that is not equal."""
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    for sample in itertools.islice(samples, SAMPLES_PER_OPERATOR):
        cpu_arguments = (sample.input, sample.args, sample.kwargs)
        npu_arguments = tree_map(on_npu, cpu_arguments)
        for tensor in tensors(cpu_arguments):
            tensor.grad = None
        try:
            cpu_out = run(op, *cpu_arguments)
        except Exception:  # a sample that the CPU refuses shows nothing
            continue
        npu_out = run(op, *npu_arguments)
        if op.name in UNINITIALISED:
            continue
        compare(tensors(npu_out), tensors(cpu_out), "result")
        if any(t.requires_grad for t in tensors(cpu_out)):
            try:
                scalar(tensors(cpu_out)).backward()
            except Exception:
                continue
            scalar(tensors(npu_out)).backward()
            for mine, theirs in zip(tensors(npu_arguments), tensors(cpu_arguments), strict=True):
                if theirs.grad is not None:
                    compare([mine.grad], [theirs.grad], "gradient")


def differences(entries) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in entries:
            try:
                check(op)
            except Exception as error:  # every way to differ is counted, none may end the count
                yield f"{full_name(op)}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


@pytest.mark.parametrize("name", FAST_SAMPLE)
def test_operator_equals_cpu(name):
    entries = [op for op in float32_entries() if op.name == name]
    assert entries, f"the operator database of torch {torch.__version__} has no float32 entry named {name}"
    assert list(differences(entries)) == []


def test_a_wrong_kernel_is_a_difference():
    relu = next(op for op in float32_entries() if op.name == "nn.functional.relu")
    with emulated_npu.semantics._overridden({"relu": lambda t: t.clone()}):
        assert [line.split(":")[0] for line in differences([relu])] == ["nn.functional.relu"]


@pytest.mark.slow
def test_whole_database():
    entries = float32_entries()
    found = list(differences(entries))
    equal = len(entries) - len(found)
    listing = "\n  ".join(found)
    print(f"{equal} of {len(entries)} float32 entries equal; the others:\n  {listing}")
    # Another torch has another number of entries: the same share of them must be equal.
    assert equal * REQUIRED_OF >= REQUIRED_EQUAL * len(entries), (
        f"{equal} of {len(entries)} entries equal, required {REQUIRED_EQUAL} of {REQUIRED_OF}; the others:\n  {listing}"
    )
