"""The tables of `docs/parts.md`, made from the registry and from what its checks say.

python -m vllm_moe_modular.selection.tables docs/parts.md
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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


SITUATIONS = (
    Situation("CPU, one rank", _problem(), _CPU),
    Situation("CPU, DP 2 with expert parallelism", _problem(dp=2), _CPU),
    Situation("CPU, TP 2 with expert parallelism", _problem(tp=2), _CPU),
    Situation("GPU, one rank", _problem(), _GPU),
    Situation("GPUs of one host, DP 2 with expert parallelism", _problem(dp=2), _GPU),
    Situation("the same, with CUDA graphs", _problem(dp=2, cuda_graph=True), _GPU),
    Situation("GPUs without peer access, DP 2", _problem(dp=2), Device(kind="cuda", sm=90)),
    Situation("GPUs of two hosts, DP 16", _problem(dp=16, hosts=2), _GPU),
    Situation("GPUs, TP 2 with expert parallelism", _problem(tp=2), _GPU),
    Situation("GPUs, TP 2 x DP 2, sequence parallel", _problem(tp=2, dp=2, sequence_parallel=True), _GPU),
    Situation("GPUs, DP 2 without expert parallelism", _problem(dp=2, ep=False), _GPU),
)


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the feature tables: what it changes in a problem that a part runs.

    Attributes:
        group: what the row is one choice of.
        kinds: of parts that it is a question for.
    """

    group: str
    name: str
    change: Callable[[Problem], Problem]
    kinds: tuple[PartKind, ...] = tuple(PartKind)


def _with(**fields: Any) -> Callable[[Problem], Problem]:
    return lambda problem: replace(problem, **fields)


def _two_hosts(problem: Problem) -> Problem:
    """8 ranks on each, of the kind that `problem` has."""
    there = replace(problem, hosts=2, ep_size=16, num_local_experts=problem.num_experts // 16)
    return replace(there, dp_size=16) if problem.dp_size > 1 else replace(there, tp_size=16)


def _redundant_experts(problem: Problem) -> Problem:
    more = 16
    local = (problem.num_experts + more) // problem.ep_size
    return replace(problem, eplb=True, num_experts=problem.num_experts + more, num_local_experts=local)


_ALL_TO_ALLS_ONLY = (PartKind.PREPARE_FINALIZE,)
_EXPERTS_ONLY = (PartKind.EXPERTS,)
_WEIGHTS = {
    "none": "unquantised",
    "fp8": "fp8, a scale per tensor or channel",
    "fp8 128x128": "fp8, scales of 128 x 128",
    "compressed-tensors float8": "compressed-tensors fp8",
    "compressed-tensors float8 128x128": "compressed-tensors fp8, scales of 128 x 128",
    "mxfp4": "mxfp4",
}
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "silu_no_mul", "gelu_no_mul", "relu2_no_mul")

FEATURES = (
    Feature("hosts", "several", _two_hosts, _ALL_TO_ALLS_ONLY),
    Feature("CUDA graphs", "captured", _with(cuda_graph=True)),
    *(Feature("dtype", f"`{name}`", _with(dtype=name)) for name in ("bfloat16", "float16", "float32")),
    *(Feature("weights", name, _with(quant_scheme=key), _EXPERTS_ONLY) for key, name in _WEIGHTS.items()),
    Feature("weights", "biases", _with(has_bias=True), _EXPERTS_ONLY),
    *(Feature("activation", f"`{name}`", _with(activation=name), _EXPERTS_ONLY) for name in _ACTIVATIONS),
    Feature("router", "weight on the input", _with(router_weight_on_input=True)),
    Feature("EPLB", "16 redundant experts", _redundant_experts),
    Feature("DBO", "two micro-batches", _with(micro_batches=True)),
    Feature("LoRA", "`--enable-lora`", _with(lora=True)),
    Feature("elastic EP", "`--enable-elastic-ep`", _with(elastic_ep=True)),
    Feature("prefill context", "parallel size 2", _with(pcp_size=2)),
)


