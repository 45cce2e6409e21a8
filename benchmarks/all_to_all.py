"""`vllm-moe-modular bench all-to-all` where the package is not installed: python -m benchmarks.all_to_all."""

import sys

from vllm_moe_modular.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "all-to-all", *sys.argv[1:]]))
