"""Modular mixture-of-experts kernels for stock vLLM. Importing this imports neither torch nor vllm."""

from vllm_moe_modular.version import __version__

__all__ = ["__version__"]
