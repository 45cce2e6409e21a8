"""Every part that runs on a CPU keeps its contract. The list comes from the registry: a new part needs no edit."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.faulty_parts import SendsFp8, WeighsAtHome
from vllm_moe_modular.cli.main import main
from vllm_moe_modular.errors import MoEModularError, NoUsablePartError
from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.experts import Activation, ActivationKind
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.registry import Part, PartKind
from vllm_moe_modular.testing.conformance import DTYPES, check_experts, check_part, check_prepare_finalize
from vllm_moe_modular.testing.conformance.for_pytest import ExpertsConformance, PrepareFinalizeConformance
from vllm_moe_modular.testing.conformance.plain_experts import PlainBatchedExperts
from vllm_moe_modular.testing.conformance.prepare_finalize_cases import KILLED, RANDOM_STEPS_CASE
from vllm_moe_modular.testing.conformance.run import case_names, objections, schemes_of
from vllm_moe_modular.testing.ranks import Ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_all_to_all"
PARTS = [part for kind in PartKind for part in builtin_registry().of(kind)]


def runs_here(part: Part) -> bool:
    return (
        not part.missing_modules()
        and not part.per_layer
        and any(not objections(part, 2, "cpu", dtype) for dtype in DTYPES)
    )


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.kind.value} {part.name}")
def test_ours_keep_their_contract(part: Part, ranks_of: Callable[[int], Ranks]) -> None:
    size = 2 if part.kind is PartKind.PREPARE_FINALIZE else 1
    if not runs_here(part):
        with pytest.raises(NoUsablePartError, match=f"{part.kind.value} {part.name} (cannot be tried on cpu|needs)"):
            check_part(part)
        return
    report = check_part(part, ranks=ranks_of(size))
    report.require()
    schemes = schemes_of(part, "cpu") if part.kind is PartKind.EXPERTS else []
    names = case_names(part.kind, size, "cpu", schemes=schemes, fp8_rows=part.fp8_rows)
    assert report.passed == names


class TestTorchExperts(ExpertsConformance):
    """As a package's own tests would have it."""

    part = TorchExperts
    schemes = ("fp8", "fp8 128x128")
    fp8_rows = ("fp8", "fp8 128x128")


class TestBatchedExperts(ExpertsConformance):
    """Of this format none of ours runs on a CPU."""

    part = PlainBatchedExperts


class TestSendsRowsInFp8(PrepareFinalizeConformance):
    """None of ours that runs on a CPU does."""

    part = SendsFp8


def test_an_all_to_all_that_weighs_at_home_keeps_its_contract(ranks_of: Callable[[int], Ranks]) -> None:
    """None of ours does; those that the kit is for may."""
    cases = [
        name for name in case_names(PartKind.PREPARE_FINALIZE, 2, "cpu") if name not in (KILLED, RANDOM_STEPS_CASE)
    ]
    check_prepare_finalize(WeighsAtHome.build, cases=cases, ranks=ranks_of(2)).require()


def test_the_example_keeps_its_contract(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    status = main(["conformance", "example_broadcast:BroadcastPrepareAndFinalize"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "all-to-all example_broadcast:BroadcastPrepareAndFinalize on 2 ranks (cpu): 0 of" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "no part is called 'nowhere'; known: all-to-all: local,"),
        (["nowhere:Class"], "nowhere:Class cannot be imported"),
        (["pathlib:Path"], "pathlib:Path is neither a PrepareAndFinalize nor a PermuteExpertsUnpermute"),
        (["torch", "--ranks", "1"], "--ranks is 1; an all-to-all is tried on two or more"),
        (["torch", "--device", "tpu"], "--device tpu is not known; known: cpu, cuda"),
        (["nvlink"], "all-to-all nvlink cannot be tried on cpu: runs on cuda, this device is cpu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments == ["nvlink"]:
        pytest.importorskip("triton")
    assert main(["conformance", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert says in printed


def test_a_case_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(MoEModularError, match="no case is called 'speed'; there are: rows arrive bitwise, "):
        check_prepare_finalize(WeighsAtHome.build, cases=["speed"])


def test_a_terminal_is_told_which_case_runs(
    ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    check_experts(TorchExperts.build, cases=["no rows", "biases"], ranks=ranks_of(1)).require()
    assert capsys.readouterr().err == "\r\x1b[Kcase 1 of 2\r\x1b[Kcase 2 of 2\r\x1b[K"


@pytest.mark.parametrize(
    ("activation", "says"),
    [
        (Activation(kind=ActivationKind.GELU), "activation gelu"),
        (Activation(kind=ActivationKind.SILU, limit=7.0), "activation silu, limit 7.0"),
        (
            Activation(kind=ActivationKind.SWIGLU_OAI, limit=7.0, beta=0.0, interleaved=True),
            "activation swiglu_oai, limit 7.0, beta 0.0, interleaved",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_names_an_activation_in_words(activation: Activation, says: str) -> None:
    assert str(activation) == says
