"""One step of an fp8 GEMM: the product of 128 of depth, added in float32 with its scales.

    acc[r, c] += scale[r] * sum over the step's depth of x[r, d] * w[c, d]

The matrix unit sums fp8 products in fewer bits than float32 has; adding in float32 every 128 keeps that to one step.
It takes 64 rows at least on its first side. Fewer rows than that stand on the second, which takes 16: the accumulator
is then columns by rows, `scaled_accumulator` makes it so and `by_rows` turns it.

Reference: those of the kernels that it is part of, `grouped_gemm_gated_fp8` and `grouped_gemm_down_fp8`.
"""

import triton
import triton.language as tl


def stands_second(block_rows: int) -> bool:
    """Whether a block of so many rows is the second operand."""
    return block_rows < 64


@triton.jit
def scaled_accumulator(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SECOND: tl.constexpr):
    """Zeros, in float32."""
    return tl.zeros([COLUMNS, ROWS] if SECOND else [ROWS, COLUMNS], dtype=tl.float32)


@triton.jit
def add_scaled_product(acc, x, w, scale, SECOND: tl.constexpr):
    """With x [rows, depth], w [columns, depth], scale [rows]."""
    return acc + (tl.dot(w, x.T) * scale[None, :] if SECOND else tl.dot(x, w.T) * scale[:, None])


@triton.jit
def by_rows(acc, SECOND: tl.constexpr):
    """[rows, columns]."""
    return acc.T if SECOND else acc
