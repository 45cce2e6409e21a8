"""`vllm-moe-modular`: one parser, and one line below for each subcommand.

A subcommand is a module with two functions: `add_arguments(parser)`, which imports nothing heavy, and `run(options)`,
which returns the exit status. Errors that this package raises on purpose are one message on stderr and status 2, and so
is a module of somebody else that is not installed.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.version import __version__

PROGRAM = "vllm-moe-modular"


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A subcommand's name, the module that holds it, and its line in `--help`."""

    name: str
    module: str
    help: str


SUBCOMMANDS = (
    Subcommand("checkpoint", "vllm_moe_modular.cli.checkpoint", "make a tiny mixture-of-experts checkpoint, offline"),
    Subcommand("explain", "vllm_moe_modular.cli.explain", "say which parts a model's layers would run on, and why"),
    Subcommand("doctor", "vllm_moe_modular.cli.doctor", "say what is installed here, what works and what does not"),
    Subcommand(
        "conformance", "vllm_moe_modular.cli.conformance", "say whether a part keeps its contract, on real ranks"
    ),
    Subcommand("bench", "vllm_moe_modular.cli.bench", "measure experts or all-to-alls on the GPUs of this machine"),
    Subcommand("tune", "vllm_moe_modular.cli.tune", "make a tuned table for the GPU of this machine"),
    Subcommand("trace", "vllm_moe_modular.cli.trace", "draw a page of what the experts of a served model did"),
    Subcommand("demo", "vllm_moe_modular.cli.demo", "serve a tiny model on two ranks and compare every token"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses `argv` (default: the command line), runs the subcommand and returns its exit status; without one 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = _parser(arguments)
        if not arguments:
            parser.print_help(sys.stderr)
            return 2
        options = parser.parse_args(arguments)
        status = int(importlib.import_module(options.module).run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads has seen enough; nothing may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "vllm_moe_modular"):  # a bug of ours
            raise
        print(
            f"{PROGRAM} {arguments[0]} needs the module {missing}, which is not installed here; "
            "`./dev setup` in a clone of the repository makes an environment with everything",
            file=sys.stderr,
        )
        return 2
    except MoEModularError as error:
        print(f"{PROGRAM} {arguments[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The whole parser; only the module of the subcommand that was typed is imported."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Modular mixture-of-experts kernels for stock vLLM.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    choices = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    for subcommand in SUBCOMMANDS:
        chosen = choices.add_parser(subcommand.name, help=subcommand.help, description=subcommand.help)
        chosen.set_defaults(module=subcommand.module)
        if subcommand.name in arguments[:1]:
            importlib.import_module(subcommand.module).add_arguments(chosen)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
