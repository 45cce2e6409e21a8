"""Uninitialised memory that shows: a kernel that leaves a hole fails instead of passing by luck."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        t = allocate(*args, **kwargs)
        if t.dtype.is_floating_point:
            return t.fill_(float("nan")) if t.dtype.itemsize >= 2 else t
        if t.dtype == torch.uint8:
            return t.fill_(0xFF)  # scratch bytes: NaN, as whatever float they are viewed
        # Not -1, which would mean "no expert": an index that no tensor has.
        return t.fill_(torch.iinfo(t.dtype).max) if t.dtype in (torch.int32, torch.int64) else t

    return allocate_poisoned


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within it `torch.empty`, `torch.empty_like` and `Tensor.new_empty` hand out NaN and impossible indices."""
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    torch.empty, torch.empty_like = _poisoned(before[0]), _poisoned(before[1])
    torch.Tensor.new_empty = _poisoned(before[2])  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.empty, torch.empty_like = before[0], before[1]
        torch.Tensor.new_empty = before[2]  # type: ignore[method-assign]
