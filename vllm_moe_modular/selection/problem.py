"""The question that the selection answers. Pure data: made in a test, by the command line, or from a vLLM layer."""

from dataclasses import dataclass

LAID_OUT = "vLLM has laid out the weights for its own kernel; name the experts that are to read them"
"""In `Problem.weights_missing`: why `auto` cannot take other experts any more, and who names them can."""


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

    def __str__(self) -> str:
        if self.kind != "cuda":
            return self.kind
        access = "peer access between the GPUs of a host" if self.peer_access else "no peer access"
        return f"{self.kind}, compute capability {self.sm // 10}.{self.sm % 10}, {access}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One MoE layer and how it is served.

    Attributes:
        num_experts: physical experts over all ranks (logical and redundant ones).
        num_local_experts: the most that any rank holds.
        intermediate: per expert, on this rank.
        activation: vLLM's name of it.
        quant_scheme: "none", or what the weights are quantised with: the name of the method of a live layer, the scheme
            that a config.json gives ("fp8 128x128").
        weights_missing: why the checkpoint's plain weights cannot be read off the layer; empty: they can.
        tp_size, dp_size, pcp_size, ep_size: ranks of each kind; ep_size 1 without expert parallelism.
        sequence_parallel: each tensor-parallel rank holds its own slice of the tokens.
        hosts: machines that the expert-parallel ranks are spread over.
        capacity_tokens: the most tokens of any rank in one step (the scheduler's limit).
        captured_tokens: the largest step that a CUDA graph is captured for; 0 where none is, or it is not known.
        cuda_graph: graphs capture the layer.
        between_graphs: they capture the model around it, in pieces.
        only_vllm_experts: no experts but `vllm` know what the weights are quantised with.
        vllm_experts: why the expert kernel that vLLM chose for the layer cannot be reused; empty: it can.
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
    between_graphs: bool = False
    captured_tokens: int = 0
    micro_batches: bool = False
    eplb: bool = False
    lora: bool = False
    elastic_ep: bool = False
    only_vllm_experts: bool = False
    vllm_experts: str = ""
    irreplaceable: str = ""

    @property
    def tokens_replicated(self) -> bool:
        """Every rank of the expert-parallel group starts with the same tokens."""
        return self.dp_size == 1 and self.pcp_size == 1 and not self.sequence_parallel

    @property
    def layer(self) -> str:
        """What the model says of it, for people."""
        told = [
            f"{self.num_experts} experts, {self.num_local_experts} on each rank, top {self.top_k}",
            f"hidden {self.hidden}, intermediate {self.intermediate}, {self.activation}",
            f"{self.dtype}, weights {'unquantised' if self.quant_scheme == 'none' else self.quant_scheme}",
        ]
        told += [name for name, on in (("biases", self.has_bias), ("EPLB", self.eplb), ("LoRA", self.lora)) if on]
        told += ["router weight on the input"] if self.router_weight_on_input else []
        return "; ".join(told)

    @property
    def serving(self) -> str:
        """How it is served, for people."""
        sizes = {"TP": self.tp_size, "DP": self.dp_size, "PCP": self.pcp_size, "EP": self.ep_size}
        told = [", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name != "PCP")]
        told += ["sequence parallel"] if self.sequence_parallel else []
        told += [f"{self.hosts} host{'s'[: self.hosts > 1]}", f"up to {self.capacity_tokens} tokens per rank and step"]
        more = {
            "CUDA graphs": self.cuda_graph,
            "between CUDA graphs": self.between_graphs,
            "micro-batches": self.micro_batches,
        }
        return "; ".join([*told, *(name for name, on in more.items() if on)])
