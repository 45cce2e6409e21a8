"""What each rank runs in `test_deepep_gpu` and in `benchmarks.deepep_smoke`, with the right answers.

Every rank draws the tokens of all ranks from the same seed, so that comparing needs no communication. Numbers are small
multiples of a power of two where they are added up, so that every order of a sum gives the same bits.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import PrepareAndFinalize, Rows, StandardRows
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.modular.two_kernels import Kernel, TwoKernels
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.reference.moe_layer import moe_layer
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.registry import PartKind
from vllm_moe_modular.testing.layers import SILU, Case, make_batch, make_weights, of_rank, plain_torch
from vllm_moe_modular.testing.ranks import Here
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as

TIMEOUT_S = 90.0
NO_WEIGHTS = ExpertWeights(w13=torch.empty(0), w2=torch.empty(0))
AUTO, LOW, HIGH = "deepep_auto", "deepep_low_latency", "deepep_high_throughput"


@dataclass(frozen=True)
class Layer:
    """Capacity is what the buffers are reserved for, `round_tokens` those of a rank in a low-latency round."""

    hidden: int = 2048
    experts: int = 32
    top_k: int = 6
    capacity: int = 512
    round_tokens: int = 128


@dataclass
class Tokens:
    """Of one rank in one step."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class ScalingExperts(PermuteExpertsUnpermute):
    """Expert e multiplies by 1 + e % 2, exactly; of blocks, what is not a row becomes NaN."""

    weight_and_reduce_by: ClassVar[frozenset[WeightAndReduceBy]] = frozenset(WeightAndReduceBy)

    def __init__(self, activation_format: ActivationFormat) -> None:
        self.activation_format = activation_format  # type: ignore[misc]

    def apply(
        self, rows: Rows, weights: ExpertWeights, *, workspace: Sequence[torch.Tensor],  # noqa: ARG002
        weight_and_reduce_by: WeightAndReduceBy, router_weight_on_input: bool,  # noqa: ARG002
        out_RH: torch.Tensor | None = None,  # noqa: ARG002
    ) -> torch.Tensor:  # fmt: skip
        if isinstance(rows, StandardRows):
            here = rows.topk_ids >= 0
            factors = torch.where(here, rows.topk_weights * (1 + rows.topk_ids % 2), 0.0).sum(1, keepdim=True)
            return (rows.x * factors).to(rows.x.dtype)
        E, C, _ = rows.x.shape
        factors_E = 1 + torch.arange(E, device=rows.x.device) % 2
        is_row_EC = torch.arange(C, device=rows.x.device) < rows.expert_num_tokens.unsqueeze(1)
        return torch.where(is_row_EC.unsqueeze(2), rows.x * factors_E.view(-1, 1, 1), float("nan")).to(rows.x.dtype)


