"""All-to-alls beside each other in the same processes on the same tokens: dispatch, combine and round trip.

Uniformly random routing, every rank as many tokens. Each peer is tried by itself first: what does not run, or does not
bring the right answer home, is not timed and says why. The others are then timed in turns.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from vllm_moe_modular.bench.all_to_all_cases import EAGER, FP8, LINK, Case, Plan, why_not
from vllm_moe_modular.bench.all_to_all_libraries import LIBRARIES, Link
from vllm_moe_modular.bench.all_to_all_peers import (
    OurPart,
    Tokens,
    Transfer,
    answer,
    draw,
    in_rounds,
    right_answer,
    round_trip,
)
from vllm_moe_modular.bench.timing import Stamp, captured, microseconds, stamp, time_in_turns, timing_of
from vllm_moe_modular.errors import MoEModularError, RankLostError, UnsupportedError
from vllm_moe_modular.testing.ranks import Here, RankFailedError, Ranks

INPUTS = 3
"""Sets of tokens, taken in turn."""

TIMEOUT_S = 150.0
"""Of one call of the ranks. DeepEP itself gives up after 100 s."""

Result = dict[str, Any]


@dataclass
class Tried:
    """What trying a peer said, on one rank.

    Attributes:
        why_not: empty: it may be timed.
        said: what every result of it says.
    """

    why_not: str = ""
    said: Result = field(default_factory=dict)


def measure_all(ranks: Ranks, plan: Plan) -> Iterator[Result]:
    """One result for each peer, case and mode, as they come: microseconds, medians of the slowest rank, or `not_run`
    with the reason. Cases that differ only in T follow each other."""
    crashed: dict[tuple[str, str, str], str] = {}
    for mode in plan.modes:
        for case in plan.cases:
            found: dict[str, Result] = {}
            for peer in plan.peers:
                what = {"peer": peer, **asdict(case), "ranks": plan.ranks, "mode": mode, "shared_gpu": plan.shared_gpu}
                tried = _try_peer(ranks, peer, case, mode, plan, crashed)
                if tried.why_not:
                    yield {**what, "not_run": tried.why_not}
                else:
                    found[peer] = {**what, **tried.said}
            for peer, timed in _timed(ranks, list(found), case, mode, plan.turns).items():
                yield found[peer] | timed


def _try_peer(
    ranks: Ranks, peer: str, case: Case, mode: str, plan: Plan, crashed: dict[tuple[str, str, str], str]
) -> Tried:
    """On all ranks. What ended them once is not tried again for more tokens or columns: new ranks take seconds."""
    if why := why_not(peer, case, mode, plan) or crashed.get((peer, case.rows, mode)):
        return Tried(why)
    try:
        found: list[Tried] = ranks.run(try_out, peer, case, mode, timeout_s=TIMEOUT_S)
    except RankFailedError as error:
        why = _last_line(error)
        crashed[peer, case.rows, mode] = f"left out, as it failed at T {case.T}, hidden {case.H}"
        return Tried(why)
    return next((tried for tried in found if tried.why_not), found[0])


def try_out(here: Here, peer: str, case: Case, mode: str) -> Tried:
    """Build it, and compare what comes home; in graphs, what a replay brings home. Runs on each rank."""
    try:
        transfer = make(peer, here, case)
        rounds = in_rounds(transfer, draw(case, here, 0))
        out = answer(transfer, rounds)
        if case.rows == FP8 and not transfer.sends_fp8:
            raise UnsupportedError(f"rows in fp8 in {peer}", instead="it sends bfloat16")
    except RankLostError:
        raise  # nothing works afterwards: end these ranks
    except MoEModularError as error:
        return Tried(" ".join(str(error).split()))
    if mode != EAGER:
        made: list[torch.Tensor] = []
        graph = captured([lambda: made.append(answer(transfer, rounds))])
        out = made[-1].fill_(float("nan"))
        graph.replay()
    if peer != LINK and not torch.equal(out, right_answer(draw(case, here, 0))):
        return Tried(f"what comes home to rank {here.rank} is wrong")
    said: Result = {"ran": transfer.ran, "combine_takes": transfer.combine_takes, "rounds": len(rounds)}
    if isinstance(transfer, Link):
        said["bytes_each_way"] = transfer.bytes_each_way
    return Tried(said=said)


def make(peer: str, here: Here, case: Case) -> Transfer:
    """Of any name in `peer_names()`.

    Raises:
        MoEModularError: it does not load, or does not take the case.
    """
    return LIBRARIES[peer](here, case) if peer in LIBRARIES else OurPart(peer, here, case)


def _timed(ranks: Ranks, peers: Sequence[str], case: Case, mode: str, turns: int) -> dict[str, Result]:
    """All in turns; if that fails, each by itself, so that one costs the others nothing but the turns."""
    try:
        return _slowest(ranks.run(time_peers, peers, case, mode, turns, timeout_s=TIMEOUT_S)) if peers else {}
    except RankFailedError as error:
        if len(peers) == 1:
            return {peers[0]: {"not_run": _last_line(error)}}
    return {peer: timed for one in peers for peer, timed in _timed(ranks, [one], case, mode, turns).items()}


def _slowest(of_ranks: Iterable[Mapping[str, Result]]) -> dict[str, Result]:
    """By peer, the times of the rank whose median is the largest."""
    slowest: dict[str, Result] = {}
    for of_rank in of_ranks:
        for peer, timed in of_rank.items():
            if peer not in slowest or timed["median_us"] > slowest[peer]["median_us"]:
                slowest[peer] = timed
    return slowest


def _last_line(error: Exception) -> str:
    return [line for line in str(error).splitlines() if line.strip()][-1].strip()


def time_peers(here: Here, peers: Sequence[str], case: Case, mode: str, turns: int) -> dict[str, Result]:
    """By peer, microseconds of a call; runs on each rank."""
    tokens = [draw(case, here, seed) for seed in range(INPUTS)]
    transfers = {peer: make(peer, here, case) for peer in peers}
    inputs = {peer: [in_rounds(transfer, t) for t in tokens] for peer, transfer in transfers.items()}
    calls = calls_of(case.T)
    if mode == EAGER:
        return time_eager(here.device, transfers, inputs, calls=calls, turns=turns)
    graphs = {
        peer: captured([partial(round_trip, transfer, inputs[peer][i % INPUTS]) for i in range(calls)])
        for peer, transfer in transfers.items()
    }
    dist.barrier()
    return {peer: asdict(timing) for peer, timing in time_in_turns(graphs, calls, turns).items()}


def calls_of(T: int) -> int:
    """Round trips of one turn, or in one graph: fewer where each takes long."""
    return max(INPUTS, min(12, 16384 // T))


def time_eager(
    device: torch.device,
    transfers: Mapping[str, Transfer],
    inputs: Mapping[str, Sequence[list[Tokens]]],
    *,
    calls: int,
    turns: int,
) -> dict[str, Result]:
    """Call after call as a host issues them: round trips by themselves, then with a stamp between dispatch and combine.

    Each turn begins with another peer.
    """
    names = list(transfers)
    trips: dict[str, list[list[Stamp]]] = {name: [] for name in names}
    halves: dict[str, list[list[Stamp]]] = {name: [] for name in names}
    dist.barrier()
    for turn in range(turns + 1):  # the first is not counted
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            given = [inputs[name][i % INPUTS] for i in range(calls)]
            whole = [_trip_stamps(device, transfers[name], rounds) for rounds in given]
            parts = [_half_stamps(device, transfers[name], rounds) for rounds in given]
            if turn:
                trips[name] += whole
                halves[name] += parts
    if device.type == "cuda":
        torch.cuda.synchronize()
    timed: dict[str, Result] = {}
    for name in names:
        timed[name] = asdict(timing_of(microseconds(*call) for call in trips[name]))
        for half, first in (("dispatch_us", 0), ("combine_us", 1)):
            us = [sum(map(microseconds, call[first::3], call[first + 1 :: 3])) for call in halves[name]]
            timed[name][half] = timing_of(us).median_us
    return timed


def _trip_stamps(device: torch.device, transfer: Transfer, rounds: list[Tokens]) -> list[Stamp]:
    """Before and after one round trip."""
    before = stamp(device)
    round_trip(transfer, rounds)
    return [before, stamp(device)]


def _half_stamps(device: torch.device, transfer: Transfer, rounds: list[Tokens]) -> list[Stamp]:
    """Before, between and after, three for each round."""
    stamps = []
    for tokens in rounds:
        stamps.append(stamp(device))
        sent = transfer.dispatch(tokens)
        stamps.append(stamp(device))
        transfer.combine(sent, transfer.unchanged(sent))
        stamps.append(stamp(device))
    return stamps
