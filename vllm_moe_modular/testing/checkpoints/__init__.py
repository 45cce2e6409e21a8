"""Tiny mixture-of-experts checkpoints, made offline in seconds: random weights of which every expert matters.

    make_checkpoint("qwen3_moe", Path("/tmp/tiny"), experts=16, seed=1)

Importing this imports neither torch nor transformers.
"""

from vllm_moe_modular.testing.checkpoints.families import FAMILIES, CheckpointError, Family
from vllm_moe_modular.testing.checkpoints.make import make_checkpoint

__all__ = ["FAMILIES", "CheckpointError", "Family", "make_checkpoint"]
