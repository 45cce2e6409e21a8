"""DeepEP, found by name: what its build can do, and the buffers of one process. Both DeepEP all-to-alls use this.

The numbers are compiled into the library (release 1.2): it checks most of them with a bare assert, at the first call or
on the device. Here they are checked when a part is built.

Letters: W ranks, K top-k, H hidden, E the most experts of any rank.
"""

import math
import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vllm_moe_modular.errors import RankLostError, UnsupportedError
from vllm_moe_modular.modular.rank_group import RankGroup

RANKS_OF_A_HOST = 8
"""Ranks beyond this one are taken to be on further hosts, eight on each."""

HIGH_THROUGHPUT_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LOW_LATENCY_TOP_K = 11
LEAST_ROUND = 64

HIGH_THROUGHPUT_TOP_K = 32
"""One for each thread of a warp; what is beyond would be lost without a word."""

HIGH_THROUGHPUT_HIDDEN = 7936
"""Half a row of bfloat16 and a barrier of 8 bytes fit into the 8192 bytes that a warp has."""

HIGH_THROUGHPUT_HIDDEN_STEP = 256
"""A warp copies 32 x 16 bytes at a time."""

HIGH_THROUGHPUT_LOCAL_EXPERTS = 128
"""On one host; a thread counts the rows of an expert."""

QP_DEPTH = "NVSHMEM_QP_DEPTH"
QP_DEPTH_DEFAULT = 1024
TIMEOUT_S = 100.0
"""How long its kernels and its host loop wait for a rank; compiled in."""

_INSTEAD = "'vllm-moe-modular doctor' shows what the loader says; install a build for this torch and CUDA"


@cache
def load_deepep() -> Any:
    """The library.

    Raises:
        UnsupportedError: it is not installed or cannot be loaded; with the loader's own words.
    """
    try:
        return import_module("deep_ep")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # its own, and the loader's
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedError(f"DeepEP that cannot be loaded ({said})", instead=_INSTEAD) from error


def topk_ids_dtype(deep_ep: Any) -> torch.dtype:
    """Of expert ids in this build; builds that do not say it take int64."""
    dtype: torch.dtype = vars(deep_ep).get("topk_idx_t", torch.int64)
    return dtype


