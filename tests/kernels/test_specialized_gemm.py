"""kernels.specialized_gemm and specialized_gemm_fp8 give the bits of the kernels that they stand for, which are tested
against float64, and compile for Hopper where there is none."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import triton

from tests.kernels.common import (
    DEVICE,
    poisoned,
    poisoned_fp8_rows,
    randn,
    random_fp8_weights,
    random_ids,
)
from vllm_moe_modular.bench.timing import captured
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.kernels.align_rows import AlignedRows, align_rows, scratch_ints
from vllm_moe_modular.kernels.blocks_of_batch import batch_scratch_ints, blocks_of_batch
from vllm_moe_modular.kernels.gated_activation import GatedActivation
from vllm_moe_modular.kernels.gather_rows import gather_rows
from vllm_moe_modular.kernels.gemm_tiles import GemmTile, GemmTiles
from vllm_moe_modular.kernels.grouped_gemm_down import grouped_gemm_down
from vllm_moe_modular.kernels.grouped_gemm_down_fp8 import grouped_gemm_down_fp8
from vllm_moe_modular.kernels.grouped_gemm_gated import grouped_gemm_gated
from vllm_moe_modular.kernels.grouped_gemm_gated_fp8 import grouped_gemm_gated_fp8
from vllm_moe_modular.kernels.launch import TRIED_GLUON, can_specialize
from vllm_moe_modular.kernels.quantize_fp8 import Fp8Rows, quantize_fp8
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import Workspace

SILU = GatedActivation("silu")
OAI = GatedActivation("swiglu_oai", limit=7.0)


@dataclass(frozen=True)
class Case:
    why: str
    R: int = 300
    K: int = 2
    E: int = 4
    H: int = 256
    F: int = 384
    block_rows: int = 128
    stages: int = 4
    activation: GatedActivation = SILU
    bias: bool = False
    weight_on_input: bool = False
    gathered: bool = False
    channels: bool = False
    odd_places: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return self.why

    def tile(self, columns: int, depth: int, *, specialized: bool) -> GemmTile:
        if specialized:
            return GemmTile(columns, depth, 8, 4, self.stages, programs_per_sm=1, specialized=True)
        return GemmTile(128, depth, 8, 8, 2)


BOTH = [
    Case("blocks of 128 rows"),
    Case("blocks of 64 rows", block_rows=64, stages=5),
    Case("one row for most experts", R=3, E=16),
    Case("more tiles than multiprocessors, more steps than stages", R=3000, E=16, H=1024, F=768),
    Case("weights on the input, biases", weight_on_input=True, bias=True),
    Case("rows gathered before", gathered=True, bias=True),
    Case("rows at odd places", odd_places=True),
]
PLAIN = [
    *BOTH,
    Case("float16", dtype=torch.float16),
    Case("blocks of 192 rows", block_rows=192, stages=3, gathered=True, R=700),
    Case(
        "blocks of 192 rows, biases, a tile that overhangs", block_rows=192, stages=3, gathered=True, F=200, bias=True
    ),
    Case("a limit and biases, no size a multiple of 128", H=192, F=200, activation=OAI, bias=True),
    Case("a last step and a last tile that overhang", H=2880, F=2880, E=3, R=70, bias=True),
]
FP8 = [
    *BOTH,
    Case("scales of channels, biases", channels=True, bias=True),
    Case("scales of channels, blocks of 64 rows", channels=True, block_rows=64, stages=5),
]
on_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="Hopper's instructions"
)


def align(case: Case, block_rows: int) -> AlignedRows:
    ids = random_ids(case.R, case.K, case.E)
    ids[0, 0], ids[1, 1], ids[2] = -1, case.E, -1
    scratch = poisoned(scratch_ints(ids.numel(), case.E, block_rows), dtype=torch.int32)
    return align_rows(ids, case.E, block_rows, scratch=scratch)


def blocks_by_kind(case: Case) -> dict[bool, tuple[int, AlignedRows]]:
    """Rows of a block and the blocks, for ordinary and for specialised kernels; positions are the same."""
    return {
        kind: (rows, align(case, rows)) for kind, rows in ((False, min(128, case.block_rows)), (True, case.block_rows))
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN, which is where nothing was written, is what it was."""
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(as_int), b.view(as_int))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_gives_the_same_bits(case: Case) -> None:
    blocks = blocks_by_kind(case)
    rows, S = blocks[True][1], case.R * case.K
    x = randn(case.R, case.H, dtype=case.dtype)
    if case.gathered:
        by_position = poisoned(S, case.H, dtype=case.dtype)
        gather_rows(x, rows, top_k=case.K, out_SH=by_position)
        x = by_position
    if case.odd_places:
        x = torch.cat([x, x[:, :3]], dim=1)[:, : case.H]
    w13 = randn(case.E, 2 * case.F, case.H, dtype=case.dtype, seed=1) / case.H**0.5
    w2 = randn(case.E, case.H, case.F, dtype=case.dtype, seed=2) / case.F**0.5
    bias13 = randn(case.E, 2 * case.F, dtype=case.dtype, seed=3) if case.bias else None
    bias2 = randn(case.E, case.H, dtype=case.dtype, seed=4) if case.bias else None
    weights = randn(case.R, case.K, dtype=torch.float32, seed=5).abs() if case.weight_on_input else None
    activated, y = {}, {}
    for specialized, (block_rows, of_kind) in blocks.items():
        activated[specialized] = poisoned(S, case.F, dtype=case.dtype)
        grouped_gemm_gated(
            x, w13, of_kind, out_SF=activated[specialized], top_k=case.K, activation=case.activation, bias=bias13,
            topk_weights_RK=weights, block_rows=block_rows, tile=case.tile(128, 64, specialized=specialized),
            gathered=case.gathered,
        )  # fmt: skip
        y[specialized] = poisoned(S, case.H, dtype=case.dtype)
        grouped_gemm_down(
            activated[False], w2, of_kind, out_SH=y[specialized], bias=bias2, block_rows=block_rows,
            tile=case.tile(256, 64, specialized=specialized),
        )  # fmt: skip
    assert same_bits(activated[True], activated[False]), "the gated GEMM"
    assert same_bits(y[True], y[False]), "the down GEMM"
    assert not y[True].isnan().all(), "nothing was written"


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", FP8, ids=str)
def test_fp8_gives_the_same_bits(case: Case) -> None:
    blocks = blocks_by_kind(case)
    rows, S = blocks[True][1], case.R * case.K
    x = poisoned_fp8_rows(S if case.gathered else case.R, case.H)
    quantize_fp8(randn(case.R, case.H, dtype=torch.bfloat16), out=x, rows=rows if case.gathered else None, top_k=case.K)
    if case.odd_places:
        bytes_ = torch.cat([x.values.new_zeros(3).view(torch.uint8), x.values.view(torch.uint8).flatten()])
        x = Fp8Rows(bytes_[3:].view(torch.float8_e4m3fn).view_as(x.values), x.scales)
    w13, scale13 = random_fp8_weights(case.E, 2 * case.F, case.H, blocks=not case.channels, seed=1)
    w2, scale2 = random_fp8_weights(case.E, case.H, case.F, blocks=not case.channels, seed=2)
    bias13 = randn(case.E, 2 * case.F, dtype=torch.bfloat16, seed=3) if case.bias else None
    bias2 = randn(case.E, case.H, dtype=torch.bfloat16, seed=4) if case.bias else None
    weights = randn(case.R, case.K, dtype=torch.float32, seed=5).abs() if case.weight_on_input else None
    activated, y = {}, {}
    for specialized, (block_rows, of_kind) in blocks.items():
        activated[specialized] = poisoned_fp8_rows(S, case.F)
        grouped_gemm_gated_fp8(
            x, w13, scale13, of_kind, out=activated[specialized], top_k=case.K, activation=SILU, bias=bias13,
            topk_weights_RK=weights, block_rows=block_rows, tile=case.tile(128, 128, specialized=specialized),
            gathered=case.gathered,
        )  # fmt: skip
        y[specialized] = poisoned(S, case.H, dtype=torch.bfloat16)
        grouped_gemm_down_fp8(
            activated[False], w2, scale2, of_kind, out_SH=y[specialized], bias=bias2, block_rows=block_rows,
            tile=case.tile(256, 128, specialized=specialized),
        )  # fmt: skip
    assert same_bits(activated[True].values, activated[False].values), "the gated GEMM"
    assert same_bits(activated[True].scales, activated[False].scales), "the scales of the gated GEMM"
    assert same_bits(y[True], y[False]), "the down GEMM"
    assert not y[True].isnan().all(), "nothing was written"


