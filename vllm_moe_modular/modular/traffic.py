"""What an all-to-all has moved so far, as far as the host knows without asking the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """Counters of one all-to-all since it was made. A row is one token's [H].

    Attributes:
        num_ranks: W.
        steps: calls of `prepare`.
        rows_sent: [W], rows dispatched to each rank, this one included.
        rows_received: [W], rows dispatched to this rank by each rank, this one included.
    """

    num_ranks: int
    steps: int = 0
    rows_sent: list[int] = field(init=False)
    rows_received: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.rows_sent = [0] * self.num_ranks
        self.rows_received = [0] * self.num_ranks

    def add(self, *, sent: Sequence[int], received: Sequence[int]) -> None:
        """Count one dispatch."""
        self.steps += 1
        for rank in range(self.num_ranks):
            self.rows_sent[rank] += sent[rank]
            self.rows_received[rank] += received[rank]
