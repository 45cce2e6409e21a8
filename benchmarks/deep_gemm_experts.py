"""The deep_gemm experts against the triton experts and against DeepGEMM's two GEMMs alone: one H200, random routing.

    python -m benchmarks.deep_gemm_experts --out deep_gemm.jsonl [--points bf16/mixtral-8x7b ...] [--tokens 512 ...]

"gemms" is what nobody who uses DeepGEMM can go below: both products over rows that are already in place, without
routing, activation, quantisation or weighted sum. Whatever disagrees with float64 is reported and not timed. All
candidates of one point are captured in CUDA graphs over the same inputs and replayed in turns. --breakdown adds each
launch of one call, from the profiler. --compile only fills DeepGEMM's cache, so that several of these can run side by
side before.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.experts import Layer, layer_of
from benchmarks.harness import (
    SHAPES,
    Shape,
    captured,
    machine,
    random_steps,
    random_weights,
    steps_to_rotate,
    time_in_turns,
)
from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.experts.deep_gemm_experts import DeepGemmExperts
from vllm_moe_modular.experts.deep_gemm_library import expected_rows, load_deep_gemm
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.kernels.place_rows import max_placed_rows, place_rows, scratch_ints
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.reference.quantize_groups import dequantize_groups, quantize_groups

DEEPSEEK_V3_EP8 = Shape("deepseek-v3-ep8", E=32, K=8, H=7168, F=2048)
POINTS = {
    **{f"bf16/{m}": (SHAPES[m], False) for m in ("qwen3-30b-a3b", "mixtral-8x7b", "qwen3-235b-half")},
    **{f"fp8/{s.model}": (s, True) for s in (SHAPES["qwen3-30b-a3b"], DEEPSEEK_V3_EP8)},
}
TOKENS = (512, 2048, 8192)
FLOAT8_MAX = 448.0


def quantized(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, N, K] as float8_e4m3fn with a scale per 128 x 128, expert by expert."""
    E, N, K = w.shape
    q = torch.empty(E, N, K, device=w.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(E, N // 128, K // 128, device=w.device)
    for e in range(E):
        blocks = w[e].float().view(N // 128, 128, K // 128, 128)
        scale[e] = blocks.abs().amax((1, 3)) / FLOAT8_MAX
        q[e] = (blocks / scale[e][:, None, :, None]).view(N, K).to(q.dtype)
    return q, scale


def plain(w: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """[N, K], of one expert."""
    if scale is None:
        return w.to(dtype)
    return (w.to(dtype).view(len(scale), 128, -1, 128) * scale.to(dtype)[:, None, :, None]).view(w.shape)


def gemms_alone(shape: Shape, weights: ExpertWeights, M: int) -> Layer:
    """Both products over random rows, in the layout that the routing of each step gives."""
    library = load_deep_gemm()
    E, H, F, S = shape.E, shape.H, shape.F, M * shape.K
    P = max_placed_rows(S, E, library.alignment)
    x, activated = (torch.randn(P, n, device="cuda", dtype=torch.bfloat16) for n in (H, F))
    x_scales = activated_scales = None
    if weights.w13_scale is not None:
        x, activated = x.to(torch.float8_e4m3fn), activated.to(torch.float8_e4m3fn)
        x_scales, activated_scales = (
            (torch.ones(n // 128, P, device="cuda"), s) for n, s in ((H, weights.w13_scale), (F, weights.w2_scale))
        )
    gate_up, y = (torch.empty(P, n, device="cuda", dtype=torch.bfloat16) for n in (2 * F, H))
    ends: dict[int, torch.Tensor] = {}

    def layer(rows: StandardRows) -> torch.Tensor:
        if id(rows) not in ends:
            scratch = torch.empty(scratch_ints(S, E), device="cuda", dtype=torch.int32)
            ends[id(rows)] = place_rows(rows.topk_ids, E, library.alignment, scratch=scratch).ends
        where = {"ends": ends[id(rows)], "expected_rows": expected_rows(S, E)}
        library.grouped_gemm(x, weights.w13, out_PN=gate_up, scales=x_scales, **where)
        library.grouped_gemm(activated, weights.w2, out_PN=y, scales=activated_scales, **where)
        return y

    return layer


def relative_error(weights: ExpertWeights, rows: StandardRows, got: torch.Tensor) -> tuple[float, float]:
    """Of `got` and of plain torch, quantised where the weights are, against float64; the first and the last row."""
    s13, s2 = weights.w13_scale, weights.w2_scale

    def expert(x: torch.Tensor, e: int, dtype: torch.dtype, *, quantize: bool) -> torch.Tensor:
        def multiplied(t: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
            t = dequantize_groups(*quantize_groups(t)) if quantize else t
            y = plain(w[e], None if scale is None else scale[e], dtype) @ t.to(dtype)
            return y.bfloat16().to(dtype) if dtype != torch.float64 else y

        gate, up = multiplied(x, weights.w13, s13).chunk(2)
        return multiplied(torch.nn.functional.silu(gate) * up, weights.w2, s2)

    def reference(dtype: torch.dtype, *, quantize: bool) -> torch.Tensor:
        return torch.stack([
            sum(weight.to(dtype) * expert(rows.x[r].to(dtype), int(e), dtype, quantize=quantize)
                for e, weight in zip(rows.topk_ids[r], rows.topk_weights[r], strict=True))
            for r in (0, -1)
        ]).double()  # fmt: skip

    truth = reference(torch.float64, quantize=False)
    naive = reference(torch.float32 if s13 is not None else torch.bfloat16, quantize=s13 is not None)
    errors = [(y - truth).norm() / truth.norm() for y in (got[[0, -1]].double(), naive)]
    return errors[0].item(), errors[1].item()


def candidates(shape: Shape, weights: ExpertWeights) -> dict[str, Layer]:
    return {
        "deep_gemm": layer_of(DeepGemmExperts(shape.activation), weights, Workspace(torch.device("cuda"))),
        "triton": layer_of(TritonExperts(shape.activation), weights, Workspace(torch.device("cuda"))),
    }


def weights_of(point: str) -> ExpertWeights:
    shape, fp8 = POINTS[point]
    weights = random_weights(shape)
    if not fp8:
        return weights
    (w13, s13), (w2, s2) = quantized(weights.w13), quantized(weights.w2)
    return ExpertWeights(w13=w13, w2=w2, w13_scale=s13, w2_scale=s2)


def measure(point: str, weights: ExpertWeights, M: int, *, rounds: int) -> Iterator[dict[str, object]]:
    shape, _ = POINTS[point]
    steps = random_steps(shape, M, steps_to_rotate(shape, M))
    errors, graphs = {"gemms": 0.0}, {}
    for name, layer in candidates(shape, weights).items():
        try:
            errors[name], torchs = relative_error(weights, steps[-1], layer(steps[-1]))
            if errors[name] <= 2 * torchs:
                graphs[name] = captured([partial(layer, step) for step in steps])
                continue
            why = f"relative error {errors[name]:.2e} against {torchs:.2e} of plain torch"
        except (UnsupportedError, RuntimeError) as e:
            why = f"{type(e).__name__}: {str(e).splitlines()[0]}"
        print(f"{point} M={M} {name} is not timed: {why}")
    alone = gemms_alone(shape, weights, M)
    graphs["gemms"] = captured([partial(alone, step) for step in steps])
    for name, timing in time_in_turns(graphs, calls=len(steps), rounds=rounds).items():
        yield {"experts": name, "point": point, "M": M, "error": errors[name], 
               **asdict(timing)}  # fmt: skip


def breakdown(point: str, weights: ExpertWeights, M: int, *, calls: int = 5) -> None:
    """Each launch of one call of ours, in microseconds."""
    shape, _ = POINTS[point]
    layer = candidates(shape, weights, Workspace(torch.device("cuda")))["deep_gemm"]
    steps = random_steps(shape, M, calls)
    layer(steps[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for step in steps:
            layer(step)
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    per_call = len(events) // calls
    told = []
    for i in range(per_call):  # the launches of one call follow each other, the same in each
        name = events[i].name.split("<")[0].split("(")[0].split("::")[-1].removeprefix("void ").strip("_")
        us = sum(e.time_range.elapsed_us() for e in events[i::per_call]) / calls
        told.append(f"{name.removesuffix('_kernel')} {us:.1f}")
    print(f"{point} M={M}: {', '.join(told) or 'the profiler saw no launch'}")


def summary(results: list[dict[str, object]]) -> None:
    """Microseconds per point; ours over the GEMMs alone, and over triton."""
    points: dict[tuple[str, int], dict[str, float]] = {}
    for r in results:
        points.setdefault((str(r["point"]), int(str(r["M"]))), {})[str(r["experts"])] = float(str(r["median_us"]))
    print(f"{'point':22}{'M':>6}{'gemms':>9}{'deep_gemm':>11}{'/gemms':>8}{'triton':>9}{'/triton':>9}")
    for (point, M), us in points.items():
        cells = f"{point:22}{M:6}{us['gemms']:9.1f}"
        if "deep_gemm" in us:
            cells += f"{us['deep_gemm']:11.1f}{us['deep_gemm'] / us['gemms']:8.3f}"
            if "triton" in us:
                cells += f"{us['triton']:9.1f}{us['deep_gemm'] / us['triton']:9.3f}"
        print(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file")
    parser.add_argument("--points", nargs="+", choices=POINTS, default=list(POINTS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--breakdown", action="store_true")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    where, results = machine(), []
    for point in args.points:
        weights, (shape, _) = weights_of(point), POINTS[point]
        if args.compile:
            layer = candidates(shape, weights, Workspace(torch.device("cuda")))["deep_gemm"]
            layer(random_steps(shape, max(args.tokens), 1)[0])
            continue
        for M in args.tokens:
            for result in measure(point, weights, M, rounds=args.rounds):
                results.append(result)
                if args.out:
                    with args.out.open("a") as f:
                        f.write(json.dumps(result | where) + "\n")
            if args.breakdown:
                breakdown(point, weights, M)
        del weights
    if not args.compile:
        summary(results)


if __name__ == "__main__":
    main()
