"""The meaning of `kernels.place_rows`, with the slots of each expert in ascending order."""

import torch


def place_rows(topk_ids_RK: torch.Tensor, num_experts: int, alignment: int) -> tuple[list[int], list[int]]:
    """The position of each slot, and the end of each expert."""
    ids = topk_ids_RK.flatten().tolist()
    positions, ends, start = [-1] * len(ids), [], 0
    for expert in range(num_experts):
        end = start
        for slot, its_expert in enumerate(ids):
            if its_expert == expert:
                positions[slot] = end
                end += 1
        ends.append(end)
        start = -(-end // alignment) * alignment
    return positions, ends
