"""The meaning of `kernels.align_rows`, written to be read, not to be fast."""

import torch


def align_rows(
    topk_ids_RK: torch.Tensor, num_experts: int, block_rows: int
) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
    """The slots of each expert in ascending order, and the blocks as (expert, first position, rows)."""
    groups: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(topk_ids_RK.flatten().tolist()):
        if 0 <= expert < num_experts:
            groups[expert].append(slot)
    blocks, start = [], 0
    for expert, group in enumerate(groups):
        for first in range(0, len(group), block_rows):
            blocks.append((expert, start + first, min(block_rows, len(group) - first)))
        start += len(group)
    return groups, blocks
