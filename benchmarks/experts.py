"""`vllm-moe-modular bench experts` where the package is not installed: python -m benchmarks.experts."""

import sys

from vllm_moe_modular.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "experts", *sys.argv[1:]]))