@pytest.mark.gpu
@on_hopper
def test_blocks_of_a_batch_whose_scales_lie_column_by_column() -> None:
    E, C, H, F = 3, 200, 512, 256
    scratch = poisoned(batch_scratch_ints(E, C, 128), dtype=torch.int32)
    rows = blocks_of_batch(torch.tensor([200, 0, 70], device=DEVICE), C, 128, scratch=scratch)
    x = poisoned_fp8_rows(E * C, H)
    quantize_fp8(randn(E * C, H, dtype=torch.bfloat16), out=x)
    by_column = x.scales.view(E, C, -1).transpose(1, 2).contiguous().transpose(1, 2)
    w13, scale13 = random_fp8_weights(E, 2 * F, H, blocks=True, seed=1)
    outs = []
    for specialized in (False, True):
        outs.append(poisoned_fp8_rows(E * C, F))
        grouped_gemm_gated_fp8(
            Fp8Rows(x.values, by_column), w13, scale13, rows, out=outs[-1], top_k=1, activation=SILU, block_rows=128,
            tile=Case("").tile(128, 128, specialized=specialized), gathered=True,
        )  # fmt: skip
    assert same_bits(outs[1].values, outs[0].values)
    assert same_bits(outs[1].scales, outs[0].scales)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [1, 70_000], ids="{} rows".format)
