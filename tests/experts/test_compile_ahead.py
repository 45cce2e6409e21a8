"""What a server compiles before its first step: every kernel that a step of any size needs."""

import os
from dataclasses import fields
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton

import pytest

from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.kernels.tuned_tables import NO_TABLE, TunedTable, _tables
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.kernel import ModularKernel, sizes_up_to
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.prepare_finalize.local import LocalPrepareAndFinalize
from vllm_moe_modular.testing.layers import SILU, Case, make_batch, make_weights, right_answer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASE = Case("", tokens=(6,), G=4, K=2, H=16, absent=0.3)


def on_device(weights: ExpertWeights) -> ExpertWeights:
    given = {f.name: getattr(weights, f.name) for f in fields(weights)}
    return ExpertWeights(**{name: t if t is None else t.to(DEVICE) for name, t in given.items()})


def kernel_of(experts: Any) -> ModularKernel:
    part = LocalPrepareAndFinalize(placement=ExpertPlacement.linear(CASE.G, 1), rank=0, device=DEVICE)
    return ModularKernel(part, experts, allocate=Workspace(DEVICE))


@pytest.mark.parametrize("most", [1, 2, 17, 8192, 9000])
def test_sizes_end_with_the_most_and_leave_no_doubling_out(most: int) -> None:
    sizes = sizes_up_to(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert {2**i for i in range(most.bit_length())} <= set(sizes)
    assert most < 16 or {R % 2 for R in sizes if most // 2 < R} == {0, 1}


@pytest.mark.parametrize("tuned", [NO_TABLE, _tables("NVIDIA H200", None)], ids=["no table", "package's"])
@pytest.mark.parametrize(
    ("E", "K", "H", "F", "fp8"),
    [(128, 8, 2048, 768, False), (8, 2, 4096, 14336, False), (128, 4, 2880, 2880, False), (128, 8, 2048, 768, True),
     (256, 8, 7168, 256, True), (12, 3, 640, 96, False)],
)  # fmt: skip
def test_no_step_needs_tiles_that_the_sizes_before_did_not(
    E: int, K: int, H: int, F: int, fp8: bool, tuned: TunedTable
) -> None:
    experts = TritonExperts(SILU, tuned=tuned)
    kernel = kernel_of(experts)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    scales = {
        "w13_scale": torch.empty(1, 1, 1).expand(E, 2 * F // 128, H // 128),
        "w2_scale": torch.empty(1, 1, 1).expand(E, H // 128, F // 128),
    }  # fmt: skip
    weights = ExpertWeights(
        w13=torch.empty(1, 1, 1, dtype=dtype).expand(E, 2 * F, H), w2=torch.empty(1, 1, 1, dtype=dtype).expand(E, H, F),
        **(scales if fp8 else {}),
    )  # fmt: skip

    def needs(R: int) -> object:
        rows: Any = kernel._empty_rows(weights, R, top_k=K, dtype=torch.bfloat16, fp8=False)
        return "slot by slot" if experts._is_small_batch(rows, weights) else experts._tiles_for(rows, weights)

    ahead = {needs(R) for R in sizes_up_to(8192)}
    assert {needs(R) for R in range(1, 8193)} == ahead


def test_it_runs_once_for_weights_of_a_shape_and_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    apply = TritonExperts.apply

    def noted(self: TritonExperts, rows: Any, *given: Any, **more: Any) -> torch.Tensor:
        ran.append(len(rows.x))
        return apply(self, rows, *given, **more)

    monkeypatch.setattr(TritonExperts, "apply", noted)
    weights = on_device(make_weights(CASE, torch.float32))
    kernel = kernel_of(TritonExperts(SILU))
    steps: Any = {"top_k": 2, "dtype": torch.float32}
    kernel.compile_ahead(weights, max_tokens_per_rank=6, **steps)
    assert ran == sizes_up_to(6)
    kernel.compile_ahead(weights, max_tokens_per_rank=4, **steps)
    kernel_of(kernel.experts).compile_ahead(weights, max_tokens_per_rank=6, **steps)
    assert ran == sizes_up_to(6), "layers share their experts"
    batch = make_batch(CASE, 0, torch.float32).to(DEVICE)
    out = kernel.apply(batch.x, batch.topk_ids, batch.topk_weights, weights, max_tokens_per_rank=6)
    want = right_answer(CASE, 0, torch.float32)
    torch.testing.assert_close(out.cpu().double(), want.double(), rtol=1e-4, atol=1e-4)


def test_experts_that_compile_nothing_are_left_alone() -> None:
    kernel = kernel_of(TorchExperts(activation=SILU))
    kernel.experts.apply = lambda *_, **__: pytest.fail("they ran")  # type: ignore[method-assign]
    kernel.compile_ahead(make_weights(CASE, torch.float32), max_tokens_per_rank=6, top_k=2, dtype=torch.float32)
