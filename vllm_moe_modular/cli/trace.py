"""`vllm-moe-modular trace FOLDER`: one page, readable offline, of what the experts of a served model did."""

import argparse
from pathlib import Path

from vllm_moe_modular.cli.trace_files import TraceError, read_traces


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may be chosen."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what VLLM_MOE_MODULAR_TRACE named")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="page to write (default FOLDER/trace.html)")


def run(options: argparse.Namespace) -> int:
    """Writes the page and says where it is."""
    try:
        from vllm_moe_modular.cli.trace_page import page
    except ImportError as error:
        why = " ".join(str(error).split())
        raise TraceError(f"matplotlib draws the page ({why}); pip install 'vllm-moe-modular[trace]'") from error
    traces = read_traces(options.folder)
    out = options.out or options.folder / "trace.html"
    try:
        out.write_text(page(traces, title=str(options.folder)), encoding="utf-8")
    except OSError as error:
        raise TraceError(f"cannot write {out}: {error.strerror}") from error
    samples = sum(len(trace.samples) for trace in traces)
    print(f"{out}: {samples} sampled calls of {len(traces[0].layers)} layers on {len(traces)} ranks")
    return 0
