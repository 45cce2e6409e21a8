"""The activation as kernels with gates and ups take it."""

from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.kernels.gated_activation import GatedActivation
from vllm_moe_modular.modular.experts import Activation


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
