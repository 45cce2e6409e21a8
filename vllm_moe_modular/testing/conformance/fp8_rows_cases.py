"""What an all-to-all has to stand in front of experts that take rows in fp8, whether it sends such rows or not."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vllm_moe_modular.modular.prepare_finalize import Dispatched, PrepareAndFinalize, Rows, StandardRows
from vllm_moe_modular.reference.quantize_fp8 import dequantize_fp8, quantize_fp8
from vllm_moe_modular.testing.conformance.plain_experts import plain_experts
from vllm_moe_modular.testing.conformance.subject import Subject, bits
from vllm_moe_modular.testing.layers import Batch, Case, make_batch, make_weights, moe_answer, of_rank, plain_torch

_HIDDEN = 256
"""Two groups of columns with a scale each."""


def _ragged(s: Subject, *tokens: int) -> tuple[int, ...]:
    return tuple(tokens[rank % len(tokens)] for rank in range(s.here.size))


def _rows_arrive(s: Subject) -> None:
    """The bits and the scales of quantising each token first, or its own bits."""
    for dtype in s.dtypes:
        case = Case("", tokens=_ragged(s, 2, 5), K=3, H=_HIDDEN, absent=0.3, max_tokens=9)
        part = s.make(case, dtype, fp8_rows=True)
        batch = s.batch(part, case, dtype)
        dispatched = s.prepare(part, case, replace(batch, x=_uneven(batch.x)))
        rows = dispatched.rows
        if rows.x_scale is not None:
            _check_form(s, rows)
        got, want = _received(rows), _sent_here(s, part, case, dtype, rows)
        s.notes.check(
            got == want or (part.fills_empty_slots and want <= got),
            f"{dtype}: of {want.total()} pairs of token and expert {(want - got).total()} did not arrive as sent "
            f"({'' if rows.x_scale is None else 'quantised, with their scales, '}each by 128 columns), "
            f"and {(got - want).total()} arrived that nobody sent",
        )
        y = _experts(s, part, case, dispatched, dtype)
        part.finalize(y, dispatched.ticket, out_TH=torch.empty_like(batch.x))


def _check_form(s: Subject, rows: Rows) -> None:
    assert rows.x_scale is not None, "asked for rows in fp8 alone"
    values, scales = rows.x, rows.x_scale
    s.notes.check(values.dtype == torch.float8_e4m3fn, f"rows with x_scale are in {values.dtype}, not float8_e4m3fn")
    s.notes.check(values.is_contiguous(), "rows in fp8 are not contiguous")
    s.notes.check(scales.dtype == torch.float32, f"x_scale is in {scales.dtype}, not float32")
    want = [*values.shape[:-1], values.shape[-1] // 128]
    s.notes.check(list(scales.shape) == want, f"x_scale is of shape {list(scales.shape)}, not {want}")


def _received(rows: Rows) -> "Counter[tuple[Any, ...]]":
    """Every pair of a row and an expert of this rank."""
    x = rows.x.cpu()
    scales = torch.empty(*x.shape[:-1], 0) if rows.x_scale is None else rows.x_scale.cpu()
    if not isinstance(rows, StandardRows):
        counts = enumerate(rows.expert_num_tokens.tolist())
        return Counter((_key(x[e, i]), _key(scales[e, i]), e) for e, n in counts for i in range(n))
    ids, weights = rows.topk_ids.cpu(), rows.topk_weights.cpu()
    return Counter(
        (_key(x[r]), _key(scales[r]), int(ids[r, k]), _key(weights[r, k])) for r, k in (ids >= 0).nonzero().tolist()
    )


def _sent_here(
    s: Subject, part: PrepareAndFinalize[Any], case: Case, dtype: torch.dtype, rows: Rows
) -> "Counter[tuple[Any, ...]]":
    place, sent = case.placement, Counter[tuple[Any, ...]]()
    for source in range(s.here.size) if part.output_is_reduced else [0]:
        batch = make_batch(case, source, dtype)
        x = _uneven(batch.x)
        values, scales = (x, x.new_empty(len(x), 0)) if rows.x_scale is None else quantize_fp8(x)
        for t, k in (batch.topk_ids >= 0).nonzero().tolist():
            expert = int(batch.topk_ids[t, k])
            if place.rank_of[expert] == s.here.rank:
                weight = (_key(batch.topk_weights[t, k]),) if isinstance(rows, StandardRows) else ()
                sent[(_key(values[t]), _key(scales[t]), place.local_id_of[expert], *weight)] += 1
    return sent


def _layer(s: Subject) -> None:
    """Against the layer without ranks over what the tokens stand for once they were quantised, if they were."""
    shapes = [
        Case("ragged ranks", tokens=_ragged(s, 7, 2, 5), H=_HIDDEN, absent=0.2),
        Case("all ids of -1", tokens=_ragged(s, 3), H=_HIDDEN, absent=1.0),
        Case("zero tokens on the first rank", tokens=(0, *_ragged(s, 4)[1:]), H=_HIDDEN),
        Case("experts scattered over ranks", tokens=_ragged(s, 5, 4), H=_HIDDEN, scattered=True),
    ]
    dtype = s.dtypes[-1]  # the coarsest one: the order of few sums in float32 is another matter
    for case in shapes:
        part = s.make(case, dtype, fp8_rows=True)
        batch = s.batch(part, case, dtype)
        given = (batch.x, batch.topk_ids, batch.topk_weights)
        before = [t.clone() for t in given]
        out, in_fp8 = _run(s, part, case, batch)
        s.check_untouched(given, before, "after the layer")
        meant = make_batch(case, s.source(part), dtype)
        if in_fp8:
            meant = replace(meant, x=dequantize_fp8(*quantize_fp8(meant.x)).to(dtype))
        weights = make_weights(case, dtype)
        naive = plain_torch(meant, weights, weight_on_input=False)
        s.notes.check_accuracy(f"{dtype}, {case.why}", out, naive, moe_answer(meant, weights))


def _beside_another(s: Subject) -> None:
    """A layer whose experts take rows in fp8, one whose experts do not, in flight at a time."""
    case = Case("", tokens=_ragged(s, 4, 6), H=_HIDDEN, absent=0.2)
    parts = [s.make(case, fp8_rows=fp8_rows) for fp8_rows in (True, False)]
    batches = [s.batch(part, case, seed=seed) for seed, part in enumerate(parts, start=1)]
    dispatched = [s.prepare(part, case, batch) for part, batch in zip(parts, batches, strict=True)]
    s.notes.check(dispatched[1].rows.x_scale is None, "it sends rows in fp8 to experts that did not ask for them")
    together = []
    for part, batch, d in zip(parts, batches, dispatched, strict=True):
        y, out = _experts(s, part, case, d, s.dtype), torch.full_like(batch.x, float("nan"))
        part.finalize(y, d.ticket, out_TH=out)
        together.append(s.reduced(part, out))
    for part, batch, out, which in zip(parts, batches, together, ("with", "without"), strict=True):
        alone, _ = _run(s, part, case, batch)
        s.notes.check(torch.equal(out, alone), f"the layer {which} rows in fp8 gives something else than alone")


def _run(s: Subject, part: PrepareAndFinalize[Any], case: Case, batch: Batch) -> tuple[torch.Tensor, bool]:
    """The output on the CPU, and whether rows were sent in fp8."""
    dispatched = s.prepare(part, case, batch)
    out = torch.full_like(batch.x, float("nan"))
    part.finalize(_experts(s, part, case, dispatched, batch.x.dtype), dispatched.ticket, out_TH=out)
    return s.reduced(part, out), dispatched.rows.x_scale is not None


def _experts(
    s: Subject, part: PrepareAndFinalize[Any], case: Case, dispatched: Dispatched[Any], dtype: torch.dtype
) -> torch.Tensor:
    experts = plain_experts(part)
    return experts.apply(
        dispatched.rows.for_experts(ids_dtype=experts.topk_indices_dtype, dtype=dtype),
        of_rank(make_weights(case, dtype), case.placement, s.here.rank, s.here.device),
        workspace=(),
        weight_and_reduce_by=part.weight_and_reduce_by,
        router_weight_on_input=False,
    )


def _uneven(x: torch.Tensor) -> torch.Tensor:
    """Groups of columns of very different size, one of zeros: a scale of another group or row shows."""
    uneven = x.clone()
    uneven[:, 128:] *= 2.0**-9
    uneven[:1, :128] = 0.0
    return uneven


def _key(t: torch.Tensor) -> bytes:
    return bytes(bits(t).tolist())


FP8_ROWS_CASES: dict[str, Callable[[Subject], None]] = {
    "experts that take rows in fp8: they arrive quantised, or bitwise": _rows_arrive,
    "experts that take rows in fp8: the layer": _layer,
    "experts that take rows in fp8 beside experts that do not": _beside_another,
}
