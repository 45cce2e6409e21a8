"""Expert ids by a table: what a library's numbering of the experts makes of the router's.

    out[n] = table[ids[n]]   where 0 <= ids[n] < G, else -1

Shapes: N ids, G experts.
Cost:   memory bound; one launch, N ids read and N written.
Reference: vllm_moe_modular.reference.translate_ids.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _translate_ids_kernel(
    out_ptr,  # [N]
    ids_ptr,  # [N]
    table_ptr,  # [G]
    N,
    G,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + n, mask=n < N, other=-1)
    new = tl.load(table_ptr + ids, mask=(ids >= 0) & (ids < G), other=-1)
    tl.store(out_ptr + n, new.to(out_ptr.dtype.element_ty), mask=n < N)


def translate_ids(ids: torch.Tensor, table_G: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write every id of `out`.

    Args:
        ids: int32 or int64, contiguous, any shape, at least one.
        table_G: [G] int32.
        out: of the shape of `ids`, int32 or int64, contiguous.
    """
    N = ids.numel()
    _translate_ids_kernel[(triton.cdiv(N, _BLOCK),)](out, ids, table_G, N, table_G.numel(), BLOCK=_BLOCK)
