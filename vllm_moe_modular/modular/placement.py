"""Which rank holds which expert, and under which local number."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_moe_modular.errors import AgreementError


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Where each physical expert lives. Hashable, so that layers with the same placement can share buffers.

    Attributes:
        rank_of: [G], the rank of the expert-parallel group that holds expert g.
        local_id_of: [G], the number of expert g on that rank.
        num_local: [W], how many experts each rank holds.
    """

    rank_of: tuple[int, ...]
    local_id_of: tuple[int, ...]
    num_local: tuple[int, ...]

    @property
    def num_experts(self) -> int:
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        return len(self.num_local)

    @classmethod
    def linear(cls, num_experts: int, num_ranks: int) -> "ExpertPlacement":
        """Consecutive blocks, the first ranks one larger where the experts do not divide evenly."""
        rank_of: list[int] = []
        local_id_of: list[int] = []
        num_local: list[int] = []
        for rank in range(num_ranks):
            n = num_experts // num_ranks + (rank < num_experts % num_ranks)
            rank_of += [rank] * n
            local_id_of += range(n)
            num_local.append(n)
        return cls(tuple(rank_of), tuple(local_id_of), tuple(num_local))

    @classmethod
    def from_expert_maps(cls, expert_maps: Sequence[Sequence[int]]) -> "ExpertPlacement":
        """From the map of global to local ids of each of W ranks, [G], -1 = not there, as its server built it.

        Raises:
            AgreementError: an expert is on no rank or on several, or the maps differ in length.
        """
        if len({len(m) for m in expert_maps}) != 1:
            raise AgreementError(
                f"the ranks count {[len(m) for m in expert_maps]} experts; start all of them with the same model"
            )
        rank_of, local_id_of = [], []
        for expert in range(len(expert_maps[0])):
            holders = [rank for rank, m in enumerate(expert_maps) if m[expert] >= 0]
            if len(holders) != 1:
                where = f"ranks {holders}" if holders else "no rank"
                raise AgreementError(
                    f"expert {expert} is held by {where}; each must be held by one: "
                    "start all ranks with the same expert placement"
                )
            rank_of.append(holders[0])
            local_id_of.append(expert_maps[holders[0]][expert])
        num_local = tuple(sum(i >= 0 for i in m) for m in expert_maps)
        return cls(tuple(rank_of), tuple(local_id_of), num_local)
