import importlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import NoUsablePartError
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.problem import LAID_OUT, Device, Problem
from vllm_moe_modular.selection.registry import Part, PartKind, Registry
from vllm_moe_modular.selection.select import select

LAPTOP, H200 = Device(kind="cpu"), Device(kind="cuda", sm=90, peer_access=True)
SINGLE = Problem(num_experts=8, num_local_experts=8, top_k=2, hidden=64, intermediate=32)
DP2_EP = replace(SINGLE, num_local_experts=4, dp_size=2, ep_size=2)
TP2_EP = replace(SINGLE, num_local_experts=4, tp_size=2, ep_size=2)


def chosen(problem: Problem, device: Device = LAPTOP, **asked_for: str) -> str:
    return str(select(builtin_registry(), problem, device, missing={}, **asked_for).choice)


def batched_part() -> Part:
    return Part(
        name="batched", kind=PartKind.PREPARE_FINALIZE, target="m:C", activation_format=ActivationFormat.BATCHED,
        reduces=frozenset({"finalize"}), preference=1, summary="",
    )  # fmt: skip


def test_own_tokens_on_each_rank_are_sent() -> None:
    assert chosen(DP2_EP) == "torch + torch"


def test_tokens_that_all_ranks_have_are_not_sent() -> None:
    assert chosen(TP2_EP) == "local + torch"


def test_a_named_all_to_all_is_used_where_auto_would_not() -> None:
    assert chosen(TP2_EP, all2all="torch") == "torch + torch"
    assert chosen(TP2_EP, all2all="allgather") == "allgather + torch"


@pytest.mark.parametrize("missing", ["", LAID_OUT], ids=["before the weights are processed", "after"])
def test_auto_leaves_a_single_process_on_cpu_to_vllm_and_says_why(missing: str) -> None:
    """And what would run by name; each reason is said of the parts that it is about."""
    selection = select(builtin_registry(), replace(SINGLE, weights_missing=missing), LAPTOP)
    assert selection.choice is None
    assert selection.why_not.startswith("by name local + torch would run | ")
    assert " | torch: without expert parallelism vLLM's own CPU kernel is faster; name the part" in selection.why_not
    assert ", triton_batched, deep_gemm_batched: runs on cuda, this device is cpu | " in selection.why_not


def test_named_parts_run_a_single_process_on_cpu() -> None:
    assert chosen(SINGLE, all2all="local", experts="torch") == "local + torch"


def test_naming_only_the_all_to_all_does_not_smuggle_in_declined_experts() -> None:
    assert chosen(SINGLE, all2all="local") == "None"


def test_a_named_part_that_does_not_fit_is_never_replaced() -> None:
    selection = select(builtin_registry(), DP2_EP, LAPTOP, all2all="local")
    with pytest.raises(NoUsablePartError, match=r"no  local.*has its own tokens"):
        selection.require()


@pytest.mark.parametrize("device", [LAPTOP, H200], ids=str)
@pytest.mark.parametrize("problem", [SINGLE, DP2_EP, TP2_EP], ids=lambda problem: problem.serving)
def test_a_named_part_of_any_kind_is_taken_or_nothing_is(problem: Problem, device: Device) -> None:
    registry = builtin_registry()
    for all2all in ("auto", *(p.name for p in registry.of(PartKind.PREPARE_FINALIZE))):
        for experts in ("auto", *(p.name for p in registry.of(PartKind.EXPERTS))):
            choice = select(registry, problem, device, all2all=all2all, experts=experts, missing={}).choice
            if choice is not None:
                assert all2all in ("auto", choice.all2all.name)
                assert experts in ("auto", choice.experts.name)


def test_data_parallel_without_expert_parallel_says_enable_expert_parallel() -> None:
    selection = select(builtin_registry(), replace(SINGLE, dp_size=2), LAPTOP)
    assert "pass --enable-expert-parallel" in selection.why_not


def test_every_objection_is_reported() -> None:
    broken = replace(DP2_EP, lora=False, activation="situ", quant_scheme="Fp8MoEMethod")
    verdicts = select(builtin_registry(), broken, H200).verdicts[PartKind.EXPERTS]
    verdict = next(v for v in verdicts if v.part.name == "torch")
    assert len(verdict.objections) == 2
    assert len(verdict.reservations) == 1


