"""`vllm-moe-modular bench WHAT`: a benchmark on the GPUs of this machine, everything in turns on the same inputs."""

import argparse
from importlib import import_module
from pathlib import Path

from vllm_moe_modular.bench.all_to_all_cases import HIDDEN, MODES
from vllm_moe_modular.bench.all_to_all_cases import TOKENS as T_OF_RANK
from vllm_moe_modular.bench.shapes import FP8_MODELS, SHAPES, TOKENS

ROUNDS, SEEDS = 15, 20
MODULES = {"experts": "vllm_moe_modular.cli.bench_experts", "all-to-all": "vllm_moe_modular.cli.bench_all_to_all"}
"""By benchmark, what is imported to run it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may be measured, and how."""
    choices = parser.add_subparsers(dest="benchmark", metavar="WHAT", required=True)
    summary = "our experts against vLLM's kernels, DeepGEMM, triton_kernels and plain torch, on one GPU"
    _add_experts(choices.add_parser("experts", help=summary, description=summary))
    summary = (
        "dispatch and combine of all-to-alls over the GPUs of this machine, beside their libraries called directly"
    )
    _add_all_to_all(choices.add_parser("all-to-all", help=summary, description=summary))


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark that was named."""
    return int(import_module(MODULES[options.benchmark]).run(options))


def _add_experts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines are appended to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture to write: .svg, .png or .pdf")
    parser.add_argument(
        "--read", type=Path, nargs="+", metavar="FILE", help="measure nothing; tell of these JSON lines of earlier runs"
    )
    parser.add_argument(
        "--models", nargs="+", metavar="NAME",
        help=f"of {', '.join(SHAPES)} (default all; with --fp8 {' and '.join(FP8_MODELS)})",
    )  # fmt: skip
    tokens = " ".join(map(str, TOKENS))
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=list(TOKENS), metavar="M", help=f"of a call (default {tokens})"
    )
    parser.add_argument("--candidates", nargs="+", metavar="NAME", help="what runs (default everything)")
    parser.add_argument("--fp8", action="store_true", help="weights in fp8 with a scale per 128 x 128 block")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"replays of each (default {ROUNDS})")
    parser.add_argument("--seconds", type=float, metavar="S", help="no shape is begun later than this")
    parser.add_argument("--tuned", metavar="FOLDER", help="tuned tables that go before those of the package")
    parser.add_argument(
        "--accuracy", action="store_true", help="time nothing; compare with float64 over many seeds; 1 if too far off"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"of --accuracy (default {SEEDS})")


def _add_all_to_all(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines are appended to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture to write: .svg, .png or .pdf")
    parser.add_argument(
        "--read", type=Path, nargs="+", metavar="FILE", help="measure nothing; tell of these JSON lines of earlier runs"
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="GPUs (default 2)")
    hidden, tokens = " ".join(map(str, HIDDEN)), " ".join(map(str, T_OF_RANK))
    parser.add_argument(
        "--hidden", type=int, nargs="+", default=list(HIDDEN), metavar="H", help=f"hidden sizes (default {hidden})"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(T_OF_RANK), metavar="T",
        help=f"tokens of each rank (default {tokens})",
    )  # fmt: skip
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="what runs (default everything)")
    parser.add_argument(
        "--mode", nargs="+", default=list(MODES), metavar="MODE", help=f"{' or '.join(MODES)} (default both)"
    )
    parser.add_argument("--fp8", action="store_true", help="dispatch with rows in fp8 too, where a peer sends them")
    parser.add_argument(
        "--shared-gpu", action="store_true", help="ranks may share a GPU: whether it is right; times mean nothing"
    )
