"""The library pplx-kernels: loading it, and the buffers that layers of a shape share.

Letters: T tokens of this rank, L tokens per rank and round, H hidden, G = H / 128 scales of a row in fp8.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vllm_moe_modular.errors import MoEModularError, UnsupportedError
from vllm_moe_modular.kernels.quantize_fp8 import GROUP
from vllm_moe_modular.modular.rank_group import RankGroup

NAME = "pplx"
SHARED_OBJECT = "libpplx_kernels.so"
SLOTS = 2
"""Calls in flight, two micro-batches: the library keeps what combine needs of a dispatch with its buffers."""

RANKS_OF_A_HOST = 8
HIDDEN_STEP = 8
"""Combine writes so many numbers at a time, and 16 bytes of them is what a row has to be a multiple of."""

SCALES_STEP = 4
"""Scales of a row, too, are sent 16 bytes at a time."""

_INSTEAD = "'vllm-moe-modular doctor' shows what the loader says; build pplx-kernels for this torch"


@cache
def load_pplx() -> Any:
    """The library.

    Raises:
        UnsupportedError: it is not installed, or its shared object does not load, as where NVSHMEM is not found.
    """
    try:
        found = import_module("pplx_kernels")
        # The package itself hides the loader's error in a log, and then has no operations.
        torch.ops.load_library(Path(str(found.__file__)).with_name(SHARED_OBJECT))  # type: ignore[no-untyped-call]
    except (ImportError, OSError, RuntimeError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedError(f"pplx-kernels that cannot be loaded ({said})", instead=_INSTEAD) from error
    return found


def fp8_scales(hidden: int) -> int:
    """How many scales go with a row of that many columns in fp8; 0: the library cannot send such."""
    return hidden // GROUP if hidden % (GROUP * SCALES_STEP) == 0 else 0


def pplx_round(limit: int, capacity_tokens: int, ranks: int, multiprocessors: int) -> int:
    """Tokens per rank and round.

    On one host no more than a token for each program of the library's dispatch, which has one per multiprocessor: a
    program that sends two stages the second in shared memory while warps still send the first, and columns of the
    second arrive in the first's place (pplx-kernels of 2025-09-19). Between hosts it stages elsewhere.
    """
    if ranks <= RANKS_OF_A_HOST:
        limit = min(limit, multiprocessors)
    return max(1, min(limit, capacity_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class PplxShape:
    """What the buffers are laid out by.

    Attributes:
        dtype: of the rows as they are sent; with float8_e4m3fn go `fp8_scales(hidden)` scales each.
    """

    tokens_per_round: int
    hidden: int
    dtype: torch.dtype
    experts: int
    top_k: int

    @property
    def scales(self) -> int:
        """Of a row."""
        return fp8_scales(self.hidden) if self.dtype is torch.float8_e4m3fn else 0


class PplxBuffers:
    """The library's objects of one shape, and which of them are free. See `pplx_buffers`."""

    def __init__(self, shape: PplxShape, transports: list[Any], *, rank: int) -> None:
        self.shape = shape
        self.transports = transports
        self._rank = rank
        self._free = list(range(len(transports)))

    @classmethod
    def reserve(cls, group: RankGroup, shape: PplxShape) -> "PplxBuffers":
        """A collective of the group.

        Raises:
            UnsupportedError: the library cannot be loaded, or cannot map the peers' memory.
        """
        library = load_pplx()
        given: dict[str, Any] = {
            "max_num_tokens": shape.tokens_per_round,
            "num_experts": shape.experts,
            "experts_per_token": shape.top_k,
            "rank": group.rank,
            "world_size": group.size,
            "dp_size": 1,
            "hidden_dim": shape.hidden,
            "hidden_dim_bytes": shape.hidden * shape.dtype.itemsize,
            "hidden_dim_scale_bytes": shape.scales * torch.float32.itemsize,
        }
        try:
            if group.size <= RANKS_OF_A_HOST:
                name = _host_group(group).group_name
                made = [library.AllToAll.intranode(**given, group_name=name) for _ in range(SLOTS)]
            else:
                _start_nvshmem(group)
                made = [library.AllToAll.internode(**given) for _ in range(SLOTS)]
        except (ImportError, RuntimeError, AssertionError) as error:
            said = " ".join(str(error).split()) or f"a bare {type(error).__name__}"
            raise UnsupportedError(
                f"{NAME} here, whose set-up failed ({said})",
                instead="it needs NVLink between the GPUs of a host, and NVSHMEM beyond; choose another all-to-all",
            ) from error
        return cls(shape, made, rank=group.rank)

    def take(self) -> int:
        """The first free one: the same on every rank, because all ranks call in the same order."""
        if not self._free:
            raise MoEModularError(
                f"{NAME}, rank {self._rank}: {len(self.transports)} calls are in flight already; finalize one of them "
                "before the next prepare"
            )
        return self._free.pop(0)

    def require_taken(self, index: int) -> None:
        """Raises:
        MoEModularError: no call has it.
        """
        if index in self._free:
            raise MoEModularError(
                f"{NAME}, rank {self._rank}: buffers {index} are free already; finalize the ticket of a prepare once"
            )

    def give_back(self, index: int) -> None:
        """The call that had it is over.

        Raises:
            MoEModularError: no call has it.
        """
        self.require_taken(index)
        self._free = sorted([*self._free, index])


def _host_group(group: RankGroup) -> dist.ProcessGroup:
    """The same ranks in a group that moves host memory, through which the library exchanges its handles."""
    if dist.get_backend(group.process_group) == "gloo":
        return group.process_group
    made: dist.ProcessGroup = dist.new_group(group.global_ranks, backend="gloo", use_local_synchronization=True)
    return made


@cache
def _start_nvshmem(group: RankGroup) -> None:
    nvshmem, device = import_module("nvshmem.core"), import_module("cuda.core.experimental").Device
    ids: list[Any] = [None] * group.size
    mine = nvshmem.get_unique_id() if group.rank == 0 else None
    dist.all_gather_object(ids, mine, group=group.process_group)
    nvshmem.init(
        device=device(torch.cuda.current_device()), uid=ids[0], rank=group.rank, nranks=group.size,
        initializer_method="uid",
    )  # fmt: skip


_buffers: dict[tuple[str, PplxShape], PplxBuffers] = {}


def pplx_buffers(group: RankGroup, shape: PplxShape) -> PplxBuffers:
    """Those that all layers of this shape share; reserved at the first call, which is a collective."""
    key = (str(group.process_group.group_name), shape)
    if key not in _buffers:
        _buffers[key] = PplxBuffers.reserve(group, shape)
    return _buffers[key]
