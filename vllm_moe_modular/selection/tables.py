"""The tables of `docs/parts.md`, made from the registry and from what its checks say.

python -m vllm_moe_modular.selection.tables docs/parts.md
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import Part, PartKind, Registry
from vllm_moe_modular.selection.select import pair_objection

BEGIN = "<!-- made by python -m vllm_moe_modular.selection.tables; do not edit up to the end mark -->"
END = "<!-- end of what is made -->"


@dataclass(frozen=True, slots=True)
class Situation:
    """A row of the tables: one problem on one device."""

    name: str
    problem: Problem
    device: Device


_GPU = Device(kind="cuda", sm=90, peer_access=True)
_CPU = Device(kind="cpu")


def _problem(*, tp: int = 1, dp: int = 1, ep: bool = True, **more: Any) -> Problem:
    ranks = tp * dp if ep else 1
    shape: dict[str, Any] = {
        "num_experts": 128,
        "num_local_experts": 128 // ranks,
        "top_k": 8,
        "hidden": 2048,
        "intermediate": 768,
    }
    return Problem(**shape, tp_size=tp, dp_size=dp, ep_size=ranks, **more)


_FP8: dict[str, Any] = {"quant_scheme": "fp8 128x128"}
_GPT_OSS: dict[str, Any] = {"quant_scheme": "mxfp4", "activation": "swigluoai", "has_bias": True}

SITUATIONS = (
    Situation("CPU, one rank", _problem(), _CPU),
    Situation("CPU, DP 2 with expert parallelism", _problem(dp=2), _CPU),
    Situation("CPU, TP 2 with expert parallelism", _problem(tp=2), _CPU),
    Situation("GPU, one rank", _problem(), _GPU),
    Situation("GPUs of one host, DP 2 with expert parallelism", _problem(dp=2), _GPU),
    Situation("the same, with CUDA graphs", _problem(dp=2, cuda_graph=True), _GPU),
    Situation("the same, float32", _problem(dp=2, cuda_graph=True, dtype="float32"), _GPU),
    Situation("GPUs without peer access, DP 2", _problem(dp=2), Device(kind="cuda", sm=90)),
    Situation("GPUs of two hosts, DP 16", _problem(dp=16, hosts=2), _GPU),
    Situation("GPUs, TP 2 with expert parallelism", _problem(tp=2), _GPU),
    Situation("GPUs, TP 2 x DP 2, sequence parallel", _problem(tp=2, dp=2, sequence_parallel=True), _GPU),
    Situation("GPUs, DP 2 without expert parallelism", _problem(dp=2, ep=False), _GPU),
    Situation("fp8 128x128 weights", _problem(dp=2, **_FP8), _GPU),
    Situation("mxfp4 weights, biases, swigluoai", _problem(dp=2, **_GPT_OSS), _GPU),
    Situation("router weight on the input", _problem(dp=2, router_weight_on_input=True), _GPU),
    Situation("LoRA", _problem(dp=2, lora=True), _GPU),
    Situation("prefill context parallelism", _problem(dp=2, pcp_size=2), _GPU),
)


def tables(registry: Registry) -> str:
    """All tables, as Markdown."""
    all2alls, experts = (list(registry.of(kind)) for kind in (PartKind.PREPARE_FINALIZE, PartKind.EXPERTS))
    told = ["## All-to-alls", *_parts(all2alls), "## Experts", *_parts(experts), "## Pairs", *_pairs(all2alls, experts)]
    for title, parts in (("Which all-to-all runs where", all2alls), ("Which experts run where", experts)):
        told += [f"## {title}", *_situations(parts)]
    told += ["## What each says where it does not run", *_reasons([*all2alls, *experts])]
    return "\n\n".join(told)


def with_tables(document: str, made: str) -> str:
    """`document` with `made` between the marks.

    Raises:
        ValueError: it lacks a mark.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the document needs these two lines: {BEGIN} and {END}")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def _parts(parts: Sequence[Part]) -> list[str]:
    head = ["name", "format", "weight and reduce by", "needs", "for"]
    rows = [
        [f"`{p.name}`", p.activation_format.value, " or ".join(sorted(p.reduces)), ", ".join(p.requires), p.summary]
        for p in parts
    ]
    if any(p.kind is PartKind.EXPERTS for p in parts):
        head.append("takes rows in fp8 with")
        rows = [[*row, ", ".join(p.fp8_rows)] for row, p in zip(rows, parts, strict=True)]
    return [_table(head, rows)]


def _pairs(all2alls: Sequence[Part], experts: Sequence[Part]) -> list[str]:
    rows = [(f"`{a.name}`", *(pair_objection(a, e) or "yes" for e in experts)) for a in all2alls]
    return [_table(("all-to-all", *(f"`{e.name}`" for e in experts)), rows)]


def _situations(parts: Sequence[Part]) -> list[str]:
    note = 'yes: `auto` may choose it; "by name": it can, and `auto` leaves it out; empty: it cannot.'
    rows = [(s.name, *(_mark(p, s) for p in parts)) for s in SITUATIONS]
    return [note, _table(("", *(f"`{p.name}`" for p in parts)), rows)]


def _mark(part: Part, situation: Situation) -> str:
    if part.objections(situation.problem, situation.device):
        return ""
    return "by name" if part.reservations(situation.problem, situation.device) else "yes"


def _reasons(parts: Sequence[Part]) -> list[str]:
    told = []
    for part in parts:
        said: dict[str, None] = {}
        for s in SITUATIONS:
            for reason in part.objections(s.problem, s.device):
                said.setdefault(reason)
            for reason in part.reservations(s.problem, s.device):
                said.setdefault(f"`auto`: {reason}")
        told.append("\n".join([f"{part.kind.value} `{part.name}`", "", *(f"- {reason}" for reason in said)]))
    return told


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell or ' ' for cell in line)} |" for line in lines)


def main(path: Path) -> None:
    """Bring the document at `path` up to date."""
    path.write_text(with_tables(path.read_text(encoding="utf-8"), tables(builtin_registry())), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