def test_named_parts_of_our_own_run_on_a_gpu() -> None:
    assert chosen(DP2_EP, H200, all2all="nvlink", experts="triton") == "nvlink + triton"


def test_auto_leaves_a_gpu_to_vllm_and_says_why() -> None:
    selection = select(builtin_registry(), DP2_EP, H200, missing={})
    assert selection.choice is None
    assert "not yet compared with vLLM's kernels in a served model" in selection.why_not


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(NoUsablePartError, match=r"'deepep'.*known: auto, local, nvlink, deepep_auto, .*allgather"):
        select(builtin_registry(), DP2_EP, LAPTOP, all2all="deepep")


def test_a_module_that_another_rank_lacks_rules_the_part_out() -> None:
    registry = builtin_registry()
    torch_part = next(p for p in registry.of(PartKind.PREPARE_FINALIZE) if p.name == "torch")
    selection = select(registry, DP2_EP, LAPTOP, missing={torch_part.target: ["module deep_ep on ranks [1]"]})
    assert str(selection.choice) == "allgather + torch"
    assert "module deep_ep on ranks [1] is not installed" in selection.explain()


def test_formats_that_differ_are_not_paired() -> None:
    registry = builtin_registry()
    registry.add(batched_part())
    assert select(registry, DP2_EP, LAPTOP, all2all="batched").choice is None


@pytest.mark.parametrize(
    ("problem", "device", "says"),
    [
        (replace(DP2_EP, hosts=2), H200, "on 2 hosts, it reaches one"),
        (DP2_EP, replace(H200, peer_access=False), "cannot access each other's memory"),
        (replace(DP2_EP, dtype="float64"), H200, "dtype float64 is not one of bfloat16"),
        (DP2_EP, LAPTOP, "runs on cuda, this device is cpu"),
    ],
)
def test_nvlink_needs_one_host_with_peer_access(problem: Problem, device: Device, says: str) -> None:
    verdicts = select(builtin_registry(), problem, device, missing={}).verdicts[PartKind.PREPARE_FINALIZE]
    (why,) = next(v.objections for v in verdicts if v.part.name == "nvlink")
    assert says in why


@pytest.mark.parametrize(
    ("part", "problem", "says"),
    [
        ("deepep_high_throughput", replace(DP2_EP, cuda_graph=True), "cannot be captured in a CUDA graph"),
        (
            "deepep_high_throughput",
            replace(DP2_EP, dp_size=3, ep_size=3),
            "3 ranks share the experts, it takes 2, 4, 8",
        ),
        ("deepep_high_throughput", replace(DP2_EP, hidden=8192), "hidden size 8192 is more than 7936"),
        ("deepep_high_throughput", replace(DP2_EP, num_local_experts=129), "129 experts on a rank, it takes 128"),
        ("deepep_high_throughput", replace(DP2_EP, dp_size=16, ep_size=16, hosts=4), "16 ranks on 4 hosts"),
        ("deepep_low_latency", replace(DP2_EP, hidden=8200), "hidden size 8200 is more than 8192"),
        ("deepep_low_latency", replace(DP2_EP, top_k=12), "each token goes to 12 experts, it sends to 11 at most"),
        ("deepep_low_latency", replace(DP2_EP, router_weight_on_input=True), "it sends one row for all of them"),
        ("deepep_auto", replace(DP2_EP, dp_size=16, ep_size=16, hosts=2), "its two modes do not yet share NVSHMEM"),
        ("pplx", replace(DP2_EP, dtype="float32"), "dtype float32 is not one of bfloat16, float16"),
    ],
)
def test_native_all_to_alls_name_what_their_libraries_would_stop_at(part: str, problem: Problem, says: str) -> None:
    verdicts = select(builtin_registry(), problem, H200, missing={}).verdicts[PartKind.PREPARE_FINALIZE]
    (why,) = next(v.objections for v in verdicts if v.part.name == part)
    assert says in why


