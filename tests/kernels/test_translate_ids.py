"""kernels.translate_ids: no id is ever read outside the table."""

import pytest
import torch

from tests.kernels.common import poisoned
from vllm_moe_modular.kernels.translate_ids import translate_ids
from vllm_moe_modular.reference.translate_ids import translate_ids as reference


@pytest.mark.parametrize("out_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("T", "K"), [(1, 1), (5, 3), (700, 3)], ids=["one id", "a block", "several blocks"])
def test_ids_are_those_of_the_table(T: int, K: int, ids_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    table = torch.randperm(9).int()
    ids = torch.randint(-2, 13, (T, K)).to(ids_dtype)
    ids[0, 0] = 2**31 - 1
    device = poisoned(1, dtype=torch.int32).device
    out, want = poisoned(T, K, dtype=out_dtype), torch.empty(T, K, dtype=out_dtype)
    translate_ids(ids.to(device), table.to(device), out=out)
    reference(ids, table, out=want)
    assert torch.equal(out.cpu(), want)
