"""vLLM 0.24 to 0.27: as 0.28 and later, but the communicator still sets layers up, by `maybe_init_modular_kernel`.

It does so on GPUs, in groups of two or more ranks, and for methods that do not own a kernel; the end of
`Worker.load_model` visits what is left.
"""

from typing import Any

from vllm.utils.mem_utils import MemoryProfilingResult

from vllm_moe_modular.vllm_adapter import era_0_28
from vllm_moe_modular.vllm_adapter.patches import Patch


class Adapter(era_0_28.Adapter):
    """The seams of 0.24 to 0.27."""

    @property
    def patches(self) -> tuple[Patch, ...]:
        return (
            *super().patches,
            Patch(
                target="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.maybe_init_modular_kernel",
                wrapper=self._at_buffer_set_up,
                why="this is where the communicator asks a layer to set up its all-to-all",
                upstream="removed in 0.28",
                remove_when="0.27 is no longer supported",
            ),
        )

    @property
    def profile_misses_set_up(self) -> bool:
        return not hasattr(MemoryProfilingResult, "total_consumed")

    def _at_buffer_set_up(self, original: Any, runner: Any) -> None:
        if self.runtime.settings.enabled:
            if self.is_set_up_later(self._layer(runner.routed_experts, runner)):
                return
            self._visit(None, runner)
        original(runner)  # leaves a method that owns a kernel, as ours does, alone
