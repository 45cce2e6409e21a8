"""What each rank runs in `test_nvlink_gpu`, and the plain torch that it is compared with, bit by bit.

Every rank draws the tokens of all ranks from the same seed, so that comparing needs no communication.
"""

import random
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vllm_moe_modular.errors import MoEModularError, RankLostError
from vllm_moe_modular.kernels.nvlink_memory import NvlinkShape
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.prepare_finalize.nvlink import NvlinkPrepareAndFinalize, NvlinkTicket, buffers_for
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.testing.ranks import Here

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Layer:
    """Of which model; capacity is what the buffers are reserved for; fp8: rows are sent in it."""

    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    capacity: int = 4096
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False


@dataclass
class Tokens:
    """Of one rank in one step."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Bench:
    """One layer's all-to-all on one rank, and the right answers."""

    def __init__(self, here: Here, layer: Layer, *, timeout_s: float = TIMEOUT_S) -> None:
        self.here, self.layer = here, layer
        self.placement = ExpertPlacement.linear(layer.experts, here.size)
        context = BuildContext(
            device=here.device,
            dtype=layer.dtype,
            placement=self.placement,
            rank=here.rank,
            group=RankGroup(here.group, timeout_s=timeout_s),
            hidden=layer.hidden,
            top_k=layer.top_k,
            capacity_tokens=layer.capacity,
            activation=None,
            low_latency_tokens=256,
            fp8_rows=layer.fp8,
        )
        self.part = NvlinkPrepareAndFinalize.build(context)
        shape = NvlinkShape(here.size, layer.capacity, layer.top_k, layer.hidden, layer.dtype, layer.fp8)
        self.buffers = buffers_for(here.group, shape, here.device)
        self.rank_of = torch.tensor([*self.placement.rank_of, -1], device=here.device)
        self.local_of = torch.tensor([*self.placement.local_id_of, -1], device=here.device)

    def draw(self, T: int, seed: int, *, ids: str = "uniform") -> Tokens:
        layer, device = self.layer, self.here.device
        g = torch.Generator(device).manual_seed(seed)
        x = torch.randn(T, layer.hidden, device=device, generator=g).to(layer.dtype)
        scores = torch.rand(T, layer.experts, device=device, generator=g)
        topk = scores.topk(layer.top_k).indices.int() if T else scores[:, : layer.top_k].int()
        if ids == "one expert":
            topk = torch.full_like(topk, layer.experts - 1)
            topk[:, 1:] = -1
        if ids == "holes":
            topk[torch.rand(T, layer.top_k, device=device, generator=g) < 0.6] = -1
            topk[::7, 0] = layer.experts + 3
        return Tokens(x, topk, torch.rand(T, layer.top_k, device=device, generator=g))

    def prepare(self, mine: Tokens, N: int) -> tuple[StandardRows, NvlinkTicket]:
        done = self.part.prepare(mine.x, mine.ids, mine.weights, max_tokens_per_rank=N, router_weight_on_input=False)
        assert isinstance(done.rows, StandardRows)
        return done.rows, done.ticket

    def as_sent(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The values, and the scales; of rows that are sent as they are a column of ones."""
        return quantize_fp8(x) if self.layer.fp8 else (x, x.new_ones(len(x), 1, dtype=torch.float32))

    def meant(self, values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """What rows stand for, in the layer's dtype."""
        return dequantize_fp8(values, scales).to(self.layer.dtype) if self.layer.fp8 and scales is not None else values

    def experts(self, rows: StandardRows) -> torch.Tensor:
        """Any function of row and rank will do; NaN where there is no expert."""
        here = rows.topk_ids.amax(1, keepdim=True) >= 0
        return torch.where(here, self.meant(rows.x, rows.x_scale) * (self.here.rank + 1.5), float("nan"))

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.where((ids >= 0) & (ids < self.layer.experts), ids.long(), self.layer.experts)

    def wrong_rows(self, rows: StandardRows, tokens: list[Tokens], N: int) -> torch.Tensor:
        """How many elements of a dispatch are not what they should be; on the device."""
        wrong = torch.zeros((), dtype=torch.int64, device=self.here.device)
        for w, sent in enumerate(tokens):
            T, known = len(sent.x), self._known(sent.ids)
            local = torch.where(self.rank_of[known] == self.here.rank, self.local_of[known], -1)
            got_ids = rows.topk_ids[w * N : w * N + N]
            wrong += (got_ids[:T] != local).sum() + (got_ids[T:] != -1).sum()
            differ = rows.topk_weights[w * N : w * N + T] != sent.weights
            wrong += (differ & (local >= 0)).sum()
            goes = (local >= 0).any(1, keepdim=True)
            values, scales = self.as_sent(sent.x)
            wrong += ((bits(rows.x[w * N : w * N + T]) != bits(values)) & goes).sum()
            if rows.x_scale is not None:
                wrong += ((rows.x_scale[w * N : w * N + T] != scales) & goes).sum()
        return wrong

    def right_out(self, mine: Tokens) -> torch.Tensor:
        ranks = self.rank_of[self._known(mine.ids)]
        out = torch.zeros(mine.x.shape, device=self.here.device)
        for w in range(self.here.size):
            share = (self.meant(*self.as_sent(mine.x)) * (w + 1.5)).float()
            out += torch.where((ranks == w).any(1, keepdim=True), share, 0.0)
        return out.to(self.layer.dtype)


def bits(t: torch.Tensor) -> torch.Tensor:
    """As numbers of as many bytes, so that there are no two zeros."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.itemsize])


def there_and_back(here: Here, layer: Layer, counts: list[int], N: int, ids: str) -> None:
    """Three steps in a row, the result of each compared."""
    bench = Bench(here, layer)
    for step in range(3):
        tokens = [bench.draw(T, 100 * step + w, ids=ids) for w, T in enumerate(counts)]
        mine = tokens[here.rank]
        rows, ticket = bench.prepare(mine, N)
        assert rows.x.shape[0] == here.size * max(1, N)
        assert bench.wrong_rows(rows, tokens, max(1, N)) == 0
        out = torch.empty_like(mine.x)
        bench.part.finalize(bench.experts(rows), ticket, out_TH=out)
        assert torch.equal(out, bench.right_out(mine))


def replay_graphs(here: Here, layer: Layer, sizes: list[int]) -> None:
    """A graph per size, then replays of all of them in turn, with new tokens each time."""
    bench = Bench(here, layer)
    graphs = []
    for T in sizes:
        static = bench.draw(T, 0)
        out = torch.empty_like(static.x)

        def step(static: Tokens = static, out: torch.Tensor = out, T: int = T) -> torch.Tensor:
            rows, ticket = bench.prepare(static, T)
            x = bench.meant(rows.x, rows.x_scale).clone()
            bench.part.finalize(bench.experts(rows), ticket, out_TH=out)
            return x

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x = step()
        graphs.append((graph, static, out, x))
    for replay in range(8):
        for graph, static, out, x in graphs:
            T = len(out)
            tokens = [bench.draw(T, 10_000 * replay + 10 * T + w) for w in range(here.size)]
            for name in ("x", "ids", "weights"):
                getattr(static, name).copy_(getattr(tokens[here.rank], name))
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, bench.right_out(tokens[here.rank])), f"T = {T}, replay {replay}"
            for w, sent in enumerate(tokens):
                goes = (bench.rank_of[sent.ids.long()] == here.rank).any(1)
                want = bench.meant(*bench.as_sent(sent.x))
                assert torch.equal(x[w * T : w * T + T][goes], want[goes]), f"T = {T}, replay {replay}"


def two_in_flight(here: Here, layer: Layer, streams: int) -> None:
    """Prepare a, prepare b, finalize b, finalize a; on one stream, or on one for each."""
    bench = Bench(here, layer)
    on = [torch.cuda.Stream() for _ in range(streams)]
    for step in range(20):
        tokens = [[bench.draw(100 + 31 * w + step, 1000 * step + 10 * i + w) for w in range(here.size)] for i in (0, 1)]
        mine = [t[here.rank] for t in tokens]
        N = [max(len(t.x) for t in both) for both in tokens]
        outs = [torch.empty_like(m.x) for m in mine]
        torch.cuda.synchronize()
        calls = []
        for i in (0, 1):
            with torch.cuda.stream(on[i % streams]):
                calls.append(bench.prepare(mine[i], N[i]))
        for i in (1, 0):
            with torch.cuda.stream(on[i % streams]):
                rows, ticket = calls[i]
                wrong = bench.wrong_rows(rows, tokens[i], N[i])
                bench.part.finalize(bench.experts(rows), ticket, out_TH=outs[i])
                assert wrong == 0
        torch.cuda.synchronize()
        for out, m in zip(outs, mine, strict=True):
            assert torch.equal(out, bench.right_out(m))


def third_in_flight(here: Here, layer: Layer) -> str:
    """What a third prepare says; the two before it are then brought to an end."""
    bench = Bench(here, layer)
    mine = bench.draw(3, 0)
    calls = [bench.prepare(mine, 3) for _ in range(2)]
    try:
        bench.prepare(mine, 3)
    except MoEModularError as error:
        return str(error)
    finally:
        for rows, ticket in calls:
            bench.part.finalize(bench.experts(rows), ticket, out_TH=torch.empty_like(mine.x))
    return "nothing"


def stress(here: Here, layer: Layer, seed: int, seconds: float) -> int:
    """Steps of random sizes with poisoned buffers and ranks out of step, each compared; returns how many.

    Buffers are poisoned where no peer may be writing: rows and weights between the experts and finalize, partial sums
    before prepare.
    """
    bench = Bench(here, layer)
    same, own = random.Random(seed), random.Random(seed + 1 + here.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=here.device)
    steps, until = 0, time.monotonic() + seconds
    go_on = torch.ones((), device=here.device)
    while go_on:
        for _ in range(100):
            most = same.choice([1, 4, 64, 300, 300, layer.capacity])
            counts = [same.randint(0, most) for _ in range(here.size)]
            N = max(1, max(counts)) if same.random() < 0.5 else most
            kind = same.choice(["uniform", "uniform", "holes", "one expert"])
            tokens = [bench.draw(T, seed + 7 * steps + w, ids=kind) for w, T in enumerate(counts)]
            mine = tokens[here.rank]
            if own.random() < 0.2:
                torch.cuda._sleep(own.randint(0, 400_000))
            slot = bench.buffers.slots[0]
            slot.partials[: (here.size - 1) * N].fill_(float("nan"))
            rows, ticket = bench.prepare(mine, N)
            wrong += bench.wrong_rows(rows, tokens, N)
            y = bench.experts(rows)
            rows.x.view(torch.uint8).fill_(0xFF)  # NaN, of whatever dtype
            if rows.x_scale is not None:
                rows.x_scale.fill_(float("nan"))
            rows.topk_weights.fill_(float("nan"))
            if own.random() < 0.2:
                torch.cuda._sleep(own.randint(0, 400_000))
            out = torch.empty_like(mine.x)
            bench.part.finalize(y, ticket, out_TH=out)
            wrong += (out != bench.right_out(mine)).sum()
            steps += 1
        assert wrong == 0, f"seed {seed}, at most {steps} steps in: {int(wrong)} elements are wrong"
        go_on.fill_(time.monotonic() < until)
        dist.broadcast(go_on, 0)
    return steps


def lose_rank_1(here: Here, layer: Layer, phase: str) -> list[str]:
    """Rank 1 stops taking part; what the other ranks are told, at the first chance and at the second."""
    bench = Bench(here, layer, timeout_s=1.0)
    mine = bench.draw(5, here.rank)
    for _ in range(2):
        rows, ticket = bench.prepare(mine, 5)
        bench.part.finalize(bench.experts(rows), ticket, out_TH=torch.empty_like(mine.x))
    torch.cuda.synchronize()
    if here.rank == 1 and phase == "dispatch":
        return []
    rows, ticket = bench.prepare(mine, 5)
    torch.cuda.synchronize()
    if here.rank == 1:
        return []
    said = []
    for _ in range(2):
        started = time.monotonic()
        try:
            bench.part.finalize(bench.experts(rows), ticket, out_TH=torch.empty_like(mine.x))
            torch.cuda.synchronize()
            bench.prepare(mine, 5)
        except RankLostError as error:
            said.append(str(error))
        assert time.monotonic() - started < 3
    return said
