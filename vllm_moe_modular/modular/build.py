"""What a part is given when it is built."""

from dataclasses import dataclass

import torch

from vllm_moe_modular.modular.experts import Activation
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.rank_group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Everything that `build` of a part may need; parts take from it what they use.

    Attributes:
        device, dtype: of the activations.
        placement: which rank holds which expert.
        rank: of this process in the expert-parallel group.
        group: the expert-parallel group; None where one rank holds all experts.
        hidden, top_k: of the layer.
        capacity_tokens: the most tokens that this rank brings to one step.
        activation: between the two GEMMs; None where vLLM's name for it has no counterpart here.
        low_latency_tokens: tokens per rank and round of low-latency transports.
        fp8_rows: the experts of the layer take rows in fp8 and would quantise them so anyway: an all-to-all may send
            half the bytes (`StandardRows.x_scale`, `BatchedRows.x_scale`); it need not. `hidden` is a multiple of 128.
        layer: the server's own object of the layer, for a part that was registered with `per_layer`; else None.
        tuned: folder of tuned tables that go before those of the package; None: there is none.
    """

    device: torch.device
    dtype: torch.dtype
    placement: ExpertPlacement
    rank: int
    group: RankGroup | None
    hidden: int
    top_k: int
    capacity_tokens: int
    activation: Activation | None
    low_latency_tokens: int
    fp8_rows: bool = False
    layer: object | None = None
    tuned: str | None = None

    def require_layer(self) -> object:
        """The server's layer, for a part that reuses what it has."""
        if self.layer is None:
            raise ValueError("these experts run a server's layer; give BuildContext the layer")
        return self.layer

    def require_group(self) -> RankGroup:
        """The group, for a part that cannot do without one."""
        if self.group is None:
            raise ValueError("this all-to-all needs a process group; give BuildContext a RankGroup")
        return self.group

    def require_activation(self) -> Activation:
        """The activation, for experts that apply it themselves."""
        if self.activation is None:
            raise ValueError("these experts need the activation; give BuildContext an Activation")
        return self.activation
