"""Takes the MoE layers out of CUDA graphs for a part that those cannot capture; the rest of the model stays inside.

vLLM compiles a model in pieces, cut at its `splitting_ops`, and captures each piece by itself. MoE layers are one op of
vLLM's each: among the splitting ops they run between the pieces, as attention does.
"""

from collections.abc import Sequence
from typing import Any

from vllm.config import CompilationMode, CUDAGraphMode

from vllm_moe_modular.selection.registry import Part

MOE_OPS = ("vllm::moe_forward", "vllm::moe_forward_shared", "vllm::transformers_moe_forward")


def moe_is_outside_graphs(compilation: Any) -> bool:
    """Whether no graph captures a MoE layer, although graphs are captured.

    Args:
        compilation: vLLM's `CompilationConfig`.
    """
    in_pieces = compilation.cudagraph_mode == CUDAGraphMode.PIECEWISE
    return in_pieces and set(MOE_OPS) <= set(compilation.splitting_ops or ())


def take_moe_out_of_graphs(compilation: Any, parts: Sequence[Part]) -> str:
    """Change `compilation` if graphs would capture one of `parts` that they cannot, and if it is compiled in pieces.

    Returns:
        What was changed and why, for the log; empty: nothing.
    """
    reasons = [f"{part.kind.value} {part.label} {why}" for part in parts if (why := part.cannot_be_captured)]
    in_pieces = (
        compilation.mode == CompilationMode.VLLM_COMPILE
        and not compilation.use_inductor_graph_partition
        and compilation.splitting_ops_contain_attention()
    )
    captures = compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE)
    if not (reasons and in_pieces and captures) or moe_is_outside_graphs(compilation):
        return ""
    missing = [op for op in MOE_OPS if op not in compilation.splitting_ops]
    compilation.splitting_ops = [*compilation.splitting_ops, *missing]
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    return (
        f"MoE layers run outside CUDA graphs, the rest inside (splitting_ops with {', '.join(MOE_OPS)}, cudagraph_mode "
        f"PIECEWISE): {'; '.join(reasons)}"
    )
