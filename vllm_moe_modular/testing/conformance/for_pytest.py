"""The cases as tests, for a package's own pytest run: one test for each, over ranks that are started once.

from vllm_moe_modular.testing.conformance.for_pytest import PrepareFinalizeConformance

class TestMyTransport(PrepareFinalizeConformance):
    part = MyPrepareAndFinalize
    num_ranks = 3
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from vllm_moe_modular.selection.registry import PartKind
from vllm_moe_modular.testing.conformance.report import Report
from vllm_moe_modular.testing.conformance.run import DTYPES, case_names, check_experts, check_prepare_finalize, ranks_on
from vllm_moe_modular.testing.ranks import Ranks


class _Conformance:
    """What both kinds have in common.

    Attributes:
        part: the class under test, importable by name in another process.
        device: "cpu" or "cuda".
        dtypes: of activations, that it can do.
        schemes: of experts, quant schemes of weights that they read: "fp8", "fp8 128x128".
        fp8_rows: of experts, those of them with which they take rows in fp8.
    """

    kind: ClassVar[PartKind]
    part: ClassVar[Any]
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[Sequence[str]] = DTYPES
    num_ranks: int = 1
    schemes: ClassVar[Sequence[str]] = ()
    fp8_rows: ClassVar[Sequence[str]] = ()
    ranks: ClassVar[Ranks]

    @classmethod
    def setup_class(cls) -> None:
        """The ranks start at the first case."""
        cls.ranks = ranks_on(cls.device, cls.num_ranks)

    @classmethod
    def teardown_class(cls) -> None:
        """None is left."""
        cls.ranks.close()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each case, whose id is the case's name."""
        if "case" in metafunc.fixturenames:
            names = case_names(self.kind, self.num_ranks, self.device, schemes=self.schemes, fp8_rows=self.fp8_rows)
            metafunc.parametrize("case", names, ids=[name.replace(" ", "-") for name in names])

    def test_conforms(self, case: str) -> None:
        """Skipped where the part says that it does not do that."""
        report = self._check(case)
        report.require()
        if report.refused:
            pytest.skip(report.refused[case])

    def _check(self, case: str) -> Report:
        raise NotImplementedError


class PrepareFinalizeConformance(_Conformance):
    """Subclass it, named Test..., and say which `part`."""

    kind = PartKind.PREPARE_FINALIZE
    num_ranks = 2

    def _check(self, case: str) -> Report:
        return check_prepare_finalize(
            self.part.build,
            num_ranks=self.num_ranks,
            device=self.device,
            dtypes=self.dtypes,
            cases=[case],
            ranks=self.ranks,
        )


class ExpertsConformance(_Conformance):
    """Subclass it, named Test..., and say which `part`."""

    kind = PartKind.EXPERTS

    def _check(self, case: str) -> Report:
        return check_experts(
            self.part.build,
            device=self.device,
            dtypes=self.dtypes,
            cases=[case],
            ranks=self.ranks,
            schemes=self.schemes,
            fp8_rows=self.fp8_rows,
        )
