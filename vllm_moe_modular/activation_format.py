from enum import Enum


class ActivationFormat(Enum):
    """How expert input rows lie in memory after dispatch."""

    STANDARD = "standard"
    """Contiguous: one row per token, [R, H], with topk_ids [R, K] saying which local experts each row goes to."""

    BATCHED = "batched"
    """One block per local expert, [E, C, H], with expert_num_tokens [E] saying how many rows of each are real."""
