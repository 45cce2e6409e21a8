"""What an all-to-all has to stand, one function or one small layer for each case; run alike on every rank."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from vllm_moe_modular.errors import CapacityError, ExpertIdError, RankLostError
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.prepare_finalize import Dispatched, PrepareAndFinalize, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.testing.conformance.fp8_rows_cases import FP8_ROWS_CASES
from vllm_moe_modular.testing.conformance.outcome import Outcome
from vllm_moe_modular.testing.conformance.plain_experts import identity_experts, plain_experts
from vllm_moe_modular.testing.conformance.subject import Subject, bits, is_close
from vllm_moe_modular.testing.layers import (
    Case,
    all_at_once,
    make_batch,
    make_weights,
    of_rank,
    plain_torch,
)
from vllm_moe_modular.testing.layers import right_answer as answer_for_one
from vllm_moe_modular.testing.ranks import Here

if TYPE_CHECKING:
    from vllm_moe_modular.testing.conformance.run import Build

KILLED = "a killed rank"
RANDOM_STEPS = 1000
RANDOM_STEPS_CASE = f"{RANDOM_STEPS} random steps on one object"
CAPACITY_FLAG = "--max-num-batched-tokens"


Run = Callable[[Subject], None]


def run(here: Here, build: "Build", name: str, dtypes: tuple[str, ...], *, loss_timeout_s: float) -> Outcome:
    """One case on this rank."""
    subject = Subject(here, build, tuple(getattr(torch, dtype) for dtype in dtypes), loss_timeout_s)
    case = cases(here.size, here.device.type)[name]

    def tell(error: Exception) -> None:
        if subject.group is not None:
            subject.group.say_raised(error)

    return subject.notes.outcome_of(lambda: case(subject), on_error=tell)


def cases(W: int, device: str) -> dict[str, Run]:
    """By name, in the order in which they are run: what explains most comes first."""
    layers = {case.why: partial(_is_the_layer, case=case) for case in _layers(W)}
    calls: dict[str, Run] = {
        "rows arrive bitwise": _rows_arrive,
        "rows come home bitwise": _rows_come_home,
        **layers,
        "rows of NaN and infinity stay with their token": _bad_rows_stay,
        "ids past the end": _ids_past_the_end,
        "two calls in flight, finalized in another order": _two_in_flight,
        "the same bits every time": _same_bits,
        "as many tokens as there is capacity": _exactly_full,
        "one token more than there is capacity": _over_capacity,
        "more tokens than announced": _more_than_announced,
        "rows are counted alike at both ends": _traffic,
        **FP8_ROWS_CASES,
        RANDOM_STEPS_CASE: _random_steps,
    }
    # With NCCL the host waits for nobody, so that only some transports can notice.
    return calls | ({KILLED: _killed} if device == "cpu" else {})


def _layers(W: int) -> list[Case]:
    def of(*tokens: int) -> tuple[int, ...]:
        return tuple(tokens[rank % len(tokens)] for rank in range(W))

    return [
        Case("one token on each rank", tokens=of(1), G=W, K=1),
        Case("as many tokens on every rank", tokens=of(4)),
        Case("ragged ranks", tokens=of(7, 2, 5)),
        Case("ids in int32", tokens=of(3), ids_dtype=torch.int32, absent=0.3),
        Case("some ids of -1", tokens=of(6, 5), absent=0.5),
        Case("all ids of -1", tokens=of(3, 2), absent=1.0),
        Case("an expert named twice by a token", tokens=of(4, 3), repeated=True, K=3),
        Case("all tokens to one expert", tokens=of(5, 3), K=1, only_expert=6),
        Case("top 8 of 8", tokens=of(4, 3), K=8),
        Case("experts that the ranks do not divide", tokens=of(5, 6), G=2 * W + 1, K=3),
        Case("a rank without experts", tokens=of(3, 5), G=W - 1, K=1),
        Case("experts scattered over ranks", tokens=of(5, 4), scattered=True),
        Case("300 experts", tokens=of(9), G=300, K=6),
        Case("rows of an odd number of bytes", tokens=of(3, 4), H=63),
        Case("router weight on the input", tokens=of(4, 5), K=1, weight_on_input=True),
        Case("router weight on the input of several experts", tokens=of(4, 5), weight_on_input=True),
        Case("announced more tokens than there are", tokens=of(2, 3), max_tokens=9),
        Case("zero tokens on all ranks", tokens=of(0)),
        Case("zero tokens on the last rank", tokens=(*of(4)[1:], 0)),
        Case("zero tokens on the first rank", tokens=(0, *of(4)[1:])),
    ]


def _is_the_layer(s: Subject, *, case: Case) -> None:
    """Against the layer without ranks in float64, in every dtype."""
    for dtype in s.dtypes:
        part = s.make(case, dtype)
        if case.weight_on_input and case.K > 1 and part.weight_and_reduce_by is WeightAndReduceBy.FINALIZE:
            return  # a row is sent once, and can be scaled by one weight only
        batch = s.batch(part, case, dtype)
        out = s.layer(part, case, batch)
        naive = plain_torch(
            batch.to(torch.device("cpu")), make_weights(case, dtype), weight_on_input=case.weight_on_input
        )
        s.notes.check_accuracy(f"{dtype}", out, naive, answer_for_one(case, s.source(part), dtype))


def _rows_arrive(s: Subject) -> None:
    """What the experts are given is what the router sent here, to the bit, and nothing else."""
    for dtype, scattered in product(s.dtypes, (False, True)):
        case = Case("", tokens=_ragged(s), K=3, absent=0.3, max_tokens=9, scattered=scattered)
        part = s.make(case, dtype)
        batch = s.batch(part, case, dtype)
        dispatched = s.prepare(part, case, replace(batch, x=_odd(batch.x)))
        got = _received(s, dispatched, E=case.placement.num_local[s.here.rank])
        sources = range(s.here.size) if part.output_is_reduced else [0]
        want = _sent_here(s, case, dtype, sources, with_weights=isinstance(dispatched.rows, StandardRows))
        s.notes.check(
            got == want or (part.fills_empty_slots and want <= got),
            f"{dtype}: of {want.total()} pairs of token and expert {(want - got).total()} did not arrive as sent, "
            f"and {(got - want).total()} arrived that nobody sent",
        )
        part.finalize(_zeros_for(part, dispatched), dispatched.ticket, out_TH=torch.empty_like(batch.x))


def _received(s: Subject, dispatched: Dispatched[Any], *, E: int) -> "Counter[tuple[Any, ...]]":
    """Every pair of a row and an expert of this rank."""
    rows = dispatched.rows
    if not isinstance(rows, StandardRows):
        s.notes.check(rows.x.shape[0] == E, f"it delivers blocks for {rows.x.shape[0]} experts, this rank holds {E}")
        counts = enumerate(rows.expert_num_tokens.tolist())
        x = rows.x.cpu()
        return Counter((_key(x[e, i]), e) for e, n in counts for i in range(n))
    ids, weights, x = rows.topk_ids.cpu(), rows.topk_weights.cpu(), rows.x.cpu()
    s.notes.check(weights.dtype == torch.float32, f"topk_weights arrive as {weights.dtype}, not as float32")
    stray = sorted(set(ids[(ids < -1) | (ids >= E)].tolist()))
    s.notes.check(not stray, f"rows name experts {stray[:4]} as local ones, this rank holds {E}")
    return Counter(
        (_key(x[r]), int(ids[r, k]), _key(weights[r, k])) for r, k in ((ids >= 0) & (ids < E)).nonzero().tolist()
    )


def _sent_here(
    s: Subject, case: Case, dtype: torch.dtype, sources: Any, *, with_weights: bool
) -> "Counter[tuple[Any, ...]]":
    place, sent = case.placement, Counter[tuple[Any, ...]]()
    for source in sources:
        batch = make_batch(case, source, dtype)
        x = _odd(batch.x)
        for t, k in (batch.topk_ids >= 0).nonzero().tolist():
            expert = int(batch.topk_ids[t, k])
            if place.rank_of[expert] == s.here.rank:
                weight = (_key(batch.topk_weights[t, k]),) if with_weights else ()
                sent[(_key(x[t]), place.local_id_of[expert], *weight)] += 1
    return sent


def _rows_come_home(s: Subject) -> None:
    """Experts that change nothing give back what was sent, to the bit, and 0 to a token without one."""
    for dtype in s.dtypes:
        case = Case("", tokens=_ragged(s), K=1, absent=0.2)
        part = s.make(case, dtype)
        batch = s.batch(part, case, dtype)
        batch = replace(batch, topk_weights=torch.ones_like(batch.topk_weights))
        dispatched = s.prepare(part, case, batch)
        out = torch.full_like(batch.x, float("nan"))
        part.finalize(identity_experts(part, dispatched.rows), dispatched.ticket, out_TH=out)
        want = torch.where(batch.topk_ids >= 0, batch.x, 0.0)
        same = torch.equal(s.reduced(part, out), want.cpu())
        s.notes.check(same, f"{dtype}: a token does not come home as it was sent, or not to its place")


def _bad_rows_stay(s: Subject) -> None:
    case = Case("", tokens=_ragged(s, least=3), absent=0.2)
    part = s.make(case)
    batch = s.batch(part, case)
    batch.x[0], batch.x[1] = float("nan"), float("-inf")
    out = s.layer(part, case, batch)[2:]
    truth = answer_for_one(case, s.source(part), s.dtype)[2:]
    naive = plain_torch(make_batch(case, s.source(part), s.dtype), make_weights(case, s.dtype), weight_on_input=False)
    s.notes.check_accuracy("tokens beside those", out, naive[2:], truth)


def _ids_past_the_end(s: Subject) -> None:
    """Refused by every rank that has one before it sends, or counted as -1."""
    case = Case("", tokens=_ragged(s), absent=0.3)
    part = s.make(case)
    batch = s.batch(part, case)
    batch.topk_ids[0, 0] = -1
    past = replace(batch, topk_ids=torch.where(batch.topk_ids < 0, case.G + 3, batch.topk_ids))
    past.topk_ids[0, 0] = case.G
    try:
        out = s.layer(part, case, past)
    except ExpertIdError as error:
        named = any(str(expert) in str(error) for expert in (case.G, case.G + 3))
        s.notes.check(named, f"its error does not name the id: {error}")
        return
    same = torch.equal(out, s.layer(part, case, batch))
    s.notes.check(same, f"an id of {case.G} or more counts as an expert; refuse it (ExpertIdError) or take it as -1")


def _two_in_flight(s: Subject) -> None:
    """prepare a, prepare b, finalize b, finalize a; with other sizes, and other tokens of the same sizes."""
    for sizes in ((_ragged(s), _ragged(s, least=4)), (_ragged(s), _ragged(s))):
        shapes = [Case("", tokens=tokens, absent=0.2) for tokens in sizes]
        part = s.make(shapes[0], capacity=max(shape.max_tokens_per_rank for shape in shapes))
        experts, placement = plain_experts(part), shapes[0].placement
        weights = of_rank(make_weights(shapes[0], s.dtype), placement, s.here.rank, s.here.device)
        batches = [s.batch(part, shape, seed=seed) for seed, shape in enumerate(shapes, start=1)]
        dispatched = [s.prepare(part, shape, batch) for shape, batch in zip(shapes, batches, strict=True)]
        rows = [
            experts.apply(
                d.rows.for_experts(ids_dtype=experts.topk_indices_dtype, dtype=s.dtype), weights, workspace=(),
                weight_and_reduce_by=part.weight_and_reduce_by, router_weight_on_input=False,
            )
            for d in dispatched
        ]  # fmt: skip
        together = [torch.full_like(b.x, float("nan")) for b in batches]
        waits = [part.finalize_async(rows[i], dispatched[i].ticket, out_TH=together[i]) for i in (1, 0)]
        for wait in waits:
            wait()
        for which, shape, batch, out in zip("ab", shapes, batches, together, strict=True):
            same = torch.equal(s.reduced(part, out), s.layer(part, shape, batch))
            s.notes.check(same, f"call {which} gives something else than alone: what a call needs goes into its ticket")


def _same_bits(s: Subject) -> None:
    case = Case("", tokens=_ragged(s), G=9, K=6)
    dtype = s.dtypes[-1]
    part = s.make(case, dtype)
    first, *others = (s.layer(part, case, s.batch(part, case, dtype)) for _ in range(4))
    s.notes.check(all(torch.equal(first, other) for other in others), "the same step gives other bits the next time")


def _exactly_full(s: Subject) -> None:
    case = Case("", tokens=(16,) * s.here.size, absent=0.2)
    part = s.make(case, capacity=16)
    _check_close(s, part, case, s.layer(part, case, s.batch(part, case)))


def _over_capacity(s: Subject) -> None:
    """It still fits, or every rank is told what to raise."""
    case = Case("", tokens=(17,) * s.here.size, absent=0.2)
    part = s.make(case, capacity=16)
    try:
        out = s.layer(part, case, s.batch(part, case))
    except CapacityError as error:
        s.notes.check(CAPACITY_FLAG in str(error), f"its error does not name {CAPACITY_FLAG}: {error}")
        return
    _check_close(s, part, case, out)


def _more_than_announced(s: Subject) -> None:
    case = Case("", tokens=(6,) * s.here.size)
    part = s.make(case)
    try:
        out = s.layer(part, case, s.batch(part, case), max_tokens=5)
    except CapacityError as error:
        s.notes.check("6" in str(error) and "5" in str(error), f"its error does not name both numbers: {error}")
        return
    _check_close(s, part, case, out)


def _traffic(s: Subject) -> None:
    """Where a part counts its rows at all."""
    case = Case("", tokens=_ragged(s), absent=0.3)
    part = s.make(case)
    if part.traffic is None:
        return
    for _ in range(3):
        s.layer(part, case, s.batch(part, case))
    told: list[Any] = [None] * s.here.size
    dist.all_gather_object(told, (part.traffic.rows_sent, part.traffic.rows_received), group=s.here.group)
    s.notes.check(part.traffic.steps == 3, f"it counts {part.traffic.steps} steps of 3")
    for peer, (_, received) in enumerate(told):
        sent = part.traffic.rows_sent[peer]
        same = sent == received[s.here.rank]
        s.notes.check(same, f"it counts {sent} rows sent to rank {peer}, which counts {received[s.here.rank]}")


def _random_steps(s: Subject) -> None:
    """Each with its own sizes, against plain torch in float64."""
    most = 9
    shape = Case("", tokens=(most,) * s.here.size, G=6, H=32, absent=0.2)
    part, everything = s.make(shape), make_weights(shape, s.dtype)
    weights = of_rank(everything, shape.placement, s.here.rank, s.here.device)
    kernel = ModularKernel(part, plain_experts(part), allocate=Workspace(s.here.device))
    generator, wrong = torch.Generator().manual_seed(7), []
    for step in range(RANDOM_STEPS):
        tokens = torch.randint(0, most + 1, (s.here.size,), generator=generator)
        tokens *= torch.randint(0, 2, (s.here.size,), generator=generator)
        case = replace(shape, tokens=tuple(tokens.tolist()))
        batch = s.batch(part, case, seed=step)
        bound = case.max_tokens_per_rank
        out = s.reduced(
            part,
            kernel.apply(batch.x, batch.topk_ids, batch.topk_weights, weights, max_tokens_per_rank=bound),
        )
        if not is_close(out, all_at_once(batch, everything), s.dtype):
            wrong.append(step)
    s.notes.check(not wrong, f"{len(wrong)} steps are wrong, the first of them {wrong[:5]}")


def _killed(s: Subject) -> None:
    """Rank 1 dies between two steps: the others raise RankLostError in time, and name it."""
    case = Case("", tokens=(4,) * s.here.size)
    part = s.make(case)
    s.layer(part, case, s.batch(part, case))
    time.sleep(1.0)  # long enough for a beat that says so
    if s.here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if not part.output_is_reduced:
        return  # nothing is sent, so nothing can be missed
    start = time.monotonic()
    try:
        s.layer(part, case, s.batch(part, case))
    except RankLostError as error:
        s.notes.check("rank 1" in str(error), f"its error does not name rank 1: {error}")
        seconds = time.monotonic() - start
        s.notes.check(seconds < s.loss_timeout_s + 5, f"it took {seconds:.0f} s, {s.loss_timeout_s:g} were allowed")
        return
    s.notes.check(False, "rank 1 was killed, and its peers go on as if nothing had happened")


def _check_close(s: Subject, part: PrepareAndFinalize[Any], case: Case, out: torch.Tensor) -> None:
    truth = answer_for_one(case, s.source(part), s.dtype)
    s.notes.check(is_close(out, truth, s.dtype), f"a step of {len(truth)} tokens is wrong")


def _ragged(s: Subject, least: int = 2) -> tuple[int, ...]:
    return tuple(least + 3 * (rank % 2) for rank in range(s.here.size))


def _odd(x: torch.Tensor) -> torch.Tensor:
    """With numbers that arithmetic would change: negative zero, infinity, NaN, the smallest."""
    odd = x.clone()
    values = torch.tensor([-0.0, float("inf"), float("nan"), torch.finfo(x.dtype).smallest_normal / 2])
    places = odd.view(-1)[::5]
    places.copy_(values.to(x).repeat(len(places) // len(values) + 1)[: len(places)])
    return odd


def _key(t: torch.Tensor) -> bytes:
    return bytes(bits(t).tolist())


def _zeros_for(part: PrepareAndFinalize[Any], dispatched: Dispatched[Any]) -> torch.Tensor:
    return torch.zeros_like(identity_experts(part, dispatched.rows))