def high_throughput_hidden(hidden: int, *, fp8: bool = False) -> int:
    """The columns that are sent.

    Args:
        fp8: rows go out in fp8 and come back in bfloat16; half as many bytes to a column.

    Raises:
        UnsupportedError: more than it takes.
    """
    step = HIGH_THROUGHPUT_HIDDEN_STEP * (2 if fp8 else 1)
    if hidden > HIGH_THROUGHPUT_HIDDEN:
        raise UnsupportedError(
            f"hidden size {hidden} in deepep_high_throughput",
            instead=f"it takes at most {HIGH_THROUGHPUT_HIDDEN}; choose another all-to-all",
        )
    return -(-hidden // step) * step


def low_latency_hidden(hidden: int) -> int:
    """The columns that are sent: the next size that it was compiled for.

    Raises:
        UnsupportedError: more than the largest.
    """
    for size in LOW_LATENCY_HIDDEN:
        if size >= hidden:
            return size
    raise UnsupportedError(
        f"hidden size {hidden} in deepep_low_latency",
        instead=f"it takes at most {LOW_LATENCY_HIDDEN[-1]}; choose another all-to-all",
    )


def sends_fp8(hidden: int, *, wire_hidden: int, fp8_rows: bool) -> bool:
    """Whether rows go out in fp8: only at their own width, as the experts take no slice of wider rows in fp8.

    Args:
        wire_hidden: the columns that would be sent in fp8.
        fp8_rows: the experts take rows in fp8.
    """
    return fp8_rows and wire_hidden == hidden


def low_latency_round(limit: int, capacity_tokens: int, ranks: int) -> int:
    """Tokens per rank and round: W times it is a multiple of 4, and it is little more than a step can bring.

    Where that is little itself it does not matter, so that layers with small steps of all kinds share a buffer.
    """
    step = 4 // math.gcd(4, ranks)
    return -(-min(limit, max(capacity_tokens, LEAST_ROUND)) // step) * step


def require_qp_depth(environ: MutableMapping[str, str], tokens_per_round: int) -> None:
    """Make NVSHMEM's queues deep enough for a round, unless the user said how deep they are to be.

    NVSHMEM reads the variable once in a process, when it is initialised.

    Raises:
        UnsupportedError: the user's number is too small, or no number.
    """
    least = 2 * (tokens_per_round + 1)
    if (given := environ.get(QP_DEPTH)) is None:
        environ[QP_DEPTH] = str(max(QP_DEPTH_DEFAULT, 1 << (least - 1).bit_length()))
    elif not given.isdecimal() or int(given) < least:
        raise UnsupportedError(
            f"{QP_DEPTH}={given} with rounds of {tokens_per_round} tokens per rank in deepep_low_latency",
            instead=f"start the process with at least {least}, or with fewer tokens in "
            "VLLM_MOE_MODULAR_LOW_LATENCY_TOKENS",
        )


def require_high_throughput(*, ranks: int, local_experts: int, top_k: int) -> None:
    """Check what the library would stop at.

    Raises:
        UnsupportedError: with the limit.
    """
    if ranks not in HIGH_THROUGHPUT_RANKS:
        known = ", ".join(map(str, HIGH_THROUGHPUT_RANKS))
        raise UnsupportedError(f"{ranks} ranks in deepep_high_throughput", instead=f"it takes {known}")
    if ranks <= RANKS_OF_A_HOST and local_experts > HIGH_THROUGHPUT_LOCAL_EXPERTS:
        raise UnsupportedError(
            f"{local_experts} experts on a rank in deepep_high_throughput",
            instead=f"it takes at most {HIGH_THROUGHPUT_LOCAL_EXPERTS}; spread the experts over more ranks",
        )
    if top_k > HIGH_THROUGHPUT_TOP_K:
        raise UnsupportedError(
            f"top {top_k} in deepep_high_throughput", instead=f"it takes at most top {HIGH_THROUGHPUT_TOP_K}"
        )


def require_low_latency(*, ranks: int, top_k: int) -> None:
    """Check what the library would stop at.

    Raises:
        UnsupportedError: with the limit.
    """
    if ranks > RANKS_OF_A_HOST and ranks % RANKS_OF_A_HOST:
        raise UnsupportedError(
            f"{ranks} ranks in deepep_low_latency",
            instead=f"it takes up to {RANKS_OF_A_HOST}, or a multiple of it",
        )
    if top_k > LOW_LATENCY_TOP_K:
        raise UnsupportedError(
            f"top {top_k} in deepep_low_latency", instead=f"it takes at most top {LOW_LATENCY_TOP_K}"
        )


class Config(Protocol):
    """How a high-throughput kernel cuts its work up."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int: ...

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int: ...


def high_throughput_bytes(configs: Sequence[Config], *, hidden_bytes: int, ranks: int) -> tuple[int, int]:
    """Of the buffers over NVLink and over the network, as the library hints for all of `configs`."""
    nvlink = max(c.get_nvl_buffer_size_hint(hidden_bytes, ranks) for c in configs)
    if ranks <= RANKS_OF_A_HOST:
        return nvlink, 0
    return nvlink, max(c.get_rdma_buffer_size_hint(hidden_bytes, ranks) for c in configs)


@dataclass(frozen=True, slots=True)
class HighThroughputBuffer:
    """What all layers of one row width share.

    One serves any number of calls in flight: it holds nothing beyond a kernel's own run. The rows and the handle of a
    dispatch are tensors of their own, all kernels run one after the other on the buffer's own stream, and each begins
    with a barrier of the ranks. The host's counters are free again when a dispatch returns, because it waits for them.
    """

    buffer: Any
    dispatch_config: Any
    combine_config: Any

    @classmethod
    def reserve(cls, group: RankGroup, hidden_bytes: int) -> "HighThroughputBuffer":
        """A collective of the group.

        Raises:
            UnsupportedError: the library cannot map the peers' memory.
        """
        deep_ep, W = load_deepep(), group.size
        configs = deep_ep.Buffer.get_dispatch_config(W), deep_ep.Buffer.get_combine_config(W)
        nvlink, rdma = high_throughput_bytes(configs, hidden_bytes=hidden_bytes, ranks=W)
        channels = deep_ep.Buffer.num_sms // 2
        with set_up_failures("deepep_high_throughput"):
            buffer = deep_ep.Buffer(
                group.process_group, nvlink, rdma,
                low_latency_mode=False, num_qps_per_rank=channels if rdma else 1, explicitly_destroy=True,
            )  # fmt: skip
        return cls(buffer, *configs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLatencyShape:
    """What the buffer is laid out by; every call of a kernel has to give the same numbers.

    Attributes:
        tokens_per_round: of any rank.
        hidden: columns that are sent.
        experts: over all ranks, as many on each.
    """

    tokens_per_round: int
    hidden: int
    experts: int


@dataclass(slots=True)
class LowLatencyBuffer:
    """What all layers of one shape share.

    It has two halves, which its kernels take in turn, and each kernel clears the counters of the half that the next one
    takes. So a kernel may only be sent off once the one before it has received: `settle` sees to that. Between kernels
    it holds nothing, the rows and the handle of a dispatch are tensors of their own: one serves any number of calls in
    flight, as long as all ranks issue them in the same order.
    """

    buffer: Any
    shape: LowLatencyShape
    _receive: Callable[[], None] | None = field(default=None)

    @classmethod
    def reserve(cls, group: RankGroup, shape: LowLatencyShape) -> "LowLatencyBuffer":
        """A collective of the group.

        Raises:
            UnsupportedError: NVSHMEM does not start, or the user's variables do not go with the shape.
        """
        deep_ep = load_deepep()
        require_qp_depth(os.environ, shape.tokens_per_round)
        nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            shape.tokens_per_round, shape.hidden, group.size, shape.experts
        )
        with set_up_failures("deepep_low_latency"):
            buffer = deep_ep.Buffer(
                group.process_group, 0, nbytes,
                low_latency_mode=True, num_qps_per_rank=shape.experts // group.size, explicitly_destroy=True,
            )  # fmt: skip
        return cls(buffer, shape)

    def settle(self) -> None:
        """Receive what was sent off and not received yet, on the current stream."""
        if self._receive is not None:
            receive, self._receive = self._receive, None
            receive()

    def sent_off(self, receive: Callable[[], None]) -> Callable[[], None]:
        """Remember how to receive what was just sent off; the result does so unless it was done in the meantime."""
        self._receive = receive

        def settle_this() -> None:
            if self._receive is receive:
                self.settle()

        return settle_this


_high_throughput: dict[tuple[str, int], HighThroughputBuffer] = {}
_low_latency: dict[tuple[str, LowLatencyShape], LowLatencyBuffer] = {}


def high_throughput_buffer(group: RankGroup, hidden_bytes: int) -> HighThroughputBuffer:
    """Reserved at the first call for a width, which is a collective."""
    key = (_name(group.process_group), hidden_bytes)
    if key not in _high_throughput:
        _high_throughput[key] = HighThroughputBuffer.reserve(group, hidden_bytes)
    return _high_throughput[key]


def low_latency_buffer(
    group: RankGroup, shape: LowLatencyShape, *, warm_up: Callable[[LowLatencyBuffer], None]
) -> LowLatencyBuffer:
    """Reserved at the first call for a shape, which is a collective.

    Args:
        warm_up: runs each kernel once on a new buffer, on all ranks: the first launch must not be inside a CUDA graph.
    """
    key = (_name(group.process_group), shape)
    if key not in _low_latency:
        made = LowLatencyBuffer.reserve(group, shape)
        warm_up(made)
        torch.cuda.synchronize()
        _low_latency[key] = made
    return _low_latency[key]


@contextmanager
def set_up_failures(part: str) -> Iterator[None]:
    """What the library raises while it is set up, as an error that says what it was about."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        said = " ".join(str(error).split()) or f"a bare {type(error).__name__}"
        raise UnsupportedError(
            f"{part} here, whose set-up failed ({said})",
            instead="it needs NVLink between the GPUs of a host and, for low latency, an NVSHMEM that starts; "
            "choose another all-to-all",
        ) from error


@contextmanager
def losses(group: RankGroup, part: str, phase: str) -> Iterator[None]:
    """What the library raises when its host has waited too long, as the error for that."""
    try:
        yield
    except RuntimeError as error:
        if "timeout" not in str(error).lower():
            raise
        raise RankLostError(
            f"{part}, rank {group.rank} of {group.size}: some rank did not take part in the {phase} ({error}). The "
            f"{TIMEOUT_S:g} s that it waits are compiled into DeepEP. A group that lost a rank cannot go on: restart "
            "all of its ranks",
            phase=phase,
        ) from error


def _name(group: dist.ProcessGroup) -> str:
    return str(group.group_name)
