"""Rows in fp8 out of plain ones, as an all-to-all sends them."""

from dataclasses import replace
from typing import TypeVar

from vllm_moe_modular.modular.prepare_finalize import Rows
from vllm_moe_modular.reference.quantize_fp8 import quantize_fp8

RowsT = TypeVar("RowsT", bound=Rows)


def fp8_rows(rows: RowsT) -> RowsT:
    """The same rows in float8_e4m3fn with a float32 scale for each row and 128 columns."""
    values, scales = quantize_fp8(rows.x.flatten(0, -2))
    return replace(
        rows,
        x=values.view(rows.x.shape),
        x_scale=scales.view(*rows.x.shape[:-1], scales.shape[-1]),
        out_dtype=rows.x.dtype,
    )
