"""What came of a conformance run."""

from dataclasses import dataclass, field

from vllm_moe_modular.errors import MoEModularError


class NotConformingError(MoEModularError, AssertionError):
    """A part broke its contract; the message has every case in which it did, and how."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One case in which a part broke its contract.

    Attributes:
        case: its name.
        why: what was wrong, with the rank where ranks differ; one clause for each thing.
        traceback: of what the part raised, if it did.
    """

    case: str
    why: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.case}: {self.why}"


@dataclass(slots=True)
class Report:
    """One part over all cases.

    Attributes:
        subject: the part and what it ran on.
        passed: names of cases.
        refused: by case, how the part said that it does not do that; no fault.
        findings: the faults.
    """

    subject: str
    passed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        total = len(self.passed) + len(self.refused) + len(self.findings)
        head = f"{self.subject}: {len(self.findings)} of {total} cases failed"
        lines = [head, *(f"  failed   {finding}" for finding in self.findings)]
        return "\n".join([*lines, *(f"  refused  {case}: {why}" for case, why in self.refused.items())])

    def require(self) -> None:
        """Check that nothing was found.

        Raises:
            NotConformingError: something was; the message is the whole report, with the part's tracebacks.
        """
        if self.findings:
            raised = [f"{f.case}:\n{f.traceback}" for f in self.findings if f.traceback]
            raise NotConformingError("\n\n".join([str(self), *raised]))
