"""`vllm-moe-modular checkpoint FAMILY OUT`: a tiny checkpoint for `vllm serve`, made offline in seconds."""

import argparse
import shlex
from pathlib import Path

from vllm_moe_modular.testing.checkpoints import FAMILIES, make_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may be chosen; a size that is left out is the family's own."""
    parser.add_argument("family", metavar="FAMILY", help=f"one of {', '.join(sorted(FAMILIES))}")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument("--hidden", type=int, metavar="N", help="hidden size")
    parser.add_argument("--intermediate", type=int, metavar="N", help="intermediate size of one expert")
    parser.add_argument("--experts", type=int, metavar="N", help="routed experts per layer")
    parser.add_argument("--top-k", type=int, metavar="N", help="experts per token")
    parser.add_argument("--layers", type=int, metavar="N", help="decoder layers")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the weights (default 0)")
    parser.add_argument("--force", action="store_true", help="replace what OUT holds")


def run(options: argparse.Namespace) -> int:
    """Makes the checkpoint and prints where it is and how to serve it."""
    out = make_checkpoint(
        options.family,
        options.out,
        hidden=options.hidden,
        intermediate=options.intermediate,
        experts=options.experts,
        top_k=options.top_k,
        layers=options.layers,
        seed=options.seed,
        force=options.force,
    )
    size_mb = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"{out}: {options.family}, {size_mb:.1f} MB, float32")
    print(f"serve it: vllm serve {shlex.quote(str(out))} --dtype float32")
    return 0
