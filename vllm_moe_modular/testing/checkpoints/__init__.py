"""Tiny mixture-of-experts checkpoints, made offline in seconds: random weights of which every expert matters.

    make_checkpoint("qwen3_moe", Path("/tmp/tiny"), experts=16, seed=1)
    make_checkpoint("qwen3_moe", Path("/tmp/fp8"), quantization="fp8_block")
    dequantise(Path("/tmp/fp8"), Path("/tmp/twin"))

Importing this imports neither torch nor transformers.
"""

from vllm_moe_modular.testing.checkpoints.families import FAMILIES, CheckpointError, Family
from vllm_moe_modular.testing.checkpoints.make import dequantise, make_checkpoint
from vllm_moe_modular.testing.checkpoints.quantization import QUANTIZATIONS

__all__ = ["FAMILIES", "QUANTIZATIONS", "CheckpointError", "Family", "dequantise", "make_checkpoint"]
