"""What an expert kernel has to stand whose weights, or whose rows too, are in fp8: for experts that say so."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch

from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.fp8 import dequantized, dequantized_rows
from vllm_moe_modular.modular.prepare_finalize import Rows, StandardRows
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.testing.conformance.experts_cases import CASES, Case, Subject, make, modes, plain_torch, right
from vllm_moe_modular.testing.conformance.run import SCHEMES
from vllm_moe_modular.testing.fp8_rows import fp8_rows
from vllm_moe_modular.testing.fp8_weights import fp8_weights

_BATCHES = (
    Case(why="a batch", H=256, F=128),
    Case(why="one row", R=1, H=384, F=128, absent=0.0),
    Case(why="two rows of many experts", R=2, E=40, H=256, F=128, absent=0.0),
    Case(why="no rows", R=0, H=256, F=128),
    Case(why="all rows to one expert", R=150, K=1, only_expert=3, H=256, F=128, absent=0.0),
    Case(why="router weight on the input", K=1, weight_on_input=True, H=256, F=128),
)


def case_names(schemes: Collection[str], rows_in_fp8_with: Collection[str]) -> list[str]:
    """The cases for experts that read weights of these schemes, and take rows in fp8 with those."""
    known = [scheme for scheme in SCHEMES if scheme in schemes]
    return [_of_weights(s) for s in known] + [_of_rows(s) for s in known if s in rows_in_fp8_with]


def _of_weights(scheme: str) -> str:
    return f"weights in {scheme}"


def _of_rows(scheme: str) -> str:
    return f"rows in fp8, weights in {scheme}"


def _weights_in_fp8(s: Subject, *, scheme: str) -> None:
    """Twice as wrong as plain torch that quantises rows and activated rows."""
    _in_each_dtype(s, partial(_weights_in_fp8_of, scheme=scheme))


def _weights_in_fp8_of(s: Subject, dtype: torch.dtype, *, scheme: str) -> None:
    for case in _BATCHES:
        rows, weights = make(case, dtype, s.device)
        weights = quantised(weights, scheme)
        experts = s.make(case, dtype)
        meant = replace(rows, x=_on_the_way(rows.x))
        truth, naive = right(case, rows, _plain(weights, torch.float64)), _naive(case, meant, weights)
        for by in modes(experts):
            if by.value == "finalize" and case.weight_on_input:
                continue  # whoever dispatched has scaled the rows, and nobody did here
            out = s.run(experts, case, rows, weights, by)
            s.notes.check_accuracy(f"{dtype}, {case.why}, summed by {by.value}", out, naive, truth)


def _rows_in_fp8(s: Subject, *, scheme: str) -> None:
    """The scales lie as the contract allows: in rows, or those of a group side by side."""
    _in_each_dtype(s, partial(_rows_in_fp8_of, scheme=scheme))


def _rows_in_fp8_of(s: Subject, dtype: torch.dtype, *, scheme: str) -> None:
    for case in _BATCHES:
        rows, weights = make(case, dtype, s.device)
        weights = quantised(weights, scheme)
        experts = s.make(case, dtype)
        meant = replace(rows, x=_on_the_way(rows.x))
        exactly = replace(rows, x=dequantized_rows(replace(fp8_rows(rows), out_dtype=torch.float64)))
        truth, naive = right(case, exactly, _plain(weights, torch.float64)), _naive(case, meant, weights)
        for by in modes(experts):
            if by.value == "finalize" and case.weight_on_input:
                continue
            outs = [s.run(experts, case, rows, weights, by, send=send) for send in (_sent, _sent_side_by_side)]
            what = f"{dtype}, {case.why}, summed by {by.value}"
            s.notes.check_accuracy(what, outs[0], naive, truth)
            same = torch.equal(outs[0], outs[1])
            s.notes.check(same, f"{what}: other bits where the scales of a group lie side by side; x_scale has strides")


def _in_each_dtype(s: Subject, check: Callable[[Subject, torch.dtype], None]) -> None:
    """A dtype may be refused, not all of them."""
    refusals = []
    for dtype in s.dtypes:
        try:
            check(s, dtype)
        except UnsupportedError as error:
            refusals.append(error)
    if len(refusals) == len(s.dtypes):
        raise refusals[0]


def _sent(rows: Rows) -> Rows:
    return fp8_rows(rows)


def _sent_side_by_side(rows: Rows) -> Rows:
    quantised_rows = fp8_rows(rows)
    assert quantised_rows.x_scale is not None, "rows in fp8 without scales"
    return replace(quantised_rows, x_scale=quantised_rows.x_scale.mT.contiguous().mT)


def quantised(weights: ExpertWeights, scheme: str) -> ExpertWeights:
    """The same weights in float8_e4m3fn, by expert."""

    def of(w_END: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = zip(*(fp8_weights(w_ND.float(), blocks="128x128" in scheme) for w_ND in w_END), strict=True)
        # Torch on a CPU cannot stack fp8.
        return torch.stack([v.view(torch.uint8) for v in values]).view(torch.float8_e4m3fn), torch.stack(scales)

    (w13, w13_scale), (w2, w2_scale) = of(weights.w13), of(weights.w2)
    return replace(weights, w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)


def _plain(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """What quantised weights stand for."""

    def of(w_END: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        assert scale is not None, "weights in fp8 without scales"
        return torch.stack([dequantized(w, s, dtype) for w, s in zip(w_END, scale, strict=True)])

    w13, w2 = of(weights.w13, weights.w13_scale), of(weights.w2, weights.w2_scale)
    return replace(weights, w13=w13, w2=w2, w13_scale=None, w2_scale=None)


def _naive(case: Case, rows: StandardRows, weights: ExpertWeights) -> torch.Tensor:
    return plain_torch(
        case, rows, _plain(weights, rows.x.dtype), on_the_way=lambda activated_F: _on_the_way(activated_F[None])[0]
    )


def _on_the_way(x: torch.Tensor) -> torch.Tensor:
    """Quantised and back."""
    return dequantize_fp8(*quantize_fp8(x)).to(x.dtype)


ALL: dict[str, Callable[[Subject], None]] = {
    **CASES,
    **{_of_weights(scheme): partial(_weights_in_fp8, scheme=scheme) for scheme in SCHEMES},
    **{_of_rows(scheme): partial(_rows_in_fp8, scheme=scheme) for scheme in SCHEMES},
}
"""Every case of experts by name."""
