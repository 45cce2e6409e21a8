"""`vllm-moe-modular bench all-to-all`: measures, keeps JSON lines, prints the report, draws the picture."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_moe_modular.bench.all_to_all_cases import BFLOAT16, FP8, HIDDEN, MODES, TOKENS, Case, Plan, peer_names
from vllm_moe_modular.bench.all_to_all_report import SHARED, read_results, report
from vllm_moe_modular.bench.report import Result, require_appendable
from vllm_moe_modular.cli.bench_experts import append, figures
from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.selection.problem import Device
from vllm_moe_modular.settings import from_environment

EXPERTS, TOP_K = 256, 8
TURNS = 15
RANKS = 2

OF_MEASURING = {
    "out": None, "ranks": RANKS, "hidden": list(HIDDEN), "tokens": list(TOKENS), "peers": None, "mode": list(MODES),
    "fp8": False, "shared_gpu": False,
}  # fmt: skip
"""Options that --read has no use for, with their defaults."""


def run(options: argparse.Namespace) -> int:
    """0, whatever could not be run: that is in the report."""
    if options.read:
        if given := [name for name, default in OF_MEASURING.items() if getattr(options, name) != default]:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise MoEModularError(f"--read measures nothing, so {names} would do nothing; leave one out")
        if options.plot:
            figures().require_format(options.plot)
        return _tell(read_results(options.read), options.plot)
    _check(options)
    if options.out:
        require_appendable(options.out)
    if options.plot:
        figures().require_format(options.plot)  # before minutes are spent on what cannot be drawn
    from vllm_moe_modular.bench.timing import require_cuda

    require_cuda("bench all-to-all")
    return _measure(options)


def _check(options: argparse.Namespace) -> None:
    """Raises:
    MoEModularError: an option takes something else.
    """
    if options.ranks < 2:
        raise MoEModularError(f"--ranks is {options.ranks}; an all-to-all is measured on two or more")
    for name, value in (("--hidden", min(options.hidden)), ("--tokens", min(options.tokens))):
        if value < 1:
            raise MoEModularError(f"{name} takes whole numbers, 1 or more, not {value}")
    if options.fp8 and (odd := [H for H in options.hidden if H % 128]):
        raise MoEModularError(f"--hidden {odd[0]} with --fp8: takes multiples of 128, which share a scale")
    known = peer_names()
    if unknown := [name for name in options.peers or () if name not in known]:
        raise MoEModularError(f"--peers {', '.join(unknown)}: known: {', '.join(known)}")
    if unknown := [mode for mode in options.mode if mode not in MODES]:
        raise MoEModularError(f"--mode {', '.join(unknown)}: known: {', '.join(MODES)}")


def _measure(options: argparse.Namespace) -> int:
    import torch

    from vllm_moe_modular.bench.all_to_all import measure_all
    from vllm_moe_modular.bench.timing import machine
    from vllm_moe_modular.testing.ranks import cuda_ranks

    gpus = torch.cuda.device_count()
    if gpus < options.ranks and not options.shared_gpu:
        raise MoEModularError(
            f"--ranks is {options.ranks}, and torch sees {gpus} CUDA GPUs; give each rank one, or pass --shared-gpu to "
            "see whether everything is right there, with times that mean nothing"
        )
    if gpus >= options.ranks and options.shared_gpu:
        raise MoEModularError(f"--shared-gpu, and torch sees {gpus} CUDA GPUs for {options.ranks} ranks; leave it out")
    if options.shared_gpu:
        print(SHARED, file=sys.stderr)
    major, minor = torch.cuda.get_device_capability()
    device = Device(kind="cuda", sm=10 * major + minor, peer_access=True)  # building a part finds out
    where, results = machine(), list[Result]()
    with cuda_ranks(options.ranks, poison=False) as ranks:
        for result in measure_all(ranks, plan_of(options, device)):
            results.append(result)
            if options.out:
                append(options.out, result | where)
            said = "not run" if "not_run" in result else f"{result['median_us']:.1f} us"
            point = f"hidden {result['H']}, {result['rows']} rows, {result['mode']}, T {result['T']}"
            print(f"{point}: {result['peer']}, {said}", file=sys.stderr)
    return _tell(results, options.plot)


def plan_of(options: argparse.Namespace, device: Device) -> Plan:
    """What these options ask for."""
    tokens = sorted(set(options.tokens))
    cases = [
        Case(
            T=T, H=H, G=EXPERTS, K=TOP_K, rows=rows, capacity_tokens=max(tokens),
            low_latency_tokens=from_environment(os.environ).low_latency_tokens,
        )
        for H in dict.fromkeys(options.hidden)
        for rows in ((BFLOAT16, FP8) if options.fp8 else (BFLOAT16,))
        for T in tokens
    ]  # fmt: skip
    return Plan(
        ranks=options.ranks,
        cases=cases,
        modes=list(dict.fromkeys(options.mode)),
        peers=list(dict.fromkeys(options.peers or peer_names())),
        turns=1 if options.shared_gpu else TURNS,
        device=device,
        shared_gpu=options.shared_gpu,
    )


def _tell(results: Sequence[Result], plot: Path | None) -> int:
    print(report(results))
    if plot is not None:
        figures().all_to_all_plot(results, plot)
        print(f"\n{plot}")
    return 0
