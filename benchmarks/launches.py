"""Each launch of one call of our experts, in microseconds, from the profiler: one GPU, random routing.

python -m benchmarks.launches [--experts triton deep_gemm] [--models qwen3-30b-a3b ...] [--tokens 512 ...] [--fp8]
"""

import argparse

import torch

from vllm_moe_modular.bench.candidates import CANDIDATES, Candidate
from vllm_moe_modular.bench.problems import random_steps, random_weights
from vllm_moe_modular.bench.report import OURS
from vllm_moe_modular.bench.shapes import SHAPES
from vllm_moe_modular.bench.timing import require_cuda
from vllm_moe_modular.cli.bench_experts import chosen_shapes
from vllm_moe_modular.kernels.tuned_tables import tuned_table
from vllm_moe_modular.modular.prepare_finalize import StandardRows


def launches(candidate: Candidate, steps: list[StandardRows]) -> list[str]:
    """Name and mean microseconds, in the order of the launches, which is the same in each call."""
    candidate.layer(steps[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for step in steps:
            candidate.layer(step)
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    per_call = len(events) // len(steps)
    told = []
    for i in range(per_call):
        name = events[i].name.split("<")[0].split("(")[0].split("::")[-1].removeprefix("void ").strip("_")
        us = sum(e.time_range.elapsed_us() for e in events[i::per_call]) / len(steps)
        told.append(f"{name.removesuffix('_kernel')} {us:.1f}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", nargs="+", choices=OURS, default=list(OURS))
    parser.add_argument("--models", nargs="+", choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--fp8", action="store_true", help="weights in fp8 with a scale per 128 x 128 block")
    args = parser.parse_args()
    require_cuda("benchmarks.launches")
    tuned = tuned_table(torch.device("cuda"))
    for shape in chosen_shapes(args.models, fp8=args.fp8):
        weights = random_weights(shape)
        for name in args.experts:
            if name == "deep_gemm" and weights.w2_bias is not None:
                continue
            candidate = CANDIDATES[name](shape, weights, tuned)
            for M in args.tokens:
                told = launches(candidate, random_steps(shape, M, args.calls))
                print(f"{shape.model} {shape.weights} M={M} {name}: {', '.join(told) or 'the profiler saw no launch'}")
        del weights


if __name__ == "__main__":
    main()
