"""Cut the real rows of every expert's block of the batched format [E, C, H] into blocks of rows for the grouped GEMMs.

    blocks = (e, e * C + i, min(block_rows, counts[e] - i))     for i = 0, block_rows, ... below counts[e]

A position is a row of [E * C, H]: rows lie where they are, so that there is nothing to sort, and rows behind an
expert's count are in no block and cost nothing later. A count above C counts as C.

Shapes: E experts, C capacity per expert, B blocks.
Cost:   one launch, a program per expert, each of which reads all E counts.
Reference: vllm_moe_modular.reference.blocks_of_batch.
"""

import torch
import triton
import triton.language as tl

from vllm_moe_modular.kernels.align_rows import AlignedRows


def max_batch_blocks(num_experts: int, capacity: int, block_rows: int) -> int:
    """The most blocks that there can be."""
    return num_experts * -(-capacity // block_rows)


def batch_scratch_ints(num_experts: int, capacity: int, block_rows: int) -> int:
    """int32 elements of scratch that `blocks_of_batch` takes."""
    return 4 * max_batch_blocks(num_experts, capacity, block_rows) + 4


@triton.jit
def _blocks_of_batch_kernel(
    blocks_ptr,  # [B, 4]
    totals_ptr,  # [2] blocks, positions
    counts_ptr,  # [E]
    E,
    C,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    counts = tl.minimum(tl.maximum(tl.load(counts_ptr + experts, mask=experts < E, other=0), 0), C)
    blocks = tl.cdiv(counts, BLOCK_ROWS)
    first = tl.sum(tl.where(experts < e, blocks, 0), 0)
    count = tl.sum(tl.where(experts == e, counts, 0), 0)
    b = tl.arange(0, BLOCK_B)
    mine = b < tl.cdiv(count, BLOCK_ROWS)
    at = blocks_ptr + (first + b) * 4
    tl.store(at, e, mask=mine)
    tl.store(at + 1, e * C + b * BLOCK_ROWS, mask=mine)
    tl.store(at + 2, tl.minimum(count - b * BLOCK_ROWS, BLOCK_ROWS), mask=mine)
    if e == 0:
        tl.store(totals_ptr, tl.sum(blocks, 0))
        tl.store(totals_ptr + 1, tl.sum(counts, 0))


def blocks_of_batch(
    expert_num_tokens_E: torch.Tensor, capacity: int, block_rows: int, *, scratch: torch.Tensor, pdl: bool = False
) -> AlignedRows:
    """Blocks of a batch, on the device.

    Args:
        expert_num_tokens_E: [E] int32 or int64, contiguous.
        capacity: C.
        scratch: int32, `batch_scratch_ints` elements or more, contiguous, uninitialised; the result lies in it.
        pdl: start early and wait inside for the kernel before, and let the next one do so.
    """
    E = expert_num_tokens_E.numel()
    B = max_batch_blocks(E, capacity, block_rows)
    blocks, totals = scratch[: 4 * B].view(B, 4), scratch[4 * B : 4 * B + 2]
    _blocks_of_batch_kernel[(E,)](
        blocks, totals, expert_num_tokens_E, E, capacity,
        BLOCK_ROWS=block_rows, BLOCK_E=triton.next_power_of_2(E),
        BLOCK_B=triton.next_power_of_2(triton.cdiv(capacity, block_rows)), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return AlignedRows(sorted_slots=None, blocks=blocks, totals=totals)
