"""`vllm-moe-modular demo`: a tiny model on two expert-parallel ranks behind a real server, every token checked."""

import argparse
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_moe_modular.errors import MoEModularError

PROMPTS, MAX_TOKENS, RANKS = 8, 24, 2
SERVE_ARGS = ("-dp", str(RANKS), "--enable-expert-parallel", "--enforce-eager")
REPORT_DELAY_S = 1.0  # a rank writes its report at most every half second, and only while it runs a step
LOG_PREFIX = "moe_modular:"


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank reported: the parts of each layer, and rows counted per peer rank."""

    rank: int
    parts: tuple[str, ...]  # one "all-to-all + experts" per layer
    rows_sent: tuple[int, ...]  # per destination rank
    rows_received: tuple[int, ...]  # per source rank
    steps: int  # dispatches: one per layer and forward


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a served run says about itself: its own log lines, each once, and one report per rank."""

    log_lines: tuple[str, ...]
    ranks: tuple[RankFacts, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may be chosen."""
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the checkpoint, the log and the reports there")


def run(options: argparse.Namespace) -> int:
    """Runs the demo; 0 only if both ranks ran our parts and every token is the one that Hugging Face gives."""
    began = time.monotonic()
    with _workspace(options.keep) as folder:
        checkpoint, prompts, expected = _prepare(folder)
        served, facts = _serve(checkpoint, prompts, folder)
    same = [a == b for a, b in zip(served, expected, strict=True)]
    print("\n" + "\n".join(table(facts)))
    tokens = sum(a == b for x, y in zip(served, expected, strict=True) for a, b in zip(x, y, strict=True))
    print(f"\n{sum(same)} of {len(same)} prompts and {tokens} of {PROMPTS * MAX_TOKENS} tokens match Hugging Face")
    print(f"{time.monotonic() - began:.0f} s in all, after set-up")
    if objection := row_count_objection(facts, prompts):
        print(f"do not rely on the row counts: {objection}")
    if len(facts.ranks) != RANKS:
        print(f"only {len(facts.ranks)} of {RANKS} ranks reported parts of this package: stock vLLM ran the rest")
        return 1
    return 0 if all(same) else 1


@contextmanager
def _workspace(keep: Path | None) -> Iterator[Path]:
    """`keep`, refused if it holds anything, or a folder that is deleted; it stays and is named if a run fails."""
    if keep is not None:
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise MoEModularError(f"--keep {keep} exists and is not an empty folder; name a new one")
        keep.mkdir(parents=True, exist_ok=True)
    folder = keep or Path(tempfile.mkdtemp(prefix="moe-modular-demo-"))
    try:
        yield folder
    except (KeyboardInterrupt, ModuleNotFoundError):
        if keep is None:
            shutil.rmtree(folder)
        raise
    except Exception:
        print(f"the checkpoint, the log and the reports are in {folder}")
        raise
    if keep is None:
        shutil.rmtree(folder)


def _prepare(folder: Path) -> tuple[Path, list[list[int]], list[list[int]]]:
    """The checkpoint, the prompts and the tokens to expect."""
    from vllm_moe_modular.testing.checkpoints import FAMILIES, make_checkpoint
    from vllm_moe_modular.testing.reference_tokens import default_prompts, reference_tokens

    sizes = FAMILIES["qwen3_moe"].sizes
    print(
        f"making a Qwen3-MoE checkpoint: {sizes.layers} layers, {sizes.experts} experts, top-{sizes.top_k}", flush=True
    )
    checkpoint = make_checkpoint("qwen3_moe", folder / "checkpoint")
    prompts = default_prompts(PROMPTS)
    print(f"asking Hugging Face transformers for {PROMPTS} x {MAX_TOKENS} greedy tokens, float32", flush=True)
    return checkpoint, prompts, reference_tokens(checkpoint, prompts, MAX_TOKENS)


def _serve(checkpoint: Path, prompts: list[list[int]], folder: Path) -> tuple[list[list[int]], RunFacts]:
    """The served tokens, and what the server says about the run."""
    from vllm_moe_modular.testing.serving import Server

    traces, log = folder / "trace", folder / "server.log"
    env = {"VLLM_MOE_MODULAR": "1", "VLLM_MOE_MODULAR_TRACE": str(traces)}
    progress = lambda line: print(f"  {line}", flush=True)  # noqa: E731
    server = Server(checkpoint, *SERVE_ARGS, env=env, log_path=log, progress=progress)
    print(f"starting a server (30 to 60 s on two cores):\n  {server.shell_command}", flush=True)
    with server:
        print(f"ready after {server.ready_s:.0f} s; sending {len(prompts)} prompts at once", flush=True)
        tokens = server.complete(prompts, MAX_TOKENS)
        time.sleep(REPORT_DELAY_S)
        facts = read_run_facts(traces, log)
        print("all answered; ending the server, then comparing", flush=True)
    return tokens, facts


def read_run_facts(trace_dir: Path, log_path: Path) -> RunFacts:
    """Reads `rank{N}.json` of each rank that wrote one, in rank order, and this package's lines in the log."""
    ranks = []
    for record in (json.loads(file.read_text()) for file in trace_dir.glob("rank*.json")):
        parts = tuple(f"{layer['all2all']} + {layer['experts']}" for layer in record["layers"])
        rows = (tuple(record["rows_sent"]), tuple(record["rows_received"]))
        ranks.append(RankFacts(record["rank"], parts, *rows, steps=record["steps"]))
    log = log_path.read_text(errors="replace").splitlines()
    lines = dict.fromkeys(line[line.index(LOG_PREFIX) :] for line in log if LOG_PREFIX in line)
    return RunFacts(tuple(lines), tuple(sorted(ranks, key=lambda facts: facts.rank)))


def row_count_objection(facts: RunFacts, prompts: Sequence[Sequence[int]]) -> str | None:
    """Why the reported rows cannot be those of the whole run, in one sentence; None if they can.

    Every token but the last of each answer goes through every layer, and is sent to at least one rank there.
    """
    for here in facts.ranks:
        for there in facts.ranks:
            sent, received = here.rows_sent[there.rank], there.rows_received[here.rank]
            if sent != received:
                return f"rank {here.rank} sent {sent} rows to rank {there.rank}, which received {received}"
    layers = len(facts.ranks[0].parts) if facts.ranks else 0
    least = layers * sum(len(prompt) + MAX_TOKENS - 1 for prompt in prompts)
    sent = sum(sum(rank.rows_sent) for rank in facts.ranks)
    return f"{sent} rows were reported and the run sent at least {least}" if sent < least else None


def table(facts: RunFacts) -> list[str]:
    """The facts as lines of text: what the log said, then one row per rank and pair of parts."""
    peers = "/".join(str(facts.rank) for facts in facts.ranks)
    rows: list[Sequence[str]] = [
        ("rank", "all-to-all + experts", "layers", f"rows sent to {peers}", f"received from {peers}", "dispatches")
    ]
    for rank in facts.ranks:
        traffic = [" / ".join(map(str, counts)) for counts in (rank.rows_sent, rank.rows_received)]
        for parts, layers in Counter(rank.parts).items():
            rows.append((str(rank.rank), parts, str(layers), *traffic, str(rank.steps)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    note = "a row is one token at one layer; counted since start-up, so warm-up and the steps of an idle rank are in it"
    return [*facts.log_lines, "", *lines, note] if facts.ranks else list(facts.log_lines)
