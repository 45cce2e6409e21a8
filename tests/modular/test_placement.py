import pytest

from vllm_moe_modular.errors import AgreementError
from vllm_moe_modular.modular.placement import ExpertPlacement


def test_experts_that_do_not_divide_evenly() -> None:
    assert ExpertPlacement.linear(3, 2) == ExpertPlacement((0, 0, 1), (0, 1, 0), (2, 1))


def test_round_robin_maps_are_honoured() -> None:
    placement = ExpertPlacement.from_expert_maps([[0, -1, 1, -1], [-1, 0, -1, 1]])
    assert placement == ExpertPlacement((0, 1, 0, 1), (0, 0, 1, 1), (2, 2))


@pytest.mark.parametrize(
    ("maps", "says"),
    [
        ([[0, -1], [-1, -1]], "expert 1 is held by no rank"),
        ([[0, 1], [-1, 0]], r"expert 1 is held by ranks \[0, 1\]"),
        ([[0, -1], [-1, 0, 1]], r"count \[2, 3\] experts"),
    ],
)
def test_maps_that_contradict_each_other(maps: list[list[int]], says: str) -> None:
    with pytest.raises(AgreementError, match=says):
        ExpertPlacement.from_expert_maps(maps)