class Bench:
    """One layer's all-to-all on one rank, and the right answers.

    Args:
        name: of a registered all-to-all, or `AUTO`.
        limit: of the tokens in a small step, for `AUTO`.
    """

    def __init__(self, here: Here, name: str, layer: Layer, *, limit: int | None = None) -> None:
        self.here, self.layer = here, layer
        self.placement = ExpertPlacement.linear(layer.experts, here.size)
        self.group = RankGroup(here.group, timeout_s=TIMEOUT_S)
        self.rank_of = torch.tensor([*self.placement.rank_of, -1], device=here.device)
        self.local_of = torch.tensor([*self.placement.local_id_of, 0], device=here.device)
        self.kernel: Kernel
        if name == AUTO:
            small, large = self._kernel(self._part(LOW)), self._kernel(self._part(HIGH))
            self.kernel = TwoKernels(small=small, large=large, most_small=limit or layer.round_tokens)
        else:
            self.kernel = self._kernel(self._part(name))
        self.part = self.kernel.prepare_finalize

    def context(self, *, activation: Activation | None = None) -> BuildContext:
        return BuildContext(
            device=self.here.device,
            dtype=torch.bfloat16,
            placement=self.placement,
            rank=self.here.rank,
            group=self.group,
            hidden=self.layer.hidden,
            top_k=self.layer.top_k,
            capacity_tokens=self.layer.capacity,
            activation=activation,
            low_latency_tokens=self.layer.round_tokens,
        )

    def _part(self, name: str) -> PrepareAndFinalize[Any]:
        built: PrepareAndFinalize[Any] = _registered(PartKind.PREPARE_FINALIZE, name).build(self.context())
        return built

    def _kernel(self, part: PrepareAndFinalize[Any]) -> ModularKernel:
        experts = ScalingExperts(part.activation_format)
        return ModularKernel(part, experts, allocate=Workspace(self.here.device))

    def draw(self, T: int, seed: int, *, ids: str = "uniform") -> Tokens:
        layer = self.layer
        g = torch.Generator().manual_seed(seed)
        x = torch.randint(-2, 3, (T, layer.hidden), generator=g).bfloat16()
        topk = torch.rand(T, layer.experts, generator=g).argsort(dim=1)[:, : layer.top_k]
        weights = torch.tensor([0.5, 1.0])[torch.randint(0, 2, (T, layer.top_k), generator=g)]
        if ids == "one expert":
            topk = torch.full_like(topk, layer.experts - 1)
            topk[:, 1:] = -1
        if ids == "holes":
            topk[torch.rand(topk.shape, generator=g) < 0.5] = -1
        if ids == "past the end":
            topk[::3, 0] = layer.experts + 3
            topk[1::3, -1] = layer.experts
        if ids == "none":
            topk.fill_(-1)
        weights[(topk < 0) | (topk >= layer.experts)] = float("nan")
        device = self.here.device
        return Tokens(x.to(device), topk.to(device), weights.to(device))

    def known(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.where((ids >= 0) & (ids < self.layer.experts), ids, self.layer.experts)

    def right_out(self, mine: Tokens) -> torch.Tensor:
        known = self.known(mine.ids)
        is_expert = known < self.layer.experts
        factors = torch.where(is_expert, mine.weights * (1 + self.local_of[known] % 2), 0.0).sum(1, keepdim=True)
        return (mine.x.float() * factors).bfloat16()

    def layer_out(self, mine: Tokens, bound: int, meanwhile: Callable[[], None] | None = None) -> torch.Tensor:
        return self.kernel.apply(
            mine.x, mine.ids, mine.weights, NO_WEIGHTS, max_tokens_per_rank=bound, meanwhile=meanwhile
        )

    def check_rows(self, rows: Rows, tokens: list[Tokens]) -> None:
        """What arrived is what all ranks sent here, bit by bit, and nothing else but rows that fill slots without an
        expert."""
        want, got = [], []
        for sent in tokens:
            known = self.known(sent.ids)
            for k in range(self.layer.top_k):
                here = self.rank_of[known[:, k]] == self.here.rank
                weights = sent.weights[here, k] if isinstance(rows, StandardRows) else None
                want.append(_keys(sent.x[here], self.local_of[known[here, k]], weights))
        if isinstance(rows, StandardRows):
            for k in range(self.layer.top_k):
                here = rows.topk_ids[:, k] >= 0
                got.append(_keys(rows.x[here], rows.topk_ids[here, k].long(), rows.topk_weights[here, k]))
        else:
            for e, n in enumerate(rows.expert_num_tokens.tolist()):
                got.append(_keys(rows.x[e, :n], torch.full((n,), e, device=rows.x.device), None))
        keys, of = torch.unique(torch.cat([*got, *want]), return_inverse=True)
        came = torch.bincount(of[: sum(map(len, got))], minlength=len(keys))
        sent_here = torch.bincount(of[sum(map(len, got)) :], minlength=len(keys))
        missing, more = (sent_here - came).clamp(min=0), (came - sent_here).clamp(min=0)
        assert not missing.any(), (
            f"{int(missing.sum())} of {int(sent_here.sum())} rows did not arrive as they were sent"
        )
        assert self.part.fills_empty_slots or not more.any(), f"{int(more.sum())} rows arrived that nobody sent here"


def _registered(kind: PartKind, name: str) -> Any:
    return next(p for p in builtin_registry().of(kind) if p.name == name).load()


def _keys(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """One number for each row, that hardly two different ones share."""
    g = torch.Generator().manual_seed(99)
    factors = torch.randint(-(2**62), 2**62, (x.shape[1],), generator=g).to(x.device)
    bits = x.contiguous().view(torch.int16).long()
    keys = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    for start in range(0, len(x), 1024):
        keys[start : start + 1024] = (bits[start : start + 1024] * factors).sum(1)
    keys = keys * 1_000_003 + experts.long()
    return keys if weights is None else keys * 1_000_003 + weights.contiguous().view(torch.int32).long()


def construct(here: Here, name: str, layer: Layer) -> None:
    """Buffers are reserved, twice of the same shape are once."""
    Bench(here, name, layer)
    Bench(here, name, layer)
    torch.cuda.synchronize()


def there_and_back(here: Here, name: str, layer: Layer, counts: list[int], ids: str) -> None:
    """Three steps in a row: what arrives and what comes home."""
    bench = Bench(here, name, layer)
    for step in range(3):
        tokens = [bench.draw(counts[w % len(counts)], 100 * step + w, ids=ids) for w in range(here.size)]
        mine, bound = tokens[here.rank], max(counts)
        if isinstance(bench.kernel, ModularKernel) and bound <= (bench.part.tokens_per_round or bound):
            done = bench.part.prepare(
                mine.x, mine.ids, mine.weights, max_tokens_per_rank=bound, router_weight_on_input=False
            )
            bench.check_rows(done.rows, tokens)
            y = bench.kernel.experts.apply(
                done.rows, NO_WEIGHTS, workspace=(), weight_and_reduce_by=bench.part.weight_and_reduce_by,
                router_weight_on_input=False,
            )  # fmt: skip
            out = torch.full_like(mine.x, float("nan"))
            bench.part.finalize(y, done.ticket, out_TH=out)
            _same(out, bench.right_out(mine), f"prepare and finalize, step {step}")
        _same(bench.layer_out(mine, bound), bench.right_out(mine), f"the layer, step {step}")


def _same(out: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert out.shape == want.shape, f"{what}: the output is {list(out.shape)}, not {list(want.shape)}"
    wrong = (out != want).any(dim=1)
    first = wrong.nonzero()[:3].flatten().tolist()
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {len(want)} tokens are wrong, the first {first}: {out[wrong][:1, :4].tolist()} "
        f"instead of {want[wrong][:1, :4].tolist()}"
    )


def two_in_flight(here: Here, name: str, layer: Layer) -> None:
    """Prepare a, prepare b, finalize b and a at the same time; then the ways home in the other order."""
    bench = Bench(here, name, layer)
    part, experts = bench.part, bench.kernel.experts
    for step in range(6):
        sizes = [[5 + 7 * w + step, 20 + w] for w in range(here.size)]
        tokens = [[bench.draw(sizes[w][i], 1000 * step + 10 * i + w) for w in range(here.size)] for i in (0, 1)]
        mine = [both[here.rank] for both in tokens]
        bounds = [max(len(t.x) for t in both) for both in tokens]
        done = [
            part.prepare(m.x, m.ids, m.weights, max_tokens_per_rank=bound, router_weight_on_input=False)
            for m, bound in zip(mine, bounds, strict=True)
        ]
        for d, both in zip(done, tokens, strict=True):
            bench.check_rows(d.rows, both)
        ys = [
            experts.apply(
                d.rows, NO_WEIGHTS, workspace=(), weight_and_reduce_by=part.weight_and_reduce_by,
                router_weight_on_input=False,
            )
            for d in done
        ]  # fmt: skip
        outs = [torch.full_like(m.x, float("nan")) for m in mine]
        waits = [part.finalize_async(ys[i], done[i].ticket, out_TH=outs[i]) for i in (1, 0)]
        for wait in waits if step % 2 else reversed(waits):
            wait()
        for i in (0, 1):
            _same(outs[i], bench.right_out(mine[i]), f"call {'ab'[i]}, step {step}")


def work_meanwhile(here: Here, name: str, layer: Layer) -> None:
    """What runs on the way home runs once, and disturbs nothing."""
    bench = Bench(here, name, layer)
    for step in range(4):
        mine, calls = bench.draw(50, 10 * step + here.rank), []
        a = torch.randn(1024, 1024, device=here.device)

        def shared(calls: list[int] = calls, a: torch.Tensor = a) -> None:
            calls.append(1)
            a.matmul(a)

        _same(bench.layer_out(mine, 50, shared), bench.right_out(mine), f"step {step}")
        assert calls == [1]


def random_steps(here: Here, name: str, layer: Layer, steps: int, seed: int) -> None:
    """Ragged sizes and all kinds of ids, ranks out of step."""
    bench = Bench(here, name, layer)
    same, own = random.Random(seed), random.Random(seed + 1 + here.rank)
    for step in range(steps):
        most = same.choice([1, 4, layer.round_tokens, layer.capacity])
        counts = [same.choice([0, 1, same.randint(0, most), most]) for _ in range(here.size)]
        kind = same.choice(["uniform", "uniform", "holes", "one expert", "past the end", "none"])
        bound = max(counts) if same.random() < 0.5 else most
        mine = bench.draw(counts[here.rank], seed + 100 * step + here.rank, ids=kind)
        if own.random() < 0.1:
            torch.cuda._sleep(own.randint(0, 400_000))
        _same(bench.layer_out(mine, bound), bench.right_out(mine), f"seed {seed}, step {step}, {counts}, ids {kind}")


def many_to_one_expert(here: Here, name: str, layer: Layer, tokens: int) -> None:
    """More rows for one expert than the library's counters hold, and every step of so many rounds."""
    bench = Bench(here, name, replace(layer, capacity=tokens))
    for step, kind in enumerate(["one expert", "uniform", "one expert"]):
        mine = bench.draw(tokens - 3 * here.rank, 10 * step + here.rank, ids=kind)
        _same(bench.layer_out(mine, tokens), bench.right_out(mine), f"step {step}, ids {kind}")


EXPERTS = {ActivationFormat.STANDARD: "triton", ActivationFormat.BATCHED: "triton_batched"}


def real_experts(here: Here, name: str) -> None:
    """With the experts that it is served with, whole layers against plain torch; `AUTO` with steps of both kinds."""
    case = Case("", tokens=tuple(40 - 15 * (rank % 2) for rank in range(here.size)), G=16, K=4, H=512, absent=0.2)
    layer = Layer(hidden=case.H, experts=case.G, top_k=case.K, capacity=100, round_tokens=64)
    bench = Bench(here, name, layer)
    kernels = [bench.kernel] if isinstance(bench.kernel, ModularKernel) else [bench.kernel.small, bench.kernel.large]
    for kernel in kernels:
        kernel.experts = _registered(PartKind.EXPERTS, EXPERTS[kernel.experts.activation_format]).build(
            bench.context(activation=SILU)
        )
    weights, batch = make_weights(case, torch.bfloat16, F=64), make_batch(case, here.rank, torch.bfloat16)
    truth = moe_layer(batch.x, batch.topk_ids, batch.topk_weights, weights, SILU, router_weight_on_input=False)
    naive, mine = plain_torch(batch, weights, weight_on_input=False), batch.to(here.device)
    held = of_rank(weights, case.placement, here.rank, here.device)
    for bound in (case.max_tokens_per_rank, layer.capacity):
        out = bench.kernel.apply(mine.x, mine.topk_ids, mine.topk_weights, held, max_tokens_per_rank=bound)
        assert_as_accurate_as(out.cpu(), naive, truth)


def replayed_graphs(here: Here, name: str, layer: Layer, sizes: list[int]) -> None:
    """A graph for each size, captured after one eager step, replayed in turn with new tokens; eager steps between."""
    bench = Bench(here, name, layer, limit=max(sizes))
    graphs = []
    for T in sizes:
        static = bench.draw(T, here.rank)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            bench.layer_out(static, T)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = bench.layer_out(static, T)
        graphs.append((graph, static, out))
    for replay in range(5):
        for graph, static, out in graphs:
            new = bench.draw(len(out), 1000 * replay + here.rank, ids="holes" if replay % 2 else "uniform")
            for given, fresh in ((static.x, new.x), (static.ids, new.ids), (static.weights, new.weights)):
                given.copy_(fresh)
            out.fill_(float("nan"))
            graph.replay()
            _same(out, bench.right_out(new), f"{len(out)} tokens, replay {replay}")
        eager = bench.draw(layer.capacity - here.rank, replay, ids="holes")
        _same(bench.layer_out(eager, layer.capacity), bench.right_out(eager), f"eager step after replay {replay}")
