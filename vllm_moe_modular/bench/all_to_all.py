"""Round trips of all-to-alls over the GPUs of one host, beside each other in the same processes on the same tokens.

Uniformly random routing, every rank the same number of tokens, everything in CUDA graphs. What disagrees with the right
answer is not timed. One JSON line per peer and case, each with the machine; a table of medians, worst rank, at the end.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist

from vllm_moe_modular.bench.all_to_all_peers import FP8_PEERS, PEERS, Case, Peer, draw
from vllm_moe_modular.bench.report import require_appendable
from vllm_moe_modular.bench.timing import machine, require_cuda, time_in_graph
from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.testing.ranks import Here, Ranks

EXPERTS, TOP_K = 256, 8

CALLS_PER_GRAPH = 12
"""Round trips in one graph, over `INPUTS` sets of tokens in turn."""

INPUTS = 3

TIMEOUT_S = 120.0

ALL_PEERS = (*PEERS, *FP8_PEERS)

LEGEND = "across: tokens of each rank; a number: median of dispatch and combine, without experts, on the slowest rank"


def measure(here: Here, peer: Peer, case: Case, capacity: int) -> dict[str, object]:
    """Microseconds per round trip on this rank."""
    round_trip = peer.make(here, case, capacity)
    tokens = [draw(case, here, seed) for seed in range(INPUTS)]
    for t in tokens:
        right = torch.equal(round_trip(t), peer.answer(t, case, here))
        assert right, f"{peer.name} is wrong for {case} on rank {here.rank}"
    calls: list[Callable[[], object]] = [partial(round_trip, tokens[i % INPUTS]) for i in range(CALLS_PER_GRAPH)]
    dist.barrier()
    timing = time_in_graph(calls)
    return {"peer": peer.name, "rank": here.rank, **asdict(case), **asdict(timing), **machine()}


def measure_all(here: Here, cases: Sequence[Case], capacity: int, names: Sequence[str]) -> list[dict[str, object]]:
    """Every peer on every case; runs on each rank."""
    return [measure(here, peer, case, capacity) for case in cases for peer in ALL_PEERS if peer.name in names]


def table(rows: Sequence[dict[str, object]]) -> str:
    """Per hidden size: peers down, tokens across; the slower rank's median."""
    lines = []
    for H in dict.fromkeys(r["H"] for r in rows):
        sizes = list(dict.fromkeys(r["T"] for r in rows))
        lines.append(f"hidden {H}, us per round trip" + "".join(f"{T:>9}" for T in sizes))
        for name in dict.fromkeys(str(r["peer"]) for r in rows):
            of = {
                T: [float(str(r["median_us"])) for r in rows if (r["peer"], r["H"], r["T"]) == (name, H, T)]
                for T in sizes
            }
            lines.append(f"{name:<31}" + "".join(f"{max(us):9.1f}" if us else f"{'-':>9}" for us in of.values()))
    return "\n".join([*lines, LEGEND])


def run(options: argparse.Namespace) -> int:
    """Measures, appends to --out, prints the table."""
    if options.out:
        require_appendable(options.out)
    require_cuda("bench all-to-all")
    names = options.peers or [peer.name for peer in (ALL_PEERS if options.fp8 else PEERS)]
    if unknown := set(names) - {peer.name for peer in ALL_PEERS}:
        raise MoEModularError(f"--peers {', '.join(unknown)}: known: {', '.join(peer.name for peer in ALL_PEERS)}")
    if torch.cuda.device_count() < options.ranks:
        raise MoEModularError(f"--ranks is {options.ranks}, and torch sees {torch.cuda.device_count()} CUDA GPUs")
    rows: list[dict[str, object]] = []
    with Ranks(options.ranks, backend="nccl", poison=False) as ranks:
        for H in options.hidden:
            cases = [Case(T, H, EXPERTS, TOP_K) for T in options.tokens]
            for of_rank in ranks.run(measure_all, cases, max(options.tokens), names, timeout_s=TIMEOUT_S):
                rows += of_rank
    if options.out:
        with options.out.open("a") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
    print(table(rows))
    return 0
