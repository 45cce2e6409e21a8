"""kernels.quantize_batch and activate_quantize_batch: real rows alone, to the bit, however the scales lie."""

from functools import partial

import pytest
import torch

from tests.kernels.common import DEVICE, poisoned, randn
from tests.kernels.interpreter import rounds_to_nearest  # noqa: F401
from vllm_moe_modular.kernels.activate_quantize_batch import activate_quantize_batch
from vllm_moe_modular.kernels.align_rows import AlignedRows
from vllm_moe_modular.kernels.blocks_of_batch import batch_scratch_ints, blocks_of_batch
from vllm_moe_modular.kernels.gated_activation import GatedActivation
from vllm_moe_modular.kernels.quantize_batch import quantize_batch
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

COUNTS = (0, 3, 20, 1)
BLOCK_ROWS = 16

LAYOUTS = pytest.mark.parametrize(
    ("C", "D", "transposed"),
    [(20, 20, False), (20, 20, True), (20, 32, True)],
    ids=["rows of scales", "scales of a group side by side", "into longer blocks"],
)


def blocks(C: int) -> AlignedRows:
    counts = torch.tensor(COUNTS, dtype=torch.int32, device=DEVICE)
    scratch = poisoned(batch_scratch_ints(len(COUNTS), C, BLOCK_ROWS), dtype=torch.int32)
    return blocks_of_batch(counts, C, BLOCK_ROWS, scratch=scratch)


def some_rows(C: int, H: int) -> torch.Tensor:
    """NaN behind the counts."""
    x = poisoned(len(COUNTS), C, H, dtype=torch.bfloat16)
    for e, n in enumerate(COUNTS):
        x[e, :n] = randn(n, H, dtype=torch.bfloat16, seed=e)
    return x


def empty(D: int, columns: int, *, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    E, G = len(COUNTS), -(-columns // 128)
    values = poisoned(E, D, columns, dtype=torch.float8_e4m3fn)
    if transposed:
        return values, poisoned(E, G, D, dtype=torch.float32).transpose(1, 2)
    return values, poisoned(E, D, G, dtype=torch.float32)


def check_rest_untouched(values: torch.Tensor, scales: torch.Tensor) -> None:
    for e, n in enumerate(COUNTS):
        assert (values[e, n:].view(torch.uint8) == 0x7F).all()
        assert scales[e, n:].isnan().all()


@pytest.mark.parametrize("H", [384, 200])
@LAYOUTS
def test_quantised_to_the_bit(C: int, D: int, transposed: bool, H: int) -> None:
    x = some_rows(C, H)
    values, scales = empty(D, H, transposed=transposed)
    quantize_batch(x, blocks(C), out_EDH=values, scales_EDG=scales, block_rows=BLOCK_ROWS)
    for e, n in enumerate(COUNTS):
        want, want_scales = quantize_fp8(x[e, :n])
        assert torch.equal(values[e, :n].view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scales[e, :n], want_scales)
    check_rest_untouched(values, scales)


@LAYOUTS
def test_rows_in_fp8_are_copied(C: int, D: int, transposed: bool) -> None:
    x = some_rows(C, 256)
    given, given_scales = empty(C, 256, transposed=not transposed)
    quantize_batch(x, blocks(C), out_EDH=given, scales_EDG=given_scales, block_rows=BLOCK_ROWS)
    values, scales = empty(D, 256, transposed=transposed)
    quantize_batch(
        given, blocks(C), out_EDH=values, scales_EDG=scales, x_scale_ECG=given_scales, block_rows=BLOCK_ROWS
    )  # fmt: skip
    for e, n in enumerate(COUNTS):
        assert torch.equal(values[e, :n].view(torch.uint8), given[e, :n].view(torch.uint8))
        assert torch.equal(scales[e, :n], given_scales[e, :n])
    check_rest_untouched(values, scales)


@pytest.mark.parametrize(
    "activation",
    [GatedActivation("silu"), GatedActivation("swiglu_oai", limit=1.5, interleaved=True)],
    ids=["silu", "gpt-oss"],
)
@LAYOUTS
def test_activated(C: int, D: int, transposed: bool, activation: GatedActivation) -> None:
    F = 256
    gate_up = some_rows(D, 2 * F)
    values, scales = empty(D, F, transposed=transposed)
    activate_quantize_batch(
        gate_up, blocks(C), capacity=C, out_EDF=values, scales_EDJ=scales, activation=activation,
        block_rows=BLOCK_ROWS,
    )  # fmt: skip
    a = activation
    activate = partial(
        gated_activation, name=a.name, limit=a.limit, alpha=a.alpha, beta=a.beta, interleaved=a.interleaved
    )
    for e, n in enumerate(COUNTS):
        naive, truth = activate(gate_up[e, :n].float()), activate(gate_up[e, :n].double())
        got = dequantize_fp8(values[e, :n], scales[e, :n])
        assert_as_accurate_as(got, dequantize_fp8(*quantize_fp8(naive)), truth)
    check_rest_untouched(values, scales)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts() -> None:
    """Rows behind 2**31 elements of what is read and of what is written."""
    E, C, H = 40, 4096, 16384
    counts = torch.zeros(E, dtype=torch.int32, device=DEVICE)
    counts[-1] = 3
    x = torch.zeros(E, C, H, dtype=torch.bfloat16, device=DEVICE)
    x[-1, :3] = randn(3, H, dtype=torch.bfloat16)
    scratch = poisoned(batch_scratch_ints(E, C, BLOCK_ROWS), dtype=torch.int32)
    cut = blocks_of_batch(counts, C, BLOCK_ROWS, scratch=scratch)
    values = torch.zeros(E, C, H, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    scales = torch.zeros(E, C, H // 128, device=DEVICE)
    quantize_batch(x, cut, out_EDH=values, scales_EDG=scales, block_rows=BLOCK_ROWS)
    want, want_scales = quantize_fp8(x[-1, :3])
    assert torch.equal(values[-1, :3].view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales[-1, :3], want_scales)
    assert not values[-1, 3:].view(torch.uint8).any()
