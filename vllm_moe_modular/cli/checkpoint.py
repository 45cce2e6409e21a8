"""`vllm-moe-modular checkpoint FAMILY OUT`: a tiny checkpoint for `vllm serve`, made offline in seconds."""

import argparse
import shlex
from pathlib import Path

from vllm_moe_modular.testing.checkpoints import FAMILIES, QUANTIZATIONS, CheckpointError, dequantise, make_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may be chosen; a size that is left out is the family's own."""
    parser.add_argument("family", metavar="FAMILY", help=f"one of {', '.join(sorted(FAMILIES))}")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument("--hidden", type=int, metavar="N", help="hidden size")
    parser.add_argument("--intermediate", type=int, metavar="N", help="intermediate size of one expert")
    parser.add_argument("--experts", type=int, metavar="N", help="routed experts per layer")
    parser.add_argument("--top-k", type=int, metavar="N", help="experts per token")
    parser.add_argument("--layers", type=int, metavar="N", help="decoder layers")
    parser.add_argument(
        "--quantization", metavar="KIND", help=f"quantise the routed experts: one of {', '.join(sorted(QUANTIZATIONS))}"
    )
    parser.add_argument(
        "--twin", type=Path, metavar="DIR", help="also write the quantised model unquantised, in float32"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the weights (default 0)")
    parser.add_argument("--force", action="store_true", help="replace what OUT holds")


def run(options: argparse.Namespace) -> int:
    """Makes the checkpoint and prints where it is and how to serve it."""
    if options.twin and not options.quantization:
        raise CheckpointError("--twin is the unquantised twin of a quantised checkpoint; name its --quantization too")
    out = make_checkpoint(
        options.family,
        options.out,
        hidden=options.hidden,
        intermediate=options.intermediate,
        experts=options.experts,
        top_k=options.top_k,
        layers=options.layers,
        quantization=options.quantization,
        seed=options.seed,
        force=options.force,
    )
    dtype = "bfloat16" if options.quantization else "float32"
    weights = f"{options.quantization} and bfloat16" if options.quantization else dtype
    print(f"{out}: {options.family}, {_size_mb(out):.1f} MB, {weights}")
    print(f"serve it: VLLM_MOE_MODULAR=1 vllm serve {shlex.quote(str(out))} --dtype {dtype}")
    print("on a CPU put VLLM_CPU_KVCACHE_SPACE=1 in front: GiB of KV cache, else it takes most of the memory")
    if options.twin:
        twin = dequantise(out, options.twin, force=options.force)
        print(f"{twin}: the same weights unquantised, {_size_mb(twin):.1f} MB, float32")
    return 0


def _size_mb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6
