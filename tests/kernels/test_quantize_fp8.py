"""kernels.quantize_fp8 gives the bits of its reference."""

import pytest
import torch

from tests.kernels.common import DEVICE, poisoned, poisoned_fp8_rows, randn, random_ids
from vllm_moe_modular.kernels.align_rows import align_rows, scratch_ints
from vllm_moe_modular.kernels.quantize_fp8 import Fp8Rows, quantize_fp8
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8
from vllm_moe_modular.reference.quantize_fp8 import quantize_fp8 as reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("R", "H"), [(5, 256), (3, 200), (2, 33), (1, 2100)], ids=["even", "last group partial", "narrow", "wide"]
)
def test_same_bits(R: int, H: int, dtype: torch.dtype) -> None:
    x = (randn(R, 2 * H, dtype=torch.float32) * 2 ** randn(R, 2 * H, dtype=torch.float32, seed=1)).to(dtype)[:, :H]
    out = poisoned_fp8_rows(R, H)
    quantize_fp8(x, out=out)
    values, scales = reference(x)
    assert torch.equal(bits(out.values), bits(values))
    assert torch.equal(out.scales, scales)


def test_zeros_and_numbers_too_small_for_a_scale() -> None:
    x = torch.zeros(3, 256, device=DEVICE)
    x[1], x[2, 0] = 1e-38, 7.0
    out = poisoned_fp8_rows(3, 256)
    quantize_fp8(x, out=out)
    meant = dequantize_fp8(out.values, out.scales)
    assert meant.isfinite().all()
    assert (meant - x).abs().max() <= 1e-37
    assert (out.scales > 0).all()


def test_every_number_is_within_half_a_step() -> None:
    """3 bits of mantissa: a sixteenth of the number, or half of the smallest step of the group."""
    x = randn(4, 384, dtype=torch.float32)
    out = poisoned_fp8_rows(4, 384)
    quantize_fp8(x, out=out)
    error = (dequantize_fp8(out.values, out.scales) - x).abs()
    smallest_step = out.scales.repeat_interleave(128, dim=1) * 2.0**-9
    assert (error <= torch.maximum(x.abs() / 16, smallest_step / 2) * 1.0001).all()


def test_in_the_order_of_the_experts() -> None:
    R, K, E, H = 9, 3, 12, 200
    x, ids = randn(R, H, dtype=torch.float16), random_ids(R, K, E)
    ids[0], ids[1, 1] = -1, E
    rows = align_rows(ids, E, 16, scratch=poisoned(scratch_ints(R * K, E, 16), dtype=torch.int32))
    out = poisoned_fp8_rows(R * K, H)
    quantize_fp8(x, out=out, rows=rows, top_k=K)
    here = R * K - K - 1
    values, scales = reference(x[rows.sorted_slots[:here].long() // K])
    assert torch.equal(bits(out.values)[:here], bits(values))
    assert torch.equal(out.scales[:here], scales)
    assert out.scales[here:].isnan().all()
    assert (bits(out.values)[here:] == 0x7F).all()


@pytest.mark.parametrize(("rows", "columns"), [(3, 200), (1, 16), (7, 128)])
def test_rows_within_a_buffer(rows: int, columns: int) -> None:
    scratch = torch.empty(Fp8Rows.nbytes(rows, columns) // 2 + 8, dtype=torch.float16, device=DEVICE)
    made = Fp8Rows.within(scratch, rows, columns)
    assert made.values.shape == (rows, columns)
    assert made.scales.shape == (rows, -(-columns // 128))
    assert made.values.data_ptr() == scratch.data_ptr()
    assert made.scales.data_ptr() >= made.values.data_ptr() + rows * columns
    assert made.scales.data_ptr() + made.scales.nbytes <= scratch.data_ptr() + Fp8Rows.nbytes(rows, columns)
