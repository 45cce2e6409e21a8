"""Scratch memory of the expert kernels: one buffer per lane, reserved at start-up, shared by all layers.

A lane is what may be in flight at the same time as another: a micro-batch slot, the drafter beside its target model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_moe_modular.errors import CapacityError

_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Shape and dtype of one scratch tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes, rounded up so that the next buffer starts aligned."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


Allocate = Callable[[Sequence[BufferSpec]], list[torch.Tensor]]
"""Gives all buffers of one step at once. What it gave before may be overwritten by the next call in the same lane."""


class Workspace:
    """An `Allocate` over one growable buffer per lane; after `lock()` it never grows.

    Args:
        device: where the buffers lie.
        lane: the lane of the caller, asked at every call.
    """

    def __init__(self, device: torch.device, *, lane: Callable[[], int] = lambda: 0) -> None:
        self._device = device
        self._lane = lane
        self._buffers: dict[int, torch.Tensor] = {}
        self._locked = False

    @property
    def nbytes(self) -> int:
        """Bytes held, over all lanes."""
        return sum(b.numel() for b in self._buffers.values())

    def reserve(self, nbytes: int, *, lane: int = 0) -> None:
        """Make sure that a step of `nbytes` fits in `lane`.

        Raises:
            CapacityError: it does not, and the workspace is locked.
        """
        held = self._buffers[lane].numel() if lane in self._buffers else 0
        if nbytes <= held:
            return
        if self._locked:
            raise CapacityError(
                f"workspace, lane {lane}: a step needs {nbytes} bytes, {held} were reserved at start-up; "
                "raise --max-num-batched-tokens to the largest step that you send"
            )
        self._buffers[lane] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def lock(self) -> None:
        """From now on a step that does not fit is an error instead of an allocation."""
        self._locked = True

    def __call__(self, specs: Sequence[BufferSpec]) -> list[torch.Tensor]:
        lane = self._lane()
        self.reserve(sum(s.nbytes for s in specs), lane=lane)
        views, start = [], 0
        for spec in specs:
            size = math.prod(spec.shape) * spec.dtype.itemsize
            views.append(self._buffers[lane][start : start + size].view(spec.dtype).view(spec.shape) if size else
                         torch.empty(spec.shape, dtype=spec.dtype, device=self._device))  # fmt: skip
            start += spec.nbytes
        return views
