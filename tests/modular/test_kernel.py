"""The composer, with parts of its own that show who did what."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import CapacityError, IncompatiblePartsError, ShapeError
from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.kernel import ModularKernel, pair_objections
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import Dispatched, PrepareAndFinalize, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import TopKWeightAndReduce, TorchTopKWeightAndReduce, WeightAndReduceBy
from vllm_moe_modular.modular.workspace import BufferSpec, Workspace
from vllm_moe_modular.prepare_finalize.local import LocalPrepareAndFinalize
from vllm_moe_modular.testing.layers import SILU, Case, make_batch, make_weights, right_answer

CPU = torch.device("cpu")
CASE = Case("", tokens=(6,), G=5, K=3, absent=0.3)


class Counting(TopKWeightAndReduce):
    """Counts how often the top-k rows are weighted and summed."""

    def __init__(self) -> None:
        self.calls = 0

    def apply(self, y_RKH, topk_ids_RK, topk_weights_RK, *, router_weight_on_input, out_RH):  # type: ignore[no-untyped-def]
        self.calls += 1
        TorchTopKWeightAndReduce().apply(
            y_RKH, topk_ids_RK, topk_weights_RK, router_weight_on_input=router_weight_on_input, out_RH=out_RH
        )


@dataclass(frozen=True)
class Original:
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


class Reversing(PrepareAndFinalize[Original]):
    """One rank. Dispatches the tokens in reverse, so that dispatched ids differ from the router's; weights at home."""

    activation_format = ActivationFormat.STANDARD
    weight_and_reduce_by = WeightAndReduceBy.FINALIZE

    def __init__(self, weight_and_reduce: TopKWeightAndReduce) -> None:
        self._weight_and_reduce = weight_and_reduce

    def most_rows(self, max_tokens_per_rank: int) -> int:
        return max_tokens_per_rank

    def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, *, max_tokens_per_rank, router_weight_on_input):  # type: ignore[no-untyped-def]  # noqa: ARG002
        rows = StandardRows(x_TH.flip(0), topk_ids_TK.flip(0), topk_weights_TK.flip(0))
        return Dispatched(rows, Original(topk_ids_TK, topk_weights_TK))

    def finalize(self, y: torch.Tensor, ticket: Original, *, out_TH: torch.Tensor) -> None:
        self._weight_and_reduce.apply(
            y.flip(0), ticket.topk_ids, ticket.topk_weights, router_weight_on_input=False, out_RH=out_TH
        )


class Batched(Reversing):
    activation_format = ActivationFormat.BATCHED


class OnlyExperts(TorchExperts):
    weight_and_reduce_by = frozenset({WeightAndReduceBy.EXPERTS})


def kernel_of(part: PrepareAndFinalize[Any]) -> ModularKernel:
    return ModularKernel(part, TorchExperts(activation=SILU), allocate=Workspace(CPU))


def local() -> LocalPrepareAndFinalize:
    return LocalPrepareAndFinalize(placement=ExpertPlacement.linear(CASE.G, 1), rank=0, device=CPU)


def run(kernel: ModularKernel) -> torch.Tensor:
    batch = make_batch(CASE, 0, torch.float32)
    return kernel.apply(
        batch.x, batch.topk_ids, batch.topk_weights, make_weights(CASE, torch.float32), max_tokens_per_rank=6
    )


def test_finalize_uses_the_original_ids_not_the_dispatched_ones() -> None:
    out = run(kernel_of(Reversing(TorchTopKWeightAndReduce())))
    assert torch.allclose(out.double(), right_answer(CASE, 0, torch.float32), atol=1e-5)


@pytest.mark.parametrize(("by", "calls"), [("experts", 0), ("finalize", 1)])
def test_weights_are_applied_and_reduced_exactly_once(by: str, calls: int) -> None:
    counting = Counting()
    out = run(kernel_of(Reversing(counting) if by == "finalize" else local()))
    assert counting.calls == calls
    assert torch.allclose(out.double(), right_answer(CASE, 0, torch.float32), atol=1e-5)


def test_pair_that_cannot_work_is_refused_with_every_reason() -> None:
    with pytest.raises(IncompatiblePartsError, match=r"batched format.*standard format; .*finalize.*to experts"):
        ModularKernel(Batched(Counting()), OnlyExperts(activation=SILU), allocate=Workspace(CPU))
    assert len(pair_objections(Batched, OnlyExperts)) == 2


