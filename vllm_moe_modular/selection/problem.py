"""The question that the selection answers. Pure data: made in a test, by the command line, or from a vLLM layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where a layer runs.

    Attributes:
        kind: "cuda" or "cpu".
        sm: compute capability times ten; 90 = Hopper; 0 where it has no meaning.
        peer_access: every GPU of the host can read and write every other's memory.
    """

    kind: str
    sm: int = 0
    peer_access: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One MoE layer and how it is served.

    Attributes:
        num_experts: physical experts over all ranks (logical and redundant ones).
        num_local_experts: the most that any rank holds.
        intermediate: per expert, on this rank.
        activation: vLLM's name of it.
        quant_scheme: "none", or the name of vLLM's quantisation method.
        weights_missing: why the checkpoint's plain weights cannot be read off the layer; empty: they can.
        tp_size, dp_size, pcp_size, ep_size: ranks of each kind; ep_size 1 without expert parallelism.
        sequence_parallel: each tensor-parallel rank holds its own slice of the tokens.
        hosts: machines that the expert-parallel ranks are spread over.
        capacity_tokens: the most tokens of any rank in one step (the scheduler's limit).
        irreplaceable: why vLLM's method of the layer cannot be replaced at all; empty: it can.
    """

    num_experts: int
    num_local_experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str = "silu"
    has_bias: bool = False
    dtype: str = "bfloat16"
    quant_scheme: str = "none"
    weights_missing: str = ""
    router_weight_on_input: bool = False
    tp_size: int = 1
    dp_size: int = 1
    pcp_size: int = 1
    ep_size: int = 1
    sequence_parallel: bool = False
    hosts: int = 1
    capacity_tokens: int = 8192
    cuda_graph: bool = False
    micro_batches: bool = False
    eplb: bool = False
    lora: bool = False
    irreplaceable: str = ""

    @property
    def tokens_replicated(self) -> bool:
        """Every rank of the expert-parallel group starts with the same tokens."""
        return self.dp_size == 1 and self.pcp_size == 1 and not self.sequence_parallel
