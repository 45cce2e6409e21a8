"""What `VLLM_MOE_MODULAR_TRACE` costs at its default sampling: a layer on a CPU, traced and not, in turns.

    python -m benchmarks.trace_overhead [--rounds 200]

A round is as many calls as there are between two samples. Rounds come in fours, in turning order: plain; plain again,
which says how much of a difference is noise; traced at the default, so with one sample; with every call sampled, whose
cost is large enough to be seen on a busy machine too. Both clocks are told: that of the wall, which wants a quiet
machine, and the processor's, which counts the thread that writes.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import torch

from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.kernel import ModularKernel, Observe
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.trace import Tracer
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.prepare_finalize.local import LocalPrepareAndFinalize
from vllm_moe_modular.settings import Settings
from vllm_moe_modular.testing.layers import SILU, Case, make_batch, make_weights

CASE, F = Case("", tokens=(32,), G=8, K=2, H=512), 512
"""About 2 ms a call on one core."""

EVERY = Settings().trace_every
CPU = torch.device("cpu")


class Layer:
    """A layer that runs in float32 on one rank."""

    def __init__(self) -> None:
        self.part = LocalPrepareAndFinalize(placement=ExpertPlacement.linear(CASE.G, 1), rank=0, device=CPU)
        self.kernel = ModularKernel(self.part, TorchExperts(activation=SILU), allocate=Workspace(CPU))
        self.batch, self.weights = make_batch(CASE, 0, torch.float32), make_weights(CASE, torch.float32, F=F)

    def ms_of_a_call(self, observe: Observe | None) -> dict[str, float]:
        """The mean of a round, by clock."""
        self.kernel.observe = observe
        batch, start = self.batch, read_clocks()
        for _ in range(EVERY):
            self.kernel.apply(
                batch.x, batch.topk_ids, batch.topk_weights, self.weights, max_tokens_per_rank=CASE.tokens[0]
            )
        return {clock: 1e3 * (now - start[clock]) / EVERY for clock, now in read_clocks().items()}


def read_clocks() -> dict[str, float]:
    return {"wall": time.perf_counter(), "processor": time.process_time()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)  # several would wait for each other, and their waiting would count as work
    layer = Layer()
    with tempfile.TemporaryDirectory() as folder:
        tracers = [Tracer(Path(folder) / f"{every}.jsonl", rank=0, size=1, every=every) for every in (EVERY, 1)]
        traced, always = (
            t.observe("layer", all2all="local", experts="torch", num_experts=CASE.G, traffic=layer.part.traffic)
            for t in tracers
        )
        arms = {"plain": None, "plain again": None, "traced": traced, "every call sampled": always}
        times = []
        for number in range(rounds + 1):
            names = [*arms][number % len(arms) :] + [*arms][: number % len(arms)]
            times.append({name: layer.ms_of_a_call(arms[name]) for name in names})
        for tracer in tracers:
            tracer.close()
        samples = [(Path(folder) / f"{t.every}.jsonl").read_text().count('"sample"') for t in tracers]
    assert samples == [rounds + 1, EVERY * (rounds + 1)], f"{samples} samples in {rounds + 1} rounds"
    del times[0]  # warms up
    for clock in ("wall", "processor"):
        plain = [t["plain"][clock] for t in times]
        print(f"{clock}: {median(plain):.2f} ms a call, one call in {EVERY} sampled, {rounds} rounds")
        for arm in [*arms][1:]:
            low, middle, high = quantiles([100 * (t[arm][clock] / t["plain"][clock] - 1) for t in times], n=4)
            at_default = f", so {middle / EVERY:+.2f} % at the default" if arms[arm] is always else ""
            print(f"  {arm}: {middle:+.2f} % (median; quartiles {low:+.2f} and {high:+.2f} %){at_default}")


if __name__ == "__main__":
    main()
