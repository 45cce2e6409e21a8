"""Experts numbered as native all-to-alls want them: as many on every rank, rank r's from r * E on.

Letters: T tokens, K top-k, H hidden, G experts, E the most experts of any rank, W ranks.
"""

import torch

from vllm_moe_modular.kernels.translate_ids import translate_ids
from vllm_moe_modular.modular.placement import ExpertPlacement


def uniform_numbers(placement: ExpertPlacement) -> list[int]:
    """[G], the number of each expert where every rank counts as many as the fullest; some numbers have no expert."""
    E = max(placement.num_local)
    return [rank * E + local for rank, local in zip(placement.rank_of, placement.local_id_of, strict=True)]


class UniformExperts:
    """Translates the router's ids. Device memory: 4 bytes for every global expert.

    Args:
        placement: which rank holds which expert.
        dtype: of the ids that are wanted.

    Attributes:
        device: of the activations.
        per_rank: E.
        total: W * E.
    """

    def __init__(self, placement: ExpertPlacement, *, dtype: torch.dtype, device: torch.device) -> None:
        numbers = uniform_numbers(placement)
        self.per_rank = max(placement.num_local)
        self.total = self.per_rank * placement.num_ranks
        self._dtype = dtype
        self.device = device
        self._numbers_G = torch.tensor(numbers, dtype=torch.int32, device=device)
        self._keeps_ids = numbers == list(range(self.total))

    def ids(self, topk_ids_TK: torch.Tensor, *, past_the_end_is_none: bool = False) -> torch.Tensor:
        """[T, K], contiguous: numbers of `uniform_numbers`, and -1 where an id names no expert.

        Args:
            past_the_end_is_none: who gets them takes an id outside the experts for none too, so that they may stay.
        """
        ids = topk_ids_TK.contiguous()
        if self._keeps_ids and past_the_end_is_none and ids.dtype == self._dtype:
            return ids
        out = torch.empty_like(ids, dtype=self._dtype)
        if ids.numel():
            translate_ids(ids, self._numbers_G, out=out)
        return out


def padded_rows(x_TH: torch.Tensor, hidden: int, *, least_rows: int = 0) -> torch.Tensor:
    """`x_TH` as a library wants it: contiguous, `hidden` columns and `least_rows` rows at least, what is added 0.

    Where nothing is to be added it is `x_TH` itself.
    """
    T, H = x_TH.shape
    if hidden == H and least_rows <= T:
        return x_TH.contiguous()
    rows = x_TH.new_zeros((max(T, least_rows), hidden))
    rows[:T, :H] = x_TH
    return rows


def padded_blocks(y_ECH: torch.Tensor, experts: int, hidden: int) -> torch.Tensor:
    """The same for blocks of rows; what is added is uninitialised."""
    E, C, H = y_ECH.shape
    if (experts, hidden) == (E, H):
        return y_ECH.contiguous()
    blocks = y_ECH.new_empty((experts, C, hidden))
    blocks[:E, :, :H] = y_ECH
    return blocks
