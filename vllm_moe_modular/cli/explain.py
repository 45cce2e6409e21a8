"""`vllm-moe-modular explain MODEL`: which parts each MoE layer of a model would run on, and why not on the others.

Reads a `config.json` and nothing else: no GPU, no vLLM, no torch, no network.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.selection.from_config import LayerShape, problems_from_config
from vllm_moe_modular.selection.problem import Device
from vllm_moe_modular.selection.registry import PartKind, Registry
from vllm_moe_modular.selection.select import AUTO, Choice, Selection, select
from vllm_moe_modular.selection.third_party import full_registry

DEVICES: Mapping[str, Device] = {
    "h200": Device(kind="cuda", sm=90, peer_access=True),
    "h100": Device(kind="cuda", sm=90, peer_access=True),
    "a100": Device(kind="cuda", sm=80, peer_access=True),
    "b200": Device(kind="cuda", sm=100, peer_access=True),
    "cpu": Device(kind="cpu"),
}
"""By the name that users type; the GPUs as in servers whose GPUs are joined by NVLink."""

GPUS_PER_HOST = 8
DTYPES = ("auto", "bfloat16", "float16", "float32")


class ExplainError(MoEModularError, ValueError):
    """The command was asked about something that it cannot read, or that cannot be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may be asked; names are those of `vllm serve` where it has one."""
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of a model, or a config.json")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="data-parallel ranks (default 1)")
    parser.add_argument("--pcp", type=int, default=1, metavar="N", help="prefill-context-parallel ranks (default 1)")
    parser.add_argument("--no-ep", action="store_true", help="without --enable-expert-parallel")
    parser.add_argument("--gpu", required=True, metavar="DEVICE", help=f"one of {', '.join(DEVICES)}")
    parser.add_argument("--hosts", type=int, metavar="N", help=f"default: {GPUS_PER_HOST} GPUs on each")
    parser.add_argument("--all2all", default=AUTO, metavar="NAME", help="an all-to-all by name (default auto)")
    parser.add_argument("--experts", default=AUTO, metavar="NAME", help="an expert kernel by name (default auto)")
    parser.add_argument("--redundant-experts", type=int, default=0, metavar="N", help="of EPLB (default 0)")
    parser.add_argument("--dtype", default=AUTO, metavar="DTYPE", help=f"one of {', '.join(DTYPES)} (default auto)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="default 8192")
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the answer; 1 where a layer finds no parts, 0 where all do."""
    _check(options)
    config = read_config(options.model)
    shapes = problems_from_config(
        config,
        tp=options.tp,
        dp=options.dp,
        pcp=options.pcp,
        ep=not options.no_ep,
        redundant_experts=options.redundant_experts,
        dtype=options.dtype,
    )
    registry = full_registry()
    answers = [(shape, _select(registry, shape, options)) for shape in shapes]
    if options.json:
        print(json.dumps(as_json(options.model, config, answers, registry), indent=2))
    else:
        print("\n\n".join(as_text(options.model, config, answers, registry)))
    return 0 if all(selection.choice is not None for _, selection in answers) else 1


def read_config(model: Path) -> dict[str, Any]:
    """The configuration at `model`, a file or a folder with a config.json.

    Raises:
        ExplainError: there is none, or it is not a JSON object.
    """
    file = model
    try:
        file = model / "config.json" if model.is_dir() else model
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExplainError(
            f"{file} does not exist; give a model's folder on this machine, or its config.json, which 'hf download "
            "MODEL config.json' gets; nothing is downloaded here"
        ) from None
    except OSError as error:
        raise ExplainError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ExplainError(f"{file} is not JSON that can be read: {error}") from None
    if not isinstance(config, dict):
        raise ExplainError(f"{file} holds a JSON {type(config).__name__}; a config.json holds an object")
    return config


def outcome(selection: Selection) -> str:
    """What a server would do with such layers."""
    if selection.choice is not None:
        return f"run on {selection.choice}{_needing(selection.choice)}"
    named = [f"{kind.value} {name}" for kind, name in selection.asked_for.items() if name != AUTO]
    by_name = selection.by_name()
    if named:
        told = f"start-up stops: nothing runs them on {' and '.join(named)}"
        return told if by_name is None else f"{told} with what auto takes; {_asking_for(by_name)}"
    told = "left to vLLM: nothing fits that auto takes"
    return told if by_name is None else f"{told}; {_asking_for(by_name)}"


