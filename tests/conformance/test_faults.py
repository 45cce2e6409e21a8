"""The kit finds every planted fault and names the case; in parts without a fault it finds nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance import faulty_parts as faulty
from vllm_moe_modular.testing.conformance import NotConformingError, check_experts, check_prepare_finalize
from vllm_moe_modular.testing.ranks import Ranks

Start = Callable[[int], Ranks]

ALL_TO_ALLS = [
    (faulty.WeighsTwice, "one token on each rank", "max error"),
    (faulty.UsesDispatchedIds, "as many tokens on every rank", "max error"),
    (faulty.ReadsTheExpertMapAtMinusOne, "some ids of -1", "NaN in the result"),
    (faulty.LeavesTokensWithoutExpertsUnwritten, "all ids of -1", "NaN in the result"),
    (faulty.WritesToItsInput, "ragged ranks", "it writes to its input: x is not what it was when the shared experts"),
    (faulty.NamesExpertsByGlobalIds, "rows arrive bitwise", "as local ones, this rank holds 4"),
    (faulty.MixesTickets, "two calls in flight, finalized in another order", ""),
    (faulty.DropsAnExpertNamedTwice, "an expert named twice by a token", "max error"),
    (faulty.CountsExpertsInABytes, "300 experts", "max error"),
    (faulty.SendsHalfPrecision, "rows arrive bitwise", "did not arrive as sent"),
    (
        faulty.MixesScales,
        "experts that take rows in fp8: they arrive quantised, or bitwise",
        "did not arrive as sent (quantised, with their scales",
    ),
    (faulty.MixesScales, "experts that take rows in fp8: the layer", "max error"),
    (
        faulty.SendsFp8Unasked,
        "experts that take rows in fp8 beside experts that do not",
        "it sends rows in fp8 to experts that did not ask for them",
    ),
    (faulty.FailsOnOneRank, "some ids of -1", "rank 1: raised LookupError: no room for rank 1"),
]
EXPERTS = [
    (faulty.IgnoresRouterWeightOnInput, "router weight on the input of one expert", "max error"),
    (faulty.MultipliesByZero, "rows without an expert", "NaN of a row without an expert shows"),
    (faulty.CountsOnZeroedScratch, "a batch", "NaN in the result"),
    (faulty.ScalesItsRowsInPlace, "one row", "it writes to its input"),
    (faulty.CountsAnExpertNamedTwiceOnce, "an expert named twice by a row", "max error"),
    (faulty.IgnoresScalesOfRows, "rows in fp8, weights in fp8 128x128", "max error"),
    (faulty.TakesScalesToLieInRows, "rows in fp8, weights in fp8", "x_scale has strides"),
    (faulty.TakesEveryWeightToBeScaledAlike, "weights in fp8 128x128", "max error"),
]


def name_of(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else ""


@pytest.mark.parametrize(("part", "case", "why"), ALL_TO_ALLS, ids=name_of)
def test_a_fault_of_an_all_to_all_is_found(part: Any, case: str, why: str, ranks_of: Start) -> None:
    report = check_prepare_finalize(part.build, cases=[case], ranks=ranks_of(2))
    (finding,) = report.findings
    assert finding.case == case
    assert why in finding.why
    with pytest.raises(NotConformingError, match=case):
        report.require()


def test_ranks_that_lose_each_other_are_a_fault_and_end_the_run_soon(
    ranks_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_moe_modular.testing.conformance.run._MOST_RESTARTS", 1)
    cases = ["zero tokens on the last rank", "ragged ranks"]
    part = faulty.StaysAwayWithoutTokens
    report = check_prepare_finalize(part.build, cases=cases, ranks=ranks_of(2), loss_timeout_s=3.0)
    assert [finding.case for finding in report.findings] == [cases[0], "not run"]
    assert "rank 0 of 2, step 1, phase 'dispatch counts': rank 1 is " in report.findings[0].why
    assert "1 cases, from 'ragged ranks' on: mend what is above first" in str(report)


@pytest.mark.parametrize(("part", "case", "why"), EXPERTS, ids=name_of)
def test_a_fault_of_experts_is_found(part: Any, case: str, why: str, ranks_of: Start) -> None:
    schemes = ("fp8", "fp8 128x128")
    (finding,) = check_experts(
        part.build, cases=[case], ranks=ranks_of(1), schemes=schemes, fp8_rows=schemes
    ).findings  # fmt: skip
    assert finding.case == case
    assert why in finding.why
