"""Which of the two runs, and that it is asked for what it needs."""

import pytest
import torch

from tests.kernels.common import random_fp8_weights
from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.experts.triton_or_deep_gemm_experts import TritonOrDeepGemmExperts, prefers_deep_gemm
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import Rows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import BufferSpec
from vllm_moe_modular.testing.fp8_rows import fp8_rows


@pytest.mark.parametrize(
    ("model", "tokens", "top_k", "num_experts", "fp8", "prefers"),
    [
        ("Qwen3-30B-A3B", 512, 8, 128, True, False),
        ("Qwen3-30B-A3B", 2048, 8, 128, True, True),
        ("Qwen3-30B-A3B", 16384, 8, 128, False, False),
        ("DeepSeek-V3 over 8 ranks", 128, 8, 32, True, False),
        ("DeepSeek-V3 over 8 ranks", 512, 8, 32, True, True),
        ("half of Qwen3-235B", 512, 8, 64, False, False),
        ("half of Qwen3-235B", 8192, 8, 64, False, False),
        ("Mixtral-8x7B", 8192, 2, 8, False, False),
        ("no experts on this rank", 4, 2, 0, True, False),
    ],
)
def test_what_was_measured_to_be_faster_runs(
    model: str, tokens: int, top_k: int, num_experts: int, fp8: bool, prefers: bool
) -> None:
    slots = tokens * top_k
    got = prefers_deep_gemm(slots=slots, num_experts=num_experts, fp8=fp8)
    assert got is prefers, model


class Named(TorchExperts):
    """The torch experts, which note that they ran."""

    def __init__(self, scratch: int) -> None:
        super().__init__(activation=Activation(kind=ActivationKind.SILU))
        self.scratch, self.ran = scratch, 0

    def workspace(self, rows: Rows, weights: ExpertWeights) -> list[BufferSpec]:  # noqa: ARG002
        return [BufferSpec((self.scratch,), torch.float32)]

    def apply(self, rows, weights, *, workspace, **more):  # type: ignore[no-untyped-def]
        (scratch,) = workspace
        assert len(scratch) == self.scratch
        self.ran += 1
        return super().apply(rows, weights, workspace=workspace, **more)


def fp8_layer() -> ExpertWeights:
    """Of 2 experts, 128 columns, an intermediate size of 256, in blocks of 128 x 128."""
    w13, w13_scale = (t.cpu() for t in random_fp8_weights(2, 512, 128, blocks=True, seed=0))
    w2, w2_scale = (t.cpu() for t in random_fp8_weights(2, 128, 256, blocks=True, seed=1))
    return ExpertWeights(w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)


@pytest.mark.parametrize(("R", "deep"), [(3, False), (400, True)])
def test_the_one_that_runs_gets_its_own_scratch_memory(R: int, deep: bool) -> None:
    triton, deep_gemm = Named(5), Named(7)
    experts = TritonOrDeepGemmExperts(triton, deep_gemm)
    weights = fp8_layer()
    ids = torch.randint(2, (R, 1), dtype=torch.int32)
    rows = StandardRows(torch.randn(R, 128).bfloat16(), ids, torch.ones(R, 1))
    out = experts.apply(
        rows, weights, workspace=[torch.empty(s.shape) for s in experts.workspace(rows, weights)],
        weight_and_reduce_by=WeightAndReduceBy.EXPERTS, router_weight_on_input=False,
    )  # fmt: skip
    assert out.shape == (R, 128)
    assert out.dtype == torch.bfloat16
    assert (triton.ran, deep_gemm.ran) == (int(not deep), int(deep))


@pytest.mark.parametrize(("R", "deep"), [(3, False), (400, True)])
def test_rows_in_fp8_change_nothing_about_which_one_runs(R: int, deep: bool) -> None:
    triton, deep_gemm = Named(5), Named(7)
    experts = TritonOrDeepGemmExperts(triton, deep_gemm)
    weights = fp8_layer()
    ids = torch.randint(2, (R, 1), dtype=torch.int32)
    rows = fp8_rows(StandardRows(torch.randn(R, 128).bfloat16(), ids, torch.ones(R, 1)))
    out = experts.apply(
        rows, weights, workspace=[torch.empty(s.shape) for s in experts.workspace(rows, weights)],
        weight_and_reduce_by=WeightAndReduceBy.EXPERTS, router_weight_on_input=False,
    )  # fmt: skip
    assert out.dtype == torch.bfloat16
    assert (triton.ran, deep_gemm.ran) == (int(not deep), int(deep))
