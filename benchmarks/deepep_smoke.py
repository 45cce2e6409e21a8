"""Whether DeepEP and pplx-kernels work here, check by check, on ranks that may share one GPU.

    python -m benchmarks.deepep_smoke --ranks 2 [--parts deepep_low_latency ...] [--checks construct ...] [--log FILE]

Each check has ranks that survived the one before, or new ones, and a time limit. A table goes to the screen, a line as
each check ends, tracebacks to the log. Ends with 0 if all passed. On a shared GPU nothing is timed that means anything:
kernels which wait for each other take turns there.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.prepare_finalize import deepep_calls as calls
from tests.prepare_finalize.deepep_calls import AUTO, HIGH, LOW, Layer
from vllm_moe_modular.testing.ranks import RankFailedError, Ranks, cuda_ranks, shares_devices

LIBRARIES = {HIGH: "deep_ep", LOW: "deep_ep", AUTO: "deep_ep", "pplx": "pplx_kernels", "nvlink": "triton"}
PARTS = tuple(LIBRARIES)
IN_ROUNDS = (LOW, AUTO, "pplx")
ANY = Layer()


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        run: on every rank, given the name of the part and `arguments`.
        parts: that it is for.
        fresh: needs processes that have not yet initialised a library with less.
    """

    name: str
    run: Callable[..., None]
    arguments: tuple[Any, ...]
    parts: tuple[str, ...] = PARTS
    fresh: bool = False

    def run_on(self, ranks: Ranks, part: str, *, timeout_s: float) -> None:
        """Once; raises RankFailedError."""
        if self.fresh:
            ranks.close()
        ranks.run(self.run, part, *self.arguments, timeout_s=timeout_s)


CHECKS = (
    Check("construct", calls.construct, (ANY,)),
    Check("one token each", calls.there_and_back, (ANY, [1, 1], "uniform")),
    Check("ragged", calls.there_and_back, (ANY, [100, 37], "uniform")),
    Check("zero tokens on a rank", calls.there_and_back, (ANY, [0, 20], "uniform")),
    Check("zero tokens anywhere", calls.there_and_back, (ANY, [0, 0], "uniform")),
    Check("ids of -1", calls.there_and_back, (ANY, [40, 30], "holes")),
    Check("all ids of -1", calls.there_and_back, (ANY, [4, 3], "none")),
    Check("ids past the end", calls.there_and_back, (ANY, [40, 30], "past the end")),
    Check("all to one expert", calls.there_and_back, (ANY, [100, 90], "one expert")),
    Check("hidden 2880", calls.there_and_back, (replace(ANY, hidden=2880, top_k=4), [60, 50], "holes")),
    Check("hidden 64", calls.there_and_back, (replace(ANY, hidden=64), [60, 50], "holes")),
    Check("hidden 7168, top 8 of 256", calls.there_and_back, (Layer(7168, 256, 8), [128, 100], "uniform")),
    Check("33 experts", calls.there_and_back, (replace(ANY, experts=33), [60, 50], "holes")),
    Check("two in flight", calls.two_in_flight, (ANY,), (HIGH, LOW, "pplx", "nvlink")),
    Check("work meanwhile", calls.work_meanwhile, (ANY,)),
    Check("our Triton experts", calls.real_experts, ()),
    Check("200 random steps", calls.random_steps, (ANY, 200, 1)),
    Check("1500 tokens to one expert", calls.many_to_one_expert, (ANY, 1500)),
    Check("rounds of 1024", calls.many_to_one_expert, (replace(ANY, round_tokens=1024), 2000), IN_ROUNDS, fresh=True),
    Check("CUDA graphs", calls.replayed_graphs, (ANY, [1, 8, 100]), (LOW, AUTO, "pplx", "nvlink")),
    Check("CUDA graphs in rounds", calls.replayed_graphs, (ANY, [300, 8]), IN_ROUNDS),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART")
    parser.add_argument("--checks", nargs="+", default=[c.name for c in CHECKS], metavar="CHECK")
    parser.add_argument("--timeout", type=float, default=120.0, help="of one check, in seconds")
    parser.add_argument("--most-failures", type=int, default=4, help="of one part, before the rest of it is left out")
    parser.add_argument("--log", type=Path, default=Path("deepep_smoke.log"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    where = "sharing GPUs" if shares_devices(args.ranks) else "a GPU each"
    print(f"{args.ranks} ranks, {where}; tracebacks in {args.log}", flush=True)
    results: dict[tuple[str, str], str] = {}
    with args.log.open("w", encoding="utf-8") as log:
        for part in args.parts:
            if find_spec(LIBRARIES[part]) is None:
                print(f"{part:<23} left out: no module {LIBRARIES[part]}", flush=True)
                continue
            with cuda_ranks(args.ranks) as ranks:
                _run_part(part, ranks, args, results, log)
    print(_table(results, args.parts))
    return 0 if all(said.startswith("ok") for said in results.values()) else 1


def _run_part(part: str, ranks: Ranks, args: argparse.Namespace, results: dict[tuple[str, str], str], log: Any) -> None:
    failures = 0
    for check in CHECKS:
        if part not in check.parts or check.name not in args.checks:
            continue
        if failures == args.most_failures:
            results[check.name, part] = "left out"
            continue
        began = time.monotonic()
        try:
            check.run_on(ranks, part, timeout_s=args.timeout)
            said = "ok"
        except RankFailedError as error:
            failures += 1
            last = [line for line in str(error).splitlines() if line.strip()][-1]
            said = f"FAILED {last.strip()[:150]}"
            log.write(f"== {part}: {check.name}\n{error}\n\n")
            log.flush()
        results[check.name, part] = said
        print(f"{part:<23} {check.name:<26} {time.monotonic() - began:6.1f} s  {said}", flush=True)


def _table(results: dict[tuple[str, str], str], parts: list[str]) -> str:
    """Checks down, parts across."""
    lines = [f"{'':<26}" + "".join(f"{part.removeprefix('deepep_'):>17}" for part in parts)]
    for name in dict.fromkeys(name for name, _ in results):
        cells = [results.get((name, part), "-").split()[0] for part in parts]
        lines.append(f"{name:<26}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
