"""The gated activation between the two GEMMs, for the epilogue of the first.

With gate g and up u, each clamped first where a limit is set (g <= limit, -limit <= u <= limit):

    silu       g * sigmoid(g) * u
    gelu       g * (1 + erf(g / sqrt(2))) / 2 * u
    gelu_tanh  g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3))) / 2 * u
    swiglu_oai g * sigmoid(alpha * g) * (u + beta)

Reference: vllm_moe_modular.reference.gated_activation.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

NAMES = ("silu", "gelu", "gelu_tanh", "swiglu_oai")


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """An activation with its constants.

    Attributes:
        name: one of `NAMES`.
        limit: the clamp, or None.
        alpha, beta: of swiglu_oai.
        interleaved: column 2i is gate i and column 2i+1 up i; else all gates, then all ups.
    """

    name: str
    limit: float | None = None
    alpha: float = 1.702
    beta: float = 1.0
    interleaved: bool = False


@triton.jit
def _times_sigmoid(x, a, EXACT: tl.constexpr):
    """x * sigmoid(a)."""
    return tl.div_rn(x, 1.0 + tl.exp(-a)) if EXACT else x * tl.sigmoid(a)


@triton.jit
def gated_activation(
    gate,
    up,
    limit,
    alpha,
    beta,
    NAME: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    EXACT: tl.constexpr = False,
):
    """float32 in, float32 out.

    EXACT: for a result that is stored in float32. The division in `tl.sigmoid` is off by up to two units in the last
    place, which no narrower type shows.
    """
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if NAME == "silu":
        activated = _times_sigmoid(gate, gate, EXACT)
    elif NAME == "gelu":
        activated = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        # (1 + tanh(a)) / 2 = sigmoid(2 a); 2 * sqrt(2 / pi) = 1.5957691216057308
        activated = _times_sigmoid(gate, 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate), EXACT)
    else:
        tl.static_assert(NAME == "swiglu_oai", "unknown activation")
        activated = _times_sigmoid(gate, alpha * gate, EXACT)
        up += beta
    return activated * up
