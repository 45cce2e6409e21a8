"""Experts of the batched format on blocks that are partly full, beside the standard format on the same rows.

    python -m benchmarks.batched_experts [--models qwen3-30b-a3b ...] [--capacity 64 512] [--filled 0.25] [--fp8]

The time of the batched format has to follow the rows that are there, not the room. Results are compared with each
other, then timed in turns, in CUDA graphs: medians in microseconds, and the best of the batched format over the best of
the standard format. There each row has one expert; so it sorts the rows as well, and copies each once more.

Letters: E experts, C rows of a block, S rows that are there.
"""

import argparse
from dataclasses import dataclass, replace
from functools import partial

import torch

from vllm_moe_modular.bench.problems import activation_of, random_weights
from vllm_moe_modular.bench.shapes import FP8, SHAPES, Shape
from vllm_moe_modular.bench.timing import captured, machine, require_cuda, time_in_turns
from vllm_moe_modular.experts.deep_gemm_batched_experts import DeepGemmBatchedExperts
from vllm_moe_modular.experts.deep_gemm_experts import DeepGemmExperts
from vllm_moe_modular.experts.triton_batched_experts import TritonBatchedExperts
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.modular.experts import ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, Rows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import Workspace

CUDA = torch.device("cuda")
NAMES = ("triton", "triton_batched", "deep_gemm", "deep_gemm_batched")
DEFAULT_MODELS = ("qwen3-30b-a3b", "deepseek-v3-ep8")
SAME = 0.02
"""Relative distance of two results that mean the same: other tiles, and other values in fp8 on the way."""


@dataclass(frozen=True)
class Problem:
    """The same rows in both formats; row i of the standard format is row `order[i]` of all blocks in a row."""

    batched: BatchedRows
    standard: StandardRows
    order: torch.Tensor

    @classmethod
    def draw(cls, shape: Shape, capacity: int, filled: float) -> "Problem":
        """As many rows of each expert as a router that scatters at random gives it; they arrive in any order."""
        S = round(shape.E * capacity * filled)
        counts_E = torch.bincount(torch.randint(shape.E, (S,), device=CUDA), minlength=shape.E).clamp(max=capacity)
        e_S, c_S = _places(counts_E)
        x_SH = torch.randn(len(e_S), shape.H, device=CUDA).bfloat16()
        x_ECH = torch.full((shape.E, capacity, shape.H), float("nan"), device=CUDA, dtype=torch.bfloat16)
        x_ECH[e_S, c_S] = x_SH
        order = torch.randperm(len(e_S), device=CUDA)
        ones = torch.ones(len(e_S), 1, device=CUDA)
        return cls(BatchedRows(x_ECH, counts_E.int()), StandardRows(x_SH[order], e_S[order, None].int(), ones), order)

    def in_order(self, y_ECH: torch.Tensor) -> torch.Tensor:
        """Of a result in the batched format the rows that are there, as the standard format has them."""
        return y_ECH[_places(self.batched.expert_num_tokens.long())][self.order]


def _places(counts_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row that is there, its expert and its number in the block."""
    e_S = torch.arange(len(counts_E), device=CUDA).repeat_interleave(counts_E)
    return e_S, torch.arange(len(e_S), device=CUDA) - (counts_E.cumsum(0) - counts_E)[e_S]


def run(experts: PermuteExpertsUnpermute, rows: Rows, weights: ExpertWeights, workspace: Workspace) -> torch.Tensor:
    by = WeightAndReduceBy.EXPERTS if isinstance(rows, StandardRows) else WeightAndReduceBy.FINALIZE
    return experts.apply(
        rows, weights, workspace=workspace(experts.workspace(rows, weights)), weight_and_reduce_by=by,
        router_weight_on_input=False,
    )  # fmt: skip


def measure(shape: Shape, capacity: int, filled: float, rounds: int) -> str:
    """One line of the table.

    Raises:
        RuntimeError: two results differ.
    """
    weights, activation = random_weights(shape), activation_of(shape)
    problem = Problem.draw(shape, capacity, filled)
    kinds: dict[str, PermuteExpertsUnpermute] = {
        "triton": TritonExperts(activation),
        "triton_batched": TritonBatchedExperts(activation),
    }
    if shape.fp8:
        kinds |= {"deep_gemm": DeepGemmExperts(activation), "deep_gemm_batched": DeepGemmBatchedExperts(activation)}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    workspaces = {name: Workspace(CUDA) for name in kinds}  # held as long as graphs that point into them
    right = torch.empty(0)
    for name, experts in kinds.items():
        is_batched = name.endswith("_batched")
        rows = problem.batched if is_batched else problem.standard
        call = partial(run, experts, rows, weights, workspaces[name])
        got = (problem.in_order(call()) if is_batched else call()).float()
        right = got.clone() if name == "triton" else right
        if not (distance := float((got - right).norm() / right.norm())) <= SAME:
            raise RuntimeError(f"{shape.model}, {name}: {distance:.3f} away from triton")
        graphs[name] = captured([call] * 4)
    us = {name: timing.median_us for name, timing in time_in_turns(graphs, 4, rounds).items()}
    standard, batched = (min(t for n, t in us.items() if n.endswith("_batched") == kind) for kind in (False, True))
    cells = "".join(f"{us[name]:>19.1f}" if name in us else f"{'-':>19}" for name in NAMES)
    return f"{shape.model:18}{capacity:>6}{len(problem.order):>8}{cells}{batched / standard:>8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, metavar="MODEL", default=list(DEFAULT_MODELS))
    parser.add_argument("--capacity", nargs="+", type=int, default=[64, 512, 2048], metavar="C")
    parser.add_argument("--filled", type=float, default=0.25, help="of the blocks, in the mean")
    parser.add_argument("--fp8", action="store_true", help="weights in fp8 with a scale per block of 128 x 128")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    require_cuda("benchmarks.batched_experts")
    print(machine())
    print(f"{'model':18}{'C':>6}{'rows':>8}" + "".join(f"{name:>19}" for name in NAMES) + "   ratio")
    for model in args.models:
        shape = replace(SHAPES[model], weights=FP8) if args.fp8 else SHAPES[model]
        for capacity in args.capacity:
            print(measure(shape, capacity, args.filled, args.rounds), flush=True)


if __name__ == "__main__":
    main()
