"""What the standard-format all-to-alls have in common: checks before anything is sent, expert ids, packed routing.

Letters: T tokens, K top-k, N rows, G global experts, W ranks.
"""

from collections.abc import Sequence

import torch

from vllm_moe_modular.errors import AgreementError, CapacityError, ExpertIdError
from vllm_moe_modular.modular.placement import ExpertPlacement


def check_ranks(placement: ExpertPlacement, *, num_ranks: int, rank: int) -> None:
    """Check that `placement` is over the ranks that take part.

    Raises:
        AgreementError: it is over more or fewer, as when one counts data-parallel ranks and the other all ranks of the
            expert-parallel group.
    """
    if placement.num_ranks != num_ranks or not 0 <= rank < num_ranks:
        raise AgreementError(
            f"rank {rank}: the experts are placed on {placement.num_ranks} ranks, the process group has {num_ranks}; "
            "both must be of the expert-parallel group (tensor-parallel x data-parallel ranks)"
        )


def check_step(topk_ids_TK: torch.Tensor, *, num_experts: int, max_tokens_per_rank: int, rank: int, part: str) -> None:
    """Check one step on the host, before any communication.

    Ids are looked at on the CPU only: elsewhere that would be a synchronisation, and `known_ids` leaves bad ones out.

    Raises:
        CapacityError: more tokens than `max_tokens_per_rank`, which must be the same number on every rank.
        ExpertIdError: an id is past the last expert.
    """
    T = topk_ids_TK.shape[0]
    if max_tokens_per_rank < T:
        raise CapacityError(
            f"{part}, rank {rank}: {T} tokens in a step announced as at most {max_tokens_per_rank} per rank; "
            "give max_tokens_per_rank, on all ranks alike, the largest number of tokens of any rank in the step"
        )
    if topk_ids_TK.device.type == "cpu" and topk_ids_TK.numel() and (top := int(topk_ids_TK.max())) >= num_experts:
        raise ExpertIdError(
            f"{part}, rank {rank}: topk_ids names expert {top}, the layer has experts 0 to {num_experts - 1}; "
            "give ids of physical experts, and -1 for no expert"
        )


def expert_table(entries: Sequence[int], device: torch.device) -> torch.Tensor:
    """[G + 1], int32: a number for every expert, and -1 at index G, where `known_ids` sends what is no expert."""
    return torch.tensor([*entries, -1], dtype=torch.int32, device=device)


def local_ids_on(placement: ExpertPlacement, rank: int) -> list[int]:
    """[G], the local id on `rank` of every expert; -1 = elsewhere."""
    return [
        local if holder == rank else -1 for holder, local in zip(placement.rank_of, placement.local_id_of, strict=True)
    ]


def known_ids(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64, same shape: ids as indices of an `expert_table`. No id is ever negative, so none wraps around."""
    ids = topk_ids.long()
    return torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)


def pack_routing(topk_ids_NK: torch.Tensor, topk_weights_NK: torch.Tensor) -> torch.Tensor:
    """[N, 2K], int32: ids and weights of a row side by side, for one message instead of two."""
    return torch.cat((topk_ids_NK.int(), topk_weights_NK.to(torch.float32).view(torch.int32)), dim=1)


def unpack_routing(packed_N2K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids [N, K], int32, and weights [N, K], float32, of `pack_routing`, contiguous."""
    ids_NK, weights_NK = packed_N2K.chunk(2, dim=1)
    return ids_NK.contiguous(), weights_NK.contiguous().view(torch.float32)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial sums of `dtype` are added in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
