"""The kernels that write into a layout with gaps, each against its reference: what is no slot's stays as it was."""

from functools import partial

import pytest
import torch

from tests.kernels.common import DEVICE, DTYPES, poisoned, randn, random_ids, zeros_on_demand
from tests.kernels.interpreter import rounds_to_nearest  # noqa: F401
from vllm_moe_modular.kernels.activate_quantize_rows import activate_quantize_rows
from vllm_moe_modular.kernels.activate_rows import activate_rows
from vllm_moe_modular.kernels.gated_activation import GatedActivation
from vllm_moe_modular.kernels.scatter_quantize_rows import scatter_quantize_rows
from vllm_moe_modular.kernels.scatter_rows import scatter_rows
from vllm_moe_modular.kernels.weighted_topk_sum import weighted_topk_sum
from vllm_moe_modular.reference.activate_rows import activate_rows as activate_reference
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.reference.place_rows import place_rows
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.reference.scatter_rows import scatter_rows as scatter_reference
from vllm_moe_modular.reference.weighted_topk_sum import weighted_topk_sum as sum_reference
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

SILU = GatedActivation("silu")
GPT_OSS = GatedActivation("swiglu_oai", limit=1.5, interleaved=True)
SHAPES = pytest.mark.parametrize(
    ("R", "K", "E", "columns"), [(9, 3, 12, 256), (3, 2, 4, 2176)], ids=["top 3 of 12", "wide"]
)