def test_an_all_to_all_of_two_has_experts_for_each() -> None:
    both = "deepep_auto + triton (small steps: deepep_low_latency + triton_batched)"
    assert chosen(DP2_EP, H200, all2all="deepep_auto", experts="triton") == both
    assert chosen(replace(DP2_EP, cuda_graph=True), H200, all2all="deepep_auto", experts="triton") == both


@pytest.mark.parametrize(
    ("problem", "experts", "says"),
    [
        (replace(DP2_EP, activation="silu_no_mul"), "torch", "triton_batched: activation silu_no_mul"),
        (DP2_EP, "vllm", "read the weights in vLLM's layout, as vllm does (triton_batched: it does not"),
    ],
    ids=["none have such an activation", "none read them where vLLM's own do"],
)
def test_without_experts_for_small_steps_an_all_to_all_of_two_is_refused(
    problem: Problem, experts: str, says: str
) -> None:
    selection = select(builtin_registry(), problem, H200, all2all="deepep_auto", experts=experts, missing={})
    with pytest.raises(NoUsablePartError) as refusal:
        selection.require()
    assert f"deepep_auto + {experts}: no experts take the batched rows of deepep_low_latency" in str(refusal.value)
    assert says in str(refusal.value)


def test_a_name_can_be_registered_once() -> None:
    registry = builtin_registry()
    with pytest.raises(ValueError, match="already registered"):
        registry.add(next(registry.of(PartKind.EXPERTS)))


def test_explain_is_stable_text() -> None:
    names = {"local", "nvlink", "torch"}
    registry = Registry()
    registry.add_all(p for kind in PartKind for p in builtin_registry().of(kind) if p.name in names)
    problem = replace(TP2_EP, activation="situ", quant_scheme="awq 4-bit")
    assert select(registry, problem, LAPTOP, all2all="torch", missing={}).explain().splitlines() == [
        "layer   8 experts, 4 on each rank, top 2; hidden 64, intermediate 32, situ; bfloat16, weights awq 4-bit",
        "served  TP 2, DP 1, EP 2; 1 host; up to 8192 tokens per rank and step",
        "device  cpu",
        "all-to-all (asked for: torch)",
        "   usable  local   no communication: one rank, or tokens that every rank already has",
        "       no  nvlink  runs on cuda, this device is cpu",
        "   usable  torch   every rank already has all tokens, sending them gains nothing; `local` does without",
        "experts (asked for: auto)",
        "       no  torch   the weights are quantised (awq 4-bit), it reads fp8, fp8 128x128, "
        "compressed-tensors float8, compressed-tensors float8 128x128; use the vllm experts",
        "                   activation situ is not one of silu, gelu, gelu_tanh, swigluoai, swigluoai_uninterleave, "
        "silu_no_mul, gelu_no_mul, relu2_no_mul; leave the layer to vLLM",
    ]


def test_explain_marks_the_chosen_pair_and_what_only_a_name_gets() -> None:
    told = select(builtin_registry(), TP2_EP, LAPTOP).explain()
    assert "chosen  local " in told
    assert "by name  torch " in told
    assert told.count("chosen") == 2


def test_two_parts_that_each_fit_alone_are_told_why_not_together() -> None:
    registry = builtin_registry()
    registry.add(batched_part())
    told = select(registry, DP2_EP, LAPTOP, all2all="batched").explain()
    assert "       no  batched + torch: batched delivers batched rows, torch takes standard ones" in told.splitlines()


def test_selecting_imports_no_torch_and_no_vllm() -> None:
    code = (
        "import sys, vllm_moe_modular.selection.select, vllm_moe_modular.selection.builtin as b; b.builtin_registry()"
    )
    code += "; print('torch' in sys.modules, 'vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


QWEN3_30B = replace(SINGLE, num_experts=128, num_local_experts=128, top_k=8, hidden=2048, intermediate=768)


@pytest.mark.parametrize("scheme", ["none", "fp8 128x128"])
def test_deep_gemm_runs_both_schemes_by_name(scheme: str) -> None:
    problem = replace(QWEN3_30B, quant_scheme=scheme)
    assert chosen(problem, H200, experts="deep_gemm") == "local + deep_gemm"


