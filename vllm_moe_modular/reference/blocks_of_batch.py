"""The meaning of `kernels.blocks_of_batch`."""


def blocks_of_batch(counts: list[int], capacity: int, block_rows: int) -> list[tuple[int, int, int]]:
    """The blocks as (expert, first position, rows)."""
    return [
        (expert, expert * capacity + first, min(block_rows, count - first))
        for expert, count in enumerate(min(max(c, 0), capacity) for c in counts)
        for first in range(0, count, block_rows)
    ]