def some_positions(R: int, K: int, E: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Positions with gaps, a row that has none and a slot that has none; which rows are a slot's; their number."""
    ids = random_ids(R, K, E)
    ids[0], ids[1, 1] = -1, E
    positions = torch.tensor(place_rows(ids, E, 8)[0], dtype=torch.int32, device=DEVICE)
    P = 8 * (int(positions.max()) // 8 + 2)
    taken = torch.zeros(P, dtype=torch.bool, device=DEVICE)
    taken[positions[positions >= 0].long()] = True
    return positions, taken, P


def poisoned_float8(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)


def activation_of(a: GatedActivation) -> partial[torch.Tensor]:
    return partial(
        gated_activation, name=a.name, limit=a.limit, alpha=a.alpha, beta=a.beta, interleaved=a.interleaved
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16][:3], ids=str)
@SHAPES
def test_scatter_moves_the_bits(R: int, K: int, E: int, columns: int, dtype: torch.dtype) -> None:
    positions, taken, P = some_positions(R, K, E)
    x = randn(R, 2 * columns, dtype=dtype)[:, :columns]
    out = poisoned(P, columns, dtype=dtype)
    scatter_rows(x, positions, out_PH=out)
    assert torch.equal(out[taken], scatter_reference(x, positions, P)[taken])
    assert out[~taken].isnan().all()


@SHAPES
def test_scatter_quantizes_to_the_bit(R: int, K: int, E: int, columns: int) -> None:
    positions, taken, P = some_positions(R, K, E)
    x = randn(R, 2 * columns, dtype=torch.bfloat16)[:, :columns]
    x[0], x[2, :128] = float("nan"), 0.0
    out, scales = poisoned_float8(P, columns), poisoned(columns // 128, P, dtype=torch.float32)
    scatter_quantize_rows(x, positions, out_PH=out, scales_GP=scales)
    q, scale = quantize_fp8(x)
    assert torch.equal(out.float()[taken], scatter_reference(q.float(), positions, P)[taken])
    assert torch.equal(scales.T[taken], scatter_reference(scale, positions, P)[taken])
    assert scales.T[~taken].isnan().all()
    assert out.float()[~taken].isnan().all()


@pytest.mark.parametrize("side_by_side", [False, True], ids=["scales in rows", "scales of a group side by side"])
@SHAPES
def test_scatter_copies_rows_in_fp8(R: int, K: int, E: int, columns: int, side_by_side: bool) -> None:
    positions, taken, P = some_positions(R, K, E)
    q, scale = quantize_fp8(randn(R, columns, dtype=torch.bfloat16))
    given = scale.T.contiguous().T if side_by_side else scale
    out, scales = poisoned_float8(P, columns), poisoned(columns // 128, P, dtype=torch.float32)
    scatter_quantize_rows(q, positions, out_PH=out, scales_GP=scales, x_scale_RG=given)
    bits = q.view(torch.uint8)
    assert torch.equal(out.view(torch.uint8)[taken], scatter_reference(bits, positions, P)[taken])
    assert torch.equal(scales.T[taken], scatter_reference(scale, positions, P)[taken])
    assert scales.T[~taken].isnan().all()
    assert out.float()[~taken].isnan().all()


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize("activation", [SILU, GPT_OSS], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@SHAPES
def test_activation(
    R: int, K: int, E: int, columns: int, dtype: torch.dtype, activation: GatedActivation, weighted: bool
) -> None:
    positions, taken, P = some_positions(R, K, E)
    gate_up = poisoned(P, 2 * columns, dtype=dtype)
    gate_up[taken] = randn(int(taken.sum()), 2 * columns, dtype=dtype)
    weights = randn(R, K, dtype=torch.float32, seed=1).abs() if weighted else None
    out = poisoned(P, columns, dtype=dtype)
    activate_rows(gate_up, positions, out_PF=out, activation=activation, topk_weights=weights)
    naive, truth = (
        activate_reference(
            gate_up.to(d), positions, activation=activation_of(activation), topk_weights=weights
        )[taken]
        for d in (dtype, torch.float64)
    )  # fmt: skip
    assert_as_accurate_as(out[taken], naive, truth)
    assert out[~taken].isnan().all()


@pytest.mark.parametrize("activation", [SILU, GPT_OSS], ids=["silu", "gpt-oss"])
@SHAPES
def test_activation_quantized(R: int, K: int, E: int, columns: int, activation: GatedActivation) -> None:
    positions, taken, P = some_positions(R, K, E)
    gate_up = poisoned(P, 2 * columns, dtype=torch.bfloat16)
    gate_up[taken] = randn(int(taken.sum()), 2 * columns, dtype=torch.bfloat16)
    weights = randn(R, K, dtype=torch.float32, seed=1).abs()
    out, scales = poisoned_float8(P, columns), poisoned(columns // 128, P, dtype=torch.float32)
    activate_quantize_rows(
        gate_up, positions, out_PF=out, scales_GP=scales, activation=activation, topk_weights=weights
    )  # fmt: skip
    naive, truth = (
        activate_reference(
            gate_up.to(d), positions, activation=activation_of(activation), topk_weights=weights
        )[taken]
        for d in (torch.float32, torch.float64)
    )  # fmt: skip
    got = dequantize_fp8(out.float()[taken], scales.T[taken])
    assert_as_accurate_as(got, dequantize_fp8(*quantize_fp8(naive)), truth)
    assert scales.T[~taken].isnan().all()
    assert out.float()[~taken].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@SHAPES
def test_sum_over_positions(R: int, K: int, E: int, columns: int, dtype: torch.dtype) -> None:
    positions, taken, P = some_positions(R, K, E)
    y = poisoned(P, columns, dtype=dtype)
    y[taken] = randn(int(taken.sum()), columns, dtype=dtype)
    ids = torch.where(positions >= 0, 0, -1).view(R, K)
    weights = randn(R, K, dtype=torch.float32, seed=1)
    out = poisoned(R, columns, dtype=dtype)
    weighted_topk_sum(y, ids, weights, num_experts=E, out_RH=out, positions=positions)
    naive, truth = (
        sum_reference(y.to(d), ids, weights, num_experts=E, positions=positions) for d in (dtype, torch.float64)
    )
    assert_as_accurate_as(out, naive, truth)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts() -> None:
    """Rows at the end of 2**31 elements and more, in every kernel that multiplies a row by a width."""
    H, P = 16_384, 2**18
    x = randn(64, H, dtype=torch.bfloat16)
    positions = torch.arange(P - 64, P, dtype=torch.int32, device=DEVICE)
    out = zeros_on_demand(P, H, dtype=torch.bfloat16)
    scatter_rows(x, positions, out_PH=out)
    assert torch.equal(out[-64:], x)
    activated = zeros_on_demand(P, H // 2, dtype=torch.bfloat16)
    activate_rows(out, positions, out_PF=activated, activation=SILU)
    plain = activate_reference(out[-64:].float(), positions - (P - 64), activation=activation_of(SILU))
    assert torch.allclose(activated[-64:].float(), plain, rtol=1e-2, atol=1e-2)
    total = torch.empty(64, H, dtype=torch.bfloat16, device=DEVICE)
    weighted_topk_sum(out, (positions * 0)[:, None], None, num_experts=1, out_RH=total, positions=positions)
    assert torch.equal(total, x)
