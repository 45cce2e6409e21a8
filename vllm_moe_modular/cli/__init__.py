"""The command line, `vllm-moe-modular`. Importing this imports neither torch nor vllm."""
