"""Triton's interpreter truncates to bfloat16, and to float8 it rounds some numbers to half of what they are."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.common import DEVICE

_TORCH = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:  # noqa: ARG001
    numbers = torch.from_numpy(np.frombuffer(data.tobytes(), dtype=f"i{source.primitive_bitwidth // 8}").copy())
    converted = numbers.view(_TORCH[source.name]).to(_TORCH[target.name])
    return converted.view(_BITS[converted.itemsize]).numpy().reshape(data.shape)


@pytest.fixture(autouse=True)
def rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a module that imports it: conversions as a GPU does them, and as torch does."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr("triton.runtime.interpreter._convert_float", _convert_float)


@pytest.fixture
def multiplies_each_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the interpreter runs: BLAS adds a row up in another order depending on where in the tile it lies."""
    if DEVICE.type != "cpu":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        rows = [
            dot(builder, TensorHandle(a.data[[r]], a.dtype), b, TensorHandle(d.data[[r]], d.dtype), *options).data
            for r in range(len(a.data))
        ]
        return TensorHandle(np.concatenate(rows), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
