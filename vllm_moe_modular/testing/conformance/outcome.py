"""What one rank says of one case."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from vllm_moe_modular.errors import RankLostError, UnsupportedError
from vllm_moe_modular.testing.tolerance import assert_as_accurate_as


@dataclass(frozen=True, slots=True)
class Outcome:
    """Picklable; all empty: the case passed.

    Attributes:
        problems: what was wrong.
        refusal: what the part said that it does not do.
        traceback: of what it raised.
        lost_a_rank: it did not hear of a peer in time.
        broke_off: it did not run to its end, although the part was made.
    """

    problems: tuple[str, ...] = ()
    refusal: str = ""
    traceback: str = ""
    lost_a_rank: bool = False
    broke_off: bool = False


@dataclass(slots=True)
class Notes:
    """Collects what is wrong, so that a rank goes on to the end of its case: the others count on it."""

    problems: list[str] = field(default_factory=list)
    part_was_made: bool = False

    def check(self, holds: bool, problem: str) -> None:
        """Note `problem` unless `holds`."""
        if not holds:
            self.problems.append(problem)

    def check_accuracy(self, what: str, got: torch.Tensor, naive: torch.Tensor, truth: torch.Tensor) -> None:
        """Note where `got` is more than twice as wrong as plain torch."""
        try:
            assert_as_accurate_as(got, naive, truth)
        except AssertionError as error:
            self.problems.append(f"{what}: {error}")

    def outcome_of(self, case: Callable[[], None], *, on_error: Callable[[Exception], None]) -> Outcome:
        """Run a case on this rank.

        Args:
            on_error: told of what it raised, at once.
        """
        try:
            case()
        except UnsupportedError as error:
            return Outcome(tuple(self.problems), refusal=str(error), broke_off=self.part_was_made)
        except RankLostError as error:
            return Outcome((*self.problems, str(error)), lost_a_rank=True, broke_off=True)
        except Exception as error:  # a fault of the part, whatever it is
            on_error(error)
            what = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
            return Outcome((*self.problems, what), traceback=traceback.format_exc(), broke_off=self.part_was_made)
        return Outcome(tuple(self.problems))
