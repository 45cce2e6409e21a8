"""Every error this package raises on purpose. Each says what, where, and what to do next."""

from collections.abc import Mapping, Sequence


class MoEModularError(Exception):
    """Base class; catching it catches nothing raised by torch, triton or vLLM."""


class SettingsError(MoEModularError, ValueError):
    """A variable or an `--additional-config` key has a name or a value that is not known."""


class ShapeError(MoEModularError, ValueError):
    """A tensor's shape is not the one its contract gives."""

    def __init__(self, name: str, *, want: Sequence[str], values: Mapping[str, int], got: Sequence[int]) -> None:
        expected = ", ".join(f"{d}={values[d]}" for d in want)
        super().__init__(f"{name}: expected shape [{expected}], got {list(got)}")


class UnsupportedError(MoEModularError, NotImplementedError):
    """A part cannot do what it was asked to; the message names what can."""

    def __init__(self, what: str, *, instead: str) -> None:
        super().__init__(f"{what} is not supported; {instead}")


class IncompatiblePartsError(MoEModularError, TypeError):
    """An all-to-all and an expert kernel that cannot be composed."""


class NoUsablePartError(MoEModularError):
    """No registered part fits, or the part that the user named does not; the message holds every reason."""


class CapacityError(MoEModularError, ValueError):
    """More tokens in one step than the buffers were reserved for at start-up."""


class ExpertIdError(MoEModularError, ValueError):
    """A router's id names no expert of the layer."""


class AgreementError(MoEModularError):
    """The ranks of one expert-parallel group would not run the same thing."""


class RankLostError(MoEModularError, RuntimeError):
    """A rank did not take part in a collective in time.

    Attributes:
        rank: the missing one, in the group; the lowest of several; None where it is not known.
        step: of the collective that this rank waited in; None where steps are not counted.
        phase: of the collective; empty where it has no name.
    """

    def __init__(self, message: str, *, rank: int | None = None, step: int | None = None, phase: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.phase = phase


class IncompatibleVllmError(MoEModularError):
    """The installed vLLM is outside the tested range, or its interfaces are not the ones that were tested."""
