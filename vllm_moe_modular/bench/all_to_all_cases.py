"""What `bench all-to-all` measures, by name; imports no torch.

Letters: T tokens of each rank, H hidden, G experts of all ranks, K top-k.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import Part, PartKind
from vllm_moe_modular.selection.third_party import full_registry

HIDDEN = (2048, 4096, 7168)
TOKENS = (1, 8, 32, 128, 512, 2048, 4096, 8192)
EAGER, GRAPHS = MODES = ("eager", "graphs")
BFLOAT16, FP8 = "bfloat16", "fp8"

LIBRARY_OF = {
    "deepep_high_throughput": "deep_ep.high_throughput",
    "deepep_low_latency": "deep_ep.low_latency",
    "pplx": "pplx_kernels",
}
"""By part, its library called directly."""

NCCL, LINK = "nccl", "link"
"""All-gather and reduce-scatter by hand; plain copies into the peers' memory."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of a table.

    Attributes:
        rows: what a dispatch sends, `BFLOAT16` or `FP8`; a combine sends bfloat16.
        capacity_tokens: of each rank, what buffers are reserved for.
        low_latency_tokens: of each rank and round, at most, of those that run in rounds.
    """

    T: int
    H: int
    G: int
    K: int
    rows: str
    capacity_tokens: int
    low_latency_tokens: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        ranks: how many.
        cases: in the order in which they are measured.
        modes: of `MODES`.
        peers: of `peer_names()`.
        turns: of each peer in every case.
        device: of each rank.
        shared_gpu: ranks share GPUs, so that times mean nothing.
    """

    ranks: int
    cases: Sequence[Case]
    modes: Sequence[str]
    peers: Sequence[str]
    turns: int
    device: Device
    shared_gpu: bool = False


@cache
def parts() -> dict[str, Part]:
    """All-to-alls that communicate, also third parties', best first. Of one for small steps and one for others both are
    here, and the pair is not."""
    found = full_registry().of(PartKind.PREPARE_FINALIZE)
    return {part.name: part for part in found if part.name != "local" and not part.small_steps}


def peer_names() -> list[str]:
    """Everything that can be measured: parts, libraries called directly, NCCL by hand, the link."""
    return [*parts(), *LIBRARY_OF.values(), NCCL, LINK]


def why_not(peer: str, case: Case, mode: str, plan: Plan) -> str:
    """What is known to be in the way before anything runs; empty: nothing. A part's library is held to the same."""
    name = next((part for part, library in LIBRARY_OF.items() if library == peer), peer)
    part = parts().get(name)
    if part is None:
        return "" if plan.device.kind == "cuda" else f"runs on cuda, this device is {plan.device.kind}"
    problem = Problem(
        num_experts=case.G, num_local_experts=-(-case.G // plan.ranks), top_k=case.K, hidden=case.H,
        intermediate=case.H, dp_size=plan.ranks, ep_size=plan.ranks, capacity_tokens=case.capacity_tokens,
    )  # fmt: skip
    reasons = [f"{module} is not installed" for module in part.missing_modules()]
    reasons += part.objections(problem, plan.device)
    if mode == GRAPHS and part.cannot_be_captured:
        reasons.append(part.cannot_be_captured)
    if mode == GRAPHS and plan.shared_gpu and name == "allgather":
        reasons.append("cannot be captured in a CUDA graph over gloo, which ranks that share a GPU send through")
    return "; ".join(reasons)
