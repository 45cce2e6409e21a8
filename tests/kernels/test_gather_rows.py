"""kernels.gather_rows moves rows bit by bit and touches nothing else."""

import pytest
import torch

from tests.kernels.common import DTYPES, poisoned, randn, random_ids
from vllm_moe_modular.kernels.align_rows import align_rows, scratch_ints
from vllm_moe_modular.kernels.gather_rows import gather_rows
from vllm_moe_modular.reference.gather_rows import gather_rows as reference


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("R", "K", "E", "H"), [(9, 3, 12, 40), (3, 2, 4, 2100)], ids=["top 3 of 12", "wide"])
def test_moves_the_bits_of_rows_that_are_here(R: int, K: int, E: int, H: int, dtype: torch.dtype) -> None:
    x, ids = randn(R, 2 * H, dtype=dtype)[:, :H], random_ids(R, K, E)
    ids[0], ids[1, 1] = -1, E
    rows = align_rows(ids, E, 16, scratch=poisoned(scratch_ints(R * K, E, 16), dtype=torch.int32))
    out = poisoned(R * K, H, dtype=dtype)
    gather_rows(x, rows, top_k=K, out_SH=out)
    blocks = [(e, start, n) for e, start, n, _ in rows.blocks[: int(rows.totals[0])].tolist()]
    here = R * K - K - 1
    assert torch.equal(out[:here], reference(x, rows.sorted_slots, blocks, top_k=K)[:here])
    assert out[here:].isnan().all()