def test_scratch_memory_is_reserved_for_rows_as_they_are_and_in_fp8() -> None:
    class Asking(TorchExperts):
        seen: ClassVar[list[StandardRows]] = []

        def workspace(self, rows, weights):  # type: ignore[no-untyped-def]  # noqa: ARG002
            self.seen.append(rows)
            return [BufferSpec((500 if rows.x_scale is not None else 100 * len(rows.x),), torch.uint8)]

    case = replace(CASE, H=256)
    kernel = ModularKernel(local(), Asking(activation=SILU), allocate=Workspace(CPU))
    weights = make_weights(case, torch.bfloat16)
    of = {"top_k": 3, "dtype": torch.bfloat16}
    assert kernel.workspace_bytes(weights, max_tokens_per_rank=1, **of) == 256
    assert all(rows.x_scale is None for rows in Asking.seen)
    assert kernel.workspace_bytes(weights, max_tokens_per_rank=1, **of, fp8_rows=True) == 512
    assert kernel.workspace_bytes(weights, max_tokens_per_rank=9, **of, fp8_rows=True) == 1024
    for rows in Asking.seen:
        assert rows.dtype == torch.bfloat16
        if rows.x_scale is not None:
            assert rows.x.dtype == torch.float8_e4m3fn
            assert rows.x_scale.shape == (len(rows.x), 2)


def test_work_meanwhile_runs_exactly_once() -> None:
    calls: list[int] = []
    batch = make_batch(CASE, 0, torch.float32)
    kernel_of(local()).apply(
        batch.x, batch.topk_ids, batch.topk_weights, make_weights(CASE, torch.float32),
        max_tokens_per_rank=6, meanwhile=lambda: calls.append(1),
    )  # fmt: skip
    assert calls == [1]


@pytest.mark.parametrize(
    ("ids_shape", "weights_shape", "message"),
    [
        ((5, 3), (5, 3), r"topk_ids_TK: expected shape \[T=6, K=3\], got \[5, 3\]"),
        ((6, 3), (6, 2), r"topk_weights_TK: expected shape \[T=6, K=3\], got \[6, 2\]"),
    ],
    ids=["ids of other tokens", "weights of another top-k"],
)
def test_shape_error_names_the_argument(
    ids_shape: tuple[int, int], weights_shape: tuple[int, int], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        kernel_of(local()).apply(
            torch.zeros(6, CASE.H), torch.zeros(ids_shape, dtype=torch.int64), torch.zeros(weights_shape),
            make_weights(CASE, torch.float32), max_tokens_per_rank=6,
        )  # fmt: skip


def test_ids_are_cast_to_what_a_part_declares() -> None:
    class Int32Only(Reversing):
        topk_indices_dtype = torch.int32
        seen: torch.dtype | None = None

        def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
            Int32Only.seen = topk_ids_TK.dtype
            return super().prepare(x_TH, topk_ids_TK, topk_weights_TK, **more)

    run(kernel_of(Int32Only(TorchTopKWeightAndReduce())))
    assert Int32Only.seen == torch.int32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_of_another_dtype_than_float32_reach_the_parts_as_float32(dtype: torch.dtype) -> None:
    """A router may give its weights in the model's dtype; a part may send their bits."""
    batch, weights = make_batch(CASE, 0, torch.float32), make_weights(CASE, torch.float32)
    placement = ExpertPlacement.linear(CASE.G, 1)
    seen: list[torch.dtype] = []

    class Noting(LocalPrepareAndFinalize):
        def prepare(self, x_TH, topk_ids_TK, topk_weights_TK, **more):  # type: ignore[no-untyped-def]
            seen.append(topk_weights_TK.dtype)
            return super().prepare(x_TH, topk_ids_TK, topk_weights_TK, **more)

    all2all = Noting(placement=placement, rank=0, device=CPU)
    kernel = ModularKernel(all2all, TorchExperts(activation=SILU), allocate=Workspace(CPU))
    kernel.apply(batch.x, batch.topk_ids, batch.topk_weights.to(dtype), weights, max_tokens_per_rank=len(batch.x))
    assert seen == [torch.float32]


def test_an_error_is_told_before_it_is_raised() -> None:
    told: list[Exception] = []
    kernel = ModularKernel(local(), TorchExperts(activation=SILU), allocate=Workspace(CPU), on_error=told.append)
    batch = make_batch(CASE, 0, torch.float32)
    with pytest.raises(CapacityError) as error:
        kernel.apply(
            batch.x, batch.topk_ids, batch.topk_weights, make_weights(CASE, torch.float32), max_tokens_per_rank=5
        )
    assert told == [error.value]
