"""Prints, as JSON, what vLLM's own parser of `vllm serve` makes of argument lists. A process of its own imports vLLM.

echo '[["MODEL", "-dp", "2"]]' | python tests/examples/parse_serve.py
"""

import json
import sys
from typing import Any


def parse(arguments: list[list[str]]) -> list[dict[str, Any]]:
    """One object for each list of arguments; argparse ends the process at the first that it does not take."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    fields = (
        "model_tag", "model", "data_parallel_size", "data_parallel_size_local", "data_parallel_start_rank",
        "data_parallel_address", "headless", "tensor_parallel_size", "enable_expert_parallel", "enforce_eager",
        "dtype", "additional_config",
    )  # fmt: skip
    found = []
    for given in arguments:
        args = parser.parse_args(["serve", *given])
        kv_transfer = args.kv_transfer_config
        roles = {"kv_connector": kv_transfer.kv_connector, "kv_role": kv_transfer.kv_role} if kv_transfer else {}
        found.append({field: getattr(args, field) for field in fields} | roles)
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(parse(json.load(sys.stdin))))