def test_whole_layers_in_a_graph(rows: int) -> None:
    """70,000 rows, each sent twice: slots times hidden passes 2**28, and the grid is what a GPU holds at a time."""
    E, K, H, F = 8, 2, 2048, 256
    w13 = randn(E, 2 * F, H, dtype=torch.bfloat16, seed=1) / H**0.5
    w2 = randn(E, H, F, dtype=torch.bfloat16, seed=2) / F**0.5
    assert can_specialize(w13, w2, interleaved=False) == triton.__version__.startswith(TRIED_GLUON)
    weights = ExpertWeights(w13=w13, w2=w2)
    x = torch.randn(rows, H, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.randint(-1, E, (rows, K), device=DEVICE, dtype=torch.int32)
    given = StandardRows(x, ids, torch.rand(rows, K, device=DEVICE))
    outs = []
    for specialized in (False, True):
        gated, down = (Case("").tile(columns, 64, specialized=specialized) for columns in (128, 256))
        part = TritonExperts(
            Activation(kind=ActivationKind.SILU), tiles=GemmTiles(128, gated, down), slot_by_slot=False
        )
        workspace, out = Workspace(DEVICE), torch.empty_like(x)
        workspace.reserve(sum(spec.nbytes for spec in part.workspace(given, weights)))

        def layer(part: TritonExperts = part, workspace: Workspace = workspace, out: torch.Tensor = out) -> None:
            scratch = workspace(part.workspace(given, weights))
            part.apply(
                given, weights, workspace=scratch, weight_and_reduce_by=WeightAndReduceBy.EXPERTS,
                router_weight_on_input=False, out_RH=out,
            )  # fmt: skip

        graph = captured([layer])
        out.fill_(float("nan"))
        graph.replay()
        outs.append(out)
    assert same_bits(outs[1], outs[0])
    assert not outs[1].isnan().any()


@pytest.mark.skipif(not triton.__version__.startswith(TRIED_GLUON), reason=f"was tried with Triton {TRIED_GLUON}x")
def test_compiles_for_hopper_without_spilling_in_the_loop() -> None:
    """In a process of its own: here Triton interprets, and Gluon has no interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper"], env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout)
    assert len(reports) >= 6
    for name, report in reports.items():
        assert report["matrix_instructions"] >= 4, name
        # With 160 registers to a thread some spill when a tile is stored, none in the loop.
        most = 48 if name == "gated, blocks of 192 rows, all options" else 16
        assert report["spilled"] <= most, f"{name}: {report['spilled']} spills"
        assert report["shared_bytes"] <= 227 * 1024, name