def tables(registry: Registry) -> str:
    """All tables, as Markdown."""
    all2alls, experts = (list(registry.of(kind)) for kind in (PartKind.PREPARE_FINALIZE, PartKind.EXPERTS))
    told = ["## All-to-alls", *_parts(all2alls), "## Experts", *_parts(experts), "## Pairs", *_pairs(all2alls, experts)]
    for title, parts in (("Which all-to-all runs where", all2alls), ("Which experts run where", experts)):
        told += [f"## {title}", *_situations(parts)]
    for title, parts in (("What all-to-alls can do", all2alls), ("What experts can do", experts)):
        told += [f"## {title}", *_features(parts)]
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
    note = (
        "yes: they can be composed; format: one delivers rows in a format that the other does not take; weighted sum: "
        "they would both, or neither, do it."
    )
    rows = [(f"`{a.name}`", *(_pair_mark(a, e) for e in experts)) for a in all2alls]
    return [note, _table(("all-to-all", *(f"`{e.name}`" for e in experts)), rows)]


def _pair_mark(all2all: Part, experts: Part) -> str:
    if pair_objection(all2all, experts) is None:
        return "yes"
    return "weighted sum" if all2all.activation_format is experts.activation_format else "format"


def _situations(parts: Sequence[Part]) -> list[str]:
    note = (
        'yes: `auto` may choose it; "by name": it can, and `auto` leaves it out; "between graphs": it can where it is '
        "named, and MoE layers run between CUDA graphs; empty: it cannot. Without CUDA graphs (`--enforce-eager`) but "
        "where they are told of."
    )
    rows = [(s.name, *(_mark(p, s) for p in parts)) for s in SITUATIONS]
    return [note, _table(("", *(f"`{p.name}`" for p in parts)), rows)]


def _mark(part: Part, situation: Situation) -> str:
    if objections := part.objections(situation.problem, situation.device):
        between = part.cannot_be_captured
        return "between graphs" if between and all(why.startswith(between) for why in objections) else ""
    return "by name" if part.reservations(situation.problem, situation.device) else "yes"


def _features(parts: Sequence[Part]) -> list[str]:
    note = (
        "yes: it can, on a device and with ranks that it runs on; empty: it cannot, for a reason given below. What "
        "depends on the loaded layer, such as whether vLLM built a kernel that can be reused, is checked at start-up."
    )
    rows = [("format", "", *(p.activation_format.value for p in parts))]
    for feature in FEATURES:
        if parts[0].kind in feature.kinds:
            marks = ("" if _objections(p, feature) else "yes" for p in parts)
            rows.append((feature.group, feature.name, *marks))
    return [note, _table(("", "", *(f"`{p.name}`" for p in parts)), rows)]


def _objections(part: Part, feature: Feature) -> tuple[str, ...]:
    """Against `feature`, where the part runs without it."""
    base = next((s for s in (*_BASES, *SITUATIONS) if not part.objections(s.problem, s.device)), None)
    if base is None:
        return ("it runs nowhere",)
    return part.objections(feature.change(base.problem), base.device)


_BASES = (
    Situation("each rank has its own tokens", _problem(dp=2), _GPU),
    Situation("every rank has all tokens", _problem(tp=2), _GPU),
    Situation("weights in fp8", _problem(dp=2, quant_scheme="fp8 128x128"), _GPU),
)


def _reasons(parts: Sequence[Part]) -> list[str]:
    by_part = {part: _said(part) for part in parts}
    of_all = [reason for reason in by_part[parts[0]] if all(reason in said for said in by_part.values())]
    told = [_listed("every part", of_all)]
    for part, said in by_part.items():
        told.append(_listed(f"{part.kind.value} `{part.name}`", [reason for reason in said if reason not in of_all]))
    return told


def _said(part: Part) -> list[str]:
    """Each reason once, in the order of the tables."""
    said: dict[str, None] = {}
    for s in SITUATIONS:
        said.update(dict.fromkeys(part.objections(s.problem, s.device)))
        said.update(dict.fromkeys(f"`auto`: {reason}" for reason in part.reservations(s.problem, s.device)))
    for feature in FEATURES:
        if part.kind in feature.kinds:
            said.update(dict.fromkeys(_objections(part, feature)))
    return list(said)


def _listed(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, "", *(f"- {line}" for line in lines)])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell or ' ' for cell in line)} |" for line in lines)


def main(path: Path) -> None:
    """Bring the document at `path` up to date."""
    path.write_text(with_tables(path.read_text(encoding="utf-8"), tables(builtin_registry())), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