def _asking_for(choice: Choice) -> str:
    return f"--all2all {choice.all2all.name} --experts {choice.experts.name} would run{_needing(choice)}"


def _needing(choice: Choice) -> str:
    return f" (the server needs {', '.join(choice.needs)})" if choice.needs else ""


def as_text(
    model: Path, config: Mapping[str, Any], answers: list[tuple[LayerShape, Selection]], registry: Registry
) -> list[str]:
    """Paragraphs: the model, one for each distinct layer shape, and third parties' broken parts."""
    layers = sum(shape.layers for shape, _ in answers)
    told = [f"{model}: {config.get('model_type')}, {_count(layers, 'MoE layer')}, {_count(len(answers), 'shape')}"]
    for shape, selection in answers:
        head = f"{_count(shape.layers, 'MoE layer')} ({shape.which}): {outcome(selection)}"
        told.append(f"{head}\n{selection.explain()}")
    if registry.broken:
        told.append("\n".join(map(str, registry.broken)))
    return told


def as_json(
    model: Path, config: Mapping[str, Any], answers: list[tuple[LayerShape, Selection]], registry: Registry
) -> dict[str, Any]:
    """The same as data."""
    return {
        "model": str(model),
        "model_type": config.get("model_type"),
        "shapes": [
            {"layers": shape.layers, "which": shape.which, **selection_as_json(selection)}
            for shape, selection in answers
        ],
        "broken_parts": [{**asdict(b), "kind": b.kind.value} for b in registry.broken],
    }


def selection_as_json(selection: Selection) -> dict[str, Any]:
    """One selection, with every candidate."""
    choice = selection.choice
    candidates = {
        kind.value: [
            {
                "name": v.part.name,
                "provided_by": v.part.provided_by,
                "verdict": selection.mark(v),
                "objections": list(v.objections),
                "reservations": list(v.reservations),
            }
            for v in verdicts
        ]
        for kind, verdicts in selection.verdicts.items()
    }
    return {
        "outcome": outcome(selection),
        "choice": None if choice is None else _names(choice),
        "asked_for": {
            "all2all": selection.asked_for[PartKind.PREPARE_FINALIZE],
            "experts": selection.asked_for[PartKind.EXPERTS],
        },
        "problem": asdict(selection.problem),
        "device": asdict(selection.device),
        "candidates": candidates,
    }


def _names(choice: Choice) -> dict[str, Any]:
    told: dict[str, Any] = {"all2all": choice.all2all.name, "experts": choice.experts.name}
    return told if choice.small is None else {**told, "small_steps": _names(choice.small)}


def _check(options: argparse.Namespace) -> None:
    for name, least in (("tp", 1), ("dp", 1), ("pcp", 1), ("hosts", 1), ("redundant_experts", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ExplainError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if options.max_num_batched_tokens < 1:
        raise ExplainError(f"--max-num-batched-tokens is {options.max_num_batched_tokens}; it must be at least 1")
    for name, value, known in (("gpu", options.gpu, tuple(DEVICES)), ("dtype", options.dtype, DTYPES)):
        if value not in known:
            raise ExplainError(f"--{name} {value} is not known; known: {', '.join(known)}")
    ranks = options.tp * options.dp * options.pcp
    if options.hosts is not None and options.hosts > ranks:
        raise ExplainError(f"--hosts is {options.hosts}, and there are {ranks} ranks")


def _select(registry: Registry, shape: LayerShape, options: argparse.Namespace) -> Selection:
    device = DEVICES[options.gpu]
    on_gpu = device.kind == "cuda"
    ranks = options.tp * options.dp * options.pcp
    problem = replace(
        shape.problem,
        hosts=options.hosts or (-(-ranks // GPUS_PER_HOST) if on_gpu else 1),
        capacity_tokens=options.max_num_batched_tokens,
        cuda_graph=on_gpu and not options.enforce_eager,
    )
    named = {PartKind.PREPARE_FINALIZE: options.all2all, PartKind.EXPERTS: options.experts}
    if problem.cuda_graph and any(part.cannot_be_captured for part in registry.named(named)):
        problem = replace(problem, cuda_graph=False, between_graphs=True)  # as a server is then configured
    # What is installed on this machine says nothing of the one that is asked about.
    return select(registry, problem, device, all2all=options.all2all, experts=options.experts, missing={})


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s'[: number != 1]}"