@pytest.mark.parametrize(
    ("more", "auto_takes"),
    [
        ({}, "local + triton"),
        ({"quant_scheme": "fp8 128x128"}, "None"),
        ({"dtype": "float16"}, "None"),
        ({"tp_size": 2, "ep_size": 2}, "None"),
    ],
)
def test_auto_on_a_gpu_takes_what_was_compared_in_a_served_model(more: dict[str, Any], auto_takes: str) -> None:
    assert chosen(replace(QWEN3_30B, **more), H200) == auto_takes


@pytest.mark.parametrize(
    ("problem", "device", "says"),
    [
        (replace(QWEN3_30B, quant_scheme="mxfp4"), H200, r"quantised \(mxfp4\), it reads fp8 128x128"),
        (replace(QWEN3_30B, intermediate=96), H200, "intermediate size 96 on a rank: it takes multiples of 64"),
        (replace(QWEN3_30B, quant_scheme="fp8 128x128", hidden=192), H200, "hidden size 192 .* multiples of 128"),
        (replace(QWEN3_30B, has_bias=True), H200, "biases, which it does not add"),
        (replace(QWEN3_30B, dtype="float16"), H200, "dtype float16 is not one of bfloat16"),
        (QWEN3_30B, replace(H200, sm=100), "compute capability 10.0 is not 9.0"),
        (QWEN3_30B, LAPTOP, "runs on cuda, this device is cpu"),
    ],
)
def test_deep_gemm_says_what_it_takes(problem: Problem, device: Device, says: str) -> None:
    verdicts = select(builtin_registry(), problem, device, missing={}).verdicts[PartKind.EXPERTS]
    (why,) = next(v.objections for v in verdicts if v.part.name == "deep_gemm")
    assert re.search(says, why)


def test_one_of_two_modules_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Found without importing the package that it lies in."""
    part = replace(batched_part(), requires=("outer_a.inner.lib or lib_b", "sys"))
    assert part.missing_modules() == ("outer_a.inner.lib or lib_b",)
    (tmp_path / "outer_a" / "inner").mkdir(parents=True)
    (tmp_path / "outer_a" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "outer_a" / "inner" / "lib.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert part.missing_modules() == ()
    (tmp_path / "outer_a" / "inner" / "lib.py").unlink()
    (tmp_path / "lib_b").mkdir()
    importlib.invalidate_caches()
    assert part.missing_modules() == ()


def test_a_missing_library_is_named_with_both_its_names() -> None:
    registry = builtin_registry()
    part = next(p for p in registry.of(PartKind.EXPERTS) if p.name == "deep_gemm")
    (_, library) = part.requires
    selection = select(registry, QWEN3_30B, H200, experts="deep_gemm", missing={part.target: [f"module {library}"]})
    with pytest.raises(NoUsablePartError, match=r"module vllm\.third_party\.deep_gemm or deep_gemm is not installed"):
        selection.require()


@pytest.mark.parametrize("name", ["triton", "triton_batched"])
@pytest.mark.parametrize(
    ("changes", "device", "says"),
    [
        ({}, Device(kind="cuda", sm=80), "no float8_e4m3fn on compute capability 8.0"),
        ({"dtype": "float32"}, H200, "fp8 weights with rows in float32"),
        ({"intermediate": 96}, H200, "intermediate 96 is not a multiple of 128"),
        ({"activation": "swigluoai"}, H200, "gates and ups lie interleaved"),
        ({"intermediate": 96, "quant_scheme": "fp8"}, H200, ""),
        ({"intermediate": 128}, H200, ""),
    ],
)
def test_what_experts_would_refuse_of_fp8_at_the_first_forward_is_said_before(
    name: str, changes: dict[str, Any], device: Device, says: str
) -> None:
    part = next(p for p in builtin_registry().of(PartKind.EXPERTS) if p.name == name)
    problem = replace(DP2_EP, **{"quant_scheme": "fp8 128x128", "dtype": "bfloat16", "intermediate": 256} | changes)
    objections = part.objections(problem, device)
    assert any(says in why for why in objections) if says else not objections
