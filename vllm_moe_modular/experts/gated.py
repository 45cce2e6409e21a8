"""The activation as kernels with gates and ups take it, and the weights that go with it."""

from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.kernels.gated_activation import GatedActivation
from vllm_moe_modular.modular.experts import Activation, ExpertWeights
from vllm_moe_modular.modular.fp8 import BLOCK


def gated(activation: Activation, *, experts: str) -> GatedActivation:
    """The activation for kernels that have gates and ups.

    Raises:
        UnsupportedError: it has no gate.
    """
    if not activation.kind.is_gated:
        raise UnsupportedError(
            f"activation {activation.kind.value} in the {experts} experts", instead="use the torch experts"
        )
    return GatedActivation(
        name=activation.kind.value,
        limit=activation.limit,
        alpha=activation.alpha,
        beta=activation.beta,
        interleaved=activation.interleaved,
    )


def require_whole_blocks(weights: ExpertWeights, activation: GatedActivation, where: str) -> None:
    """Check that no block of 128 x 128 with one scale holds both gates and ups.

    Args:
        where: who is asking, for the message: "the triton experts".

    Raises:
        UnsupportedError: one does.
    """
    F = weights.w2.shape[2]
    if activation.interleaved:
        raise UnsupportedError(
            f"w13 with gates and ups interleaved and a scale per 128 x 128 block in {where}",
            instead="use the torch experts",
        )
    if F % BLOCK:
        raise UnsupportedError(
            f"an intermediate size of {F} with a scale per 128 x 128 block in {where}",
            instead="use a multiple of 128 on each rank (a smaller tensor-parallel size), or the torch experts",
        )
