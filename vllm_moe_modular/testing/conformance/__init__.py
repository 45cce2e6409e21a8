"""Whether an all-to-all or an expert kernel keeps its contract: what its author runs, and what ours have to pass.

    from vllm_moe_modular.testing.conformance import check_experts, check_prepare_finalize

    check_prepare_finalize(MyPrepareAndFinalize.build, num_ranks=3).require()

The ranks are real processes (gloo on CPUs, NCCL on GPUs, gloo where ranks share a GPU) that are started once for all
cases. With pytest, one test for each case: `vllm_moe_modular.testing.conformance.for_pytest`. On the command line, for
a part that is installed or for a class: `vllm-moe-modular conformance my_transport --ranks 3`. Importing this does not
import torch.
"""

from vllm_moe_modular.testing.conformance.report import Finding, NotConformingError, Report
from vllm_moe_modular.testing.conformance.run import (
    DTYPES,
    Build,
    Target,
    check_experts,
    check_part,
    check_prepare_finalize,
)

__all__ = [
    "DTYPES",
    "Build",
    "Finding",
    "NotConformingError",
    "Report",
    "Target",
    "check_experts",
    "check_part",
    "check_prepare_finalize",
]
