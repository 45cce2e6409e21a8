"""Our experts against their peers, as a fraction of the roof: one H200, bf16 or fp8 weights, random routing.

    python -m benchmarks.experts --out experts.jsonl [--models qwen3-30b-a3b ...] [--tokens 1 8 ...] [--rounds 15]
                                 [--fp8]

Peers, where they can be imported: vLLM's `fused_experts` (Triton, with the tuned table that it ships), and plain torch
over `torch._grouped_mm`. Whatever disagrees with float64 is reported and not timed: in
fp8, where rows are quantised too, it may be twice as wrong as plain torch over the same quantised numbers. All
candidates of one point are captured in CUDA graphs over the same inputs and replayed in turns. One JSON line per
candidate and point, each with the machine.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from math import exp, log
from pathlib import Path

import torch

from benchmarks.harness import (
    SHAPES,
    Shape,
    captured,
    machine,
    random_steps,
    random_weights,
    roof_us,
    steps_to_rotate,
    time_in_turns,
)
from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.experts.deep_gemm_experts import DeepGemmExperts
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.modular.experts import ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.fp8 import dequantized
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.reference.gated_activation import gated_activation
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.reference.small_batch_down import small_batch_down
from vllm_moe_modular.reference.small_batch_gated import small_batch_gated

TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 16384)
REGIONS = {"1": (1, 1), "8-128": (8, 128), "512": (512, 512), "2048-16384": (2048, 16384)}

FP8_MODELS = ("qwen3-30b-a3b", "deepseek-v3-ep8")

Layer = Callable[[StandardRows], torch.Tensor]


def layer_of(part: PermuteExpertsUnpermute, weights: ExpertWeights, workspace: Workspace) -> Layer:
    def layer(rows: StandardRows) -> torch.Tensor:
        return part.apply(
            rows, weights, workspace=workspace(part.workspace(rows, weights)),
            weight_and_reduce_by=WeightAndReduceBy.EXPERTS, router_weight_on_input=False,
        )  # fmt: skip

    return layer


def ours(shape: Shape, weights: ExpertWeights, workspace: Workspace) -> Layer:
    return layer_of(TritonExperts(shape.activation), weights, workspace)


def deep_gemm(shape: Shape, weights: ExpertWeights, workspace: Workspace) -> Layer:
    return layer_of(DeepGemmExperts(shape.activation), weights, workspace)


def vllm_triton(shape: Shape, weights: ExpertWeights, workspace: Workspace) -> Layer:  # noqa: ARG001
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    quant_config = None
    if shape.fp8:
        quant_config = fp8_w8a8_moe_quant_config(
            w1_scale=weights.w13_scale, w2_scale=weights.w2_scale, block_shape=[128, 128]
        )
    return lambda rows: fused_experts(
        rows.x, weights.w13, weights.w2, rows.topk_weights, rows.topk_ids, quant_config=quant_config
    )


def torch_grouped(shape: Shape, weights: ExpertWeights, workspace: Workspace) -> Layer:  # noqa: ARG001
    """Sort, two grouped products, an activation, a weighted sum: what torch alone can capture in a CUDA graph."""

    def layer(rows: StandardRows) -> torch.Tensor:
        ids = rows.topk_ids.flatten()
        order = ids.argsort()
        ends = torch.searchsorted(ids[order], torch.arange(1, shape.E + 1, device=ids.device, dtype=ids.dtype))
        x = rows.x[order // shape.K]
        gate, up = torch._grouped_mm(x, weights.w13.mT, offs=ends.int()).chunk(2, dim=-1)
        y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, weights.w2.mT, offs=ends.int())
        y = torch.empty_like(y).index_copy_(0, order, y).view(-1, shape.K, shape.H)
        return (y * rows.topk_weights.to(y.dtype)[..., None]).sum(1)

    return layer


Candidate = Callable[[Shape, ExpertWeights, Workspace], Layer]

CANDIDATES: dict[str, Candidate] = {"ours": ours, "deep_gemm": deep_gemm, "torch": torch_grouped, "vllm": vllm_triton}
FP8_CANDIDATES: dict[str, Candidate] = {"ours": ours, "deep_gemm": deep_gemm, "vllm": vllm_triton}


def candidates(shape: Shape, weights: ExpertWeights) -> dict[str, tuple[Layer, Workspace]]:
    """Each with scratch memory of its own: what grows for one would move under the captured graph of another."""
    layers = {}
    for name, candidate in (FP8_CANDIDATES if shape.fp8 else CANDIDATES).items():
        if shape.interleaved_swiglu and name != "ours":
            continue
        try:
            workspace = Workspace(torch.device("cuda"))
            layers[name] = candidate(shape, weights, workspace), workspace
        except (ImportError, UnsupportedError) as e:
            print(f"{name} is left out: {e}", file=sys.stderr)
    return layers


def relative_error(shape: Shape, weights: ExpertWeights, rows: StandardRows, got: torch.Tensor) -> tuple[float, float]:
    """Of `got` and of plain torch in bf16 against float64, on a few rows.

    In fp8 plain torch quantises the rows and the activated rows, float64 does not.
    """
    some = torch.linspace(0, len(rows.x) - 1, min(4, len(rows.x))).long()
    part = StandardRows(rows.x[some], rows.topk_ids[some], rows.topk_weights[some])
    a = shape.activation
    activation = partial(
        gated_activation, name=a.kind.value, limit=a.limit, alpha=a.alpha, beta=a.beta, interleaved=a.interleaved
    )
    used = part.topk_ids.unique()
    few = part.topk_ids.clone()
    for new, old in enumerate(used.tolist()):
        few[part.topk_ids == old] = new

    def meant(w: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if scale is None:
            return w[used].to(dtype)
        return torch.stack([dequantized(w[e], scale[e], dtype) for e in used.tolist()])

    def reference(dtype: torch.dtype) -> torch.Tensor:
        def on_the_way(x: torch.Tensor) -> torch.Tensor:
            quantise = shape.fp8 and dtype == torch.bfloat16
            return dequantize_fp8(*quantize_fp8(x)).to(dtype) if quantise else x.to(dtype)

        w13, w2 = meant(weights.w13, weights.w13_scale, dtype), meant(weights.w2, weights.w2_scale, dtype)
        b13, b2 = (None if b is None else b[used].to(dtype) for b in (weights.w13_bias, weights.w2_bias))
        activated = small_batch_gated(on_the_way(part.x), w13, few, activation=activation, bias=b13)
        return small_batch_down(on_the_way(activated), w2, few, part.topk_weights, bias=b2).double()

    truth = reference(torch.float64)
    errors = [(y - truth).norm() / truth.norm() for y in (got[some].double(), reference(torch.bfloat16))]
    return errors[0].item(), errors[1].item()


def measure(shape: Shape, weights: ExpertWeights, M: int, *, rounds: int) -> Iterator[dict[str, object]]:
    steps = random_steps(shape, M, steps_to_rotate(shape, M))
    roof = roof_us(shape, steps)
    errors, graphs, workspaces = {}, {}, {}
    for name, (layer, workspaces[name]) in candidates(shape, weights).items():
        try:
            errors[name], plain = relative_error(shape, weights, steps[-1], layer(steps[-1]))
            if errors[name] <= 2 * plain:
                graphs[name] = captured([partial(layer, step) for step in steps])
                continue
            why = f"relative error {errors[name]:.2e} against {plain:.2e} of plain torch"
        except (RuntimeError, ValueError) as e:
            why = f"{type(e).__name__}: {str(e).splitlines()[0]}"
        print(f"{shape.model} M={M} {name} is not timed: {why}")
    for name, timing in time_in_turns(graphs, calls=len(steps), rounds=rounds).items():
        yield {
            "experts": name, "model": shape.model, "weights": "fp8 128x128" if shape.fp8 else "bf16", "M": M,
            "roof_us": roof, "eff": roof / timing.median_us,
            "error": errors[name], "workspace_bytes": workspaces[name].nbytes, **asdict(timing),
        }  # fmt: skip


def geometric_mean(ratios: list[float]) -> float:
    return exp(sum(map(log, ratios)) / len(ratios))


def summary(results: list[dict[str, object]]) -> None:
    """Microseconds per point, and ours over vLLM's by region."""
    points: dict[tuple[str, int], dict[str, dict[str, object]]] = {}
    for r in results:
        points.setdefault((str(r["model"]), int(str(r["M"]))), {})[str(r["experts"])] = r
    ratios: dict[int, list[float]] = {}
    best: dict[int, list[float]] = {}
    print(f"{'model':16}{'M':>6}{'roof':>9}{'ours':>9}{'eff':>6}{'vllm':>9}{'ours/vllm':>10}  others")
    for (model, M), by in points.items():
        us = {name: float(str(r["median_us"])) for name, r in by.items()}
        if "ours" not in us:
            continue
        roof = float(str(by["ours"]["roof_us"]))
        cells = f"{model:16}{M:6}{roof:9.1f}{us['ours']:9.1f}{roof / us['ours']:6.2f}"
        if "vllm" in us:
            ratios.setdefault(M, []).append(us["ours"] / us["vllm"])
            best.setdefault(M, []).append(min(us["ours"], us.get("deep_gemm", us["ours"])) / us["vllm"])
            cells += f"{us['vllm']:9.1f}{us['ours'] / us['vllm']:10.2f}"
        print(cells + "".join(f"  {name} {t:.1f}" for name, t in us.items() if name not in ("ours", "vllm")))
    for what, by_tokens in (("ours", ratios), ("the better of ours and deep_gemm", best)):
        for region, (low, high) in REGIONS.items():
            if inside := [ratio for M, its in by_tokens.items() if low <= M <= high for ratio in its]:
                print(f"M {region}: {what} / vllm {geometric_mean(inside):.3f} (mean), worst {max(inside):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="JSON lines are appended to this file")
    parser.add_argument("--models", nargs="+", choices=SHAPES, help="without it all; with --fp8 two")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fp8", action="store_true", help="weights in fp8 with a scale per 128 x 128 block")
    args = parser.parse_args()
    where, results = machine(), []
    with args.out.open("a") as f:
        for model in args.models or (FP8_MODELS if args.fp8 else SHAPES):
            shape = replace(SHAPES[model], fp8=args.fp8)
            weights = random_weights(shape)
            for M in args.tokens:
                for result in measure(shape, weights, M, rounds=args.rounds):
                    results.append(result)
                    f.write(json.dumps(result | where) + "\n")
                    f.flush()
            del weights
    summary(results)


if __name__ == "__main__":
    main()
