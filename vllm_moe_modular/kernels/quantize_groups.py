"""Groups of 128 columns as float8_e4m3fn with one scale each: what DeepSeek's checkpoints want of the activations.

    scale[g] = max(|x[g, :]|, 1e-10) / 448
    q[g, :] = round(x[g, :] * (448 / max(|x[g, :]|, 1e-10)))

448 is the largest number of float8_e4m3fn, 128 the block of the checkpoint format. One division for a group: one for
each element would take as long as the memory does.

Reference: vllm_moe_modular.reference.quantize_groups.
"""

import triton
import triton.language as tl

GROUP = 128


@triton.jit
def quantize_groups(x):
    """[G, 128] float32 to ([G, 128] float8_e4m3fn, [G] float32)."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-10)
    return (x * tl.div_rn(448.0, largest)[:, None]).to(tl.float8e4nv), tl.div_rn(largest, 448.0)
