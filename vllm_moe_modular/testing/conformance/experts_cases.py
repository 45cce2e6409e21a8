"""What an expert kernel has to stand, one function or one batch of rows for each case; one process, no ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import gelu, linear, relu, silu

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, Rows, StandardRows
from vllm_moe_modular.modular.weight_and_reduce import TorchTopKWeightAndReduce, WeightAndReduceBy
from vllm_moe_modular.modular.workspace import BufferSpec
from vllm_moe_modular.reference.moe_layer import moe_layer
from vllm_moe_modular.testing.conformance.outcome import Notes, Outcome
from vllm_moe_modular.testing.conformance.subject import bits, is_close
from vllm_moe_modular.testing.layers import SILU
from vllm_moe_modular.testing.ranks import Here

if TYPE_CHECKING:
    from vllm_moe_modular.testing.conformance.run import Build

NAN = float("nan")
GUARD = 64
"""Elements after each scratch tensor that nobody asked for."""

GPT_OSS = Activation(kind=ActivationKind.SWIGLU_OAI, limit=7.0, interleaved=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of rows. `absent`: the share of slots that have no expert here."""

    why: str
    activation: Activation = SILU
    R: int = 24
    K: int = 2
    E: int = 5
    H: int = 64
    F: int = 64
    bias: bool = False
    absent: float = 0.3
    only_expert: int | None = None
    repeated: bool = False
    weight_on_input: bool = False
    ids_dtype: torch.dtype = torch.int64


@dataclass(slots=True)
class Subject:
    """The experts under test, and what is wrong with them so far."""

    device: torch.device
    build: "Build"
    dtypes: tuple[torch.dtype, ...]
    notes: Notes = field(default_factory=Notes)

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    def make(self, case: Case, dtype: torch.dtype | None = None) -> PermuteExpertsUnpermute:
        experts: PermuteExpertsUnpermute = self.build(
            BuildContext(
                device=self.device,
                dtype=dtype or self.dtype,
                placement=ExpertPlacement.linear(case.E, 1),
                rank=0,
                group=None,
                hidden=case.H,
                top_k=case.K,
                capacity_tokens=max(case.R, 1),
                activation=case.activation,
                low_latency_tokens=256,
            )
        )
        return experts

    def run(
        self,
        experts: PermuteExpertsUnpermute,
        case: Case,
        rows: StandardRows,
        weights: ExpertWeights,
        by: WeightAndReduceBy,
        *,
        send: Callable[[Rows], Rows] = lambda rows: rows,
    ) -> torch.Tensor:
        """The weighted sum of each row, [R, H] on the CPU, whoever made it; notes what is written to.

        Args:
            send: what an all-to-all makes of the rows.
        """
        given, places = _in_format_of(experts, rows, len(weights.w2))
        given = send(given).for_experts(ids_dtype=experts.topk_indices_dtype, dtype=rows.x.dtype)
        tensors = [t for t in (*_tensors(given), *_tensors(weights)) if isinstance(t, torch.Tensor)]
        before = [t.clone() for t in tensors]
        buffers, guards = _scratch(experts.workspace(given, weights), self.device)
        y = experts.apply(
            given, weights, workspace=buffers, weight_and_reduce_by=by, router_weight_on_input=case.weight_on_input
        )
        untouched = all(torch.equal(bits(now), bits(then)) for now, then in zip(tensors, before, strict=True))
        self.notes.check(untouched, "it writes to its input: rows or weights are not what they were")
        whole = all(bool((guard == 0xA5).all()) for guard in guards)
        self.notes.check(whole, "it writes past the end of a scratch tensor that it asked for")
        self.notes.check(y.dtype == rows.x.dtype, f"rows of {rows.x.dtype} come back as {y.dtype}")
        return self._summed(case, rows, y, places, by)

    def _summed(
        self, case: Case, rows: StandardRows, y: torch.Tensor, places: torch.Tensor | None, by: WeightAndReduceBy
    ) -> torch.Tensor:
        (R, K), H = rows.topk_ids.shape, rows.x.shape[1]
        if by is WeightAndReduceBy.EXPERTS:
            self.notes.check(tuple(y.shape) == (R, H), f"it returns {list(y.shape)} where [R, H] is [{R}, {H}]")
            return y.cpu()
        if places is not None:
            nowhere = torch.full((1, H), NAN, dtype=y.dtype, device=y.device)
            y = torch.cat([y.reshape(-1, H), nowhere])[places.view(-1)].view(R, K, H)
        self.notes.check(tuple(y.shape) == (R, K, H), f"it returns {list(y.shape)} where [R, K, H] is [{R}, {K}, {H}]")
        out = torch.full_like(rows.x, NAN)
        TorchTopKWeightAndReduce().apply(
            y, rows.topk_ids, rows.topk_weights, router_weight_on_input=case.weight_on_input, out_RH=out
        )
        return out.cpu()


def run(here: Here, build: "Build", case: Callable[[Subject], None], dtypes: tuple[str, ...]) -> Outcome:
    """One case."""
    subject = Subject(here.device, build, tuple(getattr(torch, dtype) for dtype in dtypes))
    return subject.notes.outcome_of(lambda: case(subject), on_error=lambda error: None)  # noqa: ARG005


LAYERS = [
    Case(why="a batch"),
    Case(why="ids in int32", ids_dtype=torch.int32),
    Case(why="one row", R=1, absent=0.0),
    Case(why="two rows", R=2, E=40, absent=0.0),
    Case(why="no rows", R=0),
    Case(why="no row has an expert here", absent=1.0),
    Case(why="no experts on this rank", E=0, absent=1.0),
    Case(why="most experts have no rows", R=4, E=40, absent=0.0),
    Case(why="all rows to one expert", R=150, K=1, only_expert=3, absent=0.0),
    Case(why="an expert named twice by a row", K=3, repeated=True, absent=0.0),
    Case(why="300 experts", R=40, K=6, E=300, absent=0.0),
    Case(why="router weight on the input of one expert", K=1, weight_on_input=True),
    Case(why="router weight on the input of several experts", K=3, weight_on_input=True),
    # It does not multiply the biases: who scales what comes out of the first GEMM, not what goes in, is right without.
    Case(why="router weight on the input, and biases", K=3, weight_on_input=True, bias=True),
    Case(why="biases", bias=True),
    Case(why="sizes that no tile divides", H=72, F=40, R=17, K=3),
    *(
        Case(why=f"activation {kind.value}", activation=Activation(kind=kind))
        for kind in ActivationKind
        if kind is not ActivationKind.SILU
    ),
    Case(why="activation silu, clamped", activation=Activation(kind=ActivationKind.SILU, limit=0.5)),
    Case(why="activation silu, interleaved", activation=Activation(kind=ActivationKind.SILU, interleaved=True)),
    Case(why="as gpt-oss", activation=GPT_OSS, bias=True, K=4),
]


def _is_the_layer(s: Subject, *, case: Case) -> None:
    """Against the layer by loops in float64, in every dtype, whoever weights."""
    for dtype in s.dtypes:
        experts = s.make(case, dtype)
        rows, weights = make(case, dtype, s.device)
        truth, naive = right(case, rows, weights), plain_torch(case, rows, weights)
        for by in modes(experts):
            if by is WeightAndReduceBy.FINALIZE and case.weight_on_input:
                continue  # whoever dispatched has scaled the rows, and nobody did here
            s.notes.check_accuracy(
                f"{dtype}, summed by {by.value}", s.run(experts, case, rows, weights, by), naive, truth
            )


def _rows_without_an_expert(s: Subject) -> None:
    """They and the weights behind -1 are uninitialised memory: not read, and their sum is 0."""
    for R in (1, 24):
        case = Case(why="", R=R, absent=0.5)
        experts = s.make(case)
        rows, weights = make(case, s.dtype, s.device)
        rows.topk_ids[0] = -1
        rows.topk_weights[0] = NAN
        nobody = (rows.topk_ids < 0).all(dim=1)
        rows.x[nobody] = NAN
        for by in modes(experts):
            out = s.run(experts, case, rows, weights, by)
            s.notes.check(bool(out.isfinite().all()), f"summed by {by.value}: NaN of a row without an expert shows")
            s.notes.check(not out[nobody.cpu()].any(), f"summed by {by.value}: a row without an expert is not 0")


def _bad_rows_stay(s: Subject) -> None:
    case = Case(why="", absent=0.0)
    experts = s.make(case)
    rows, weights = make(case, s.dtype, s.device)
    truth, naive = right(case, rows, weights), plain_torch(case, rows, weights)
    rows.x[3], rows.x[4] = NAN, float("inf")
    others = [r for r in range(case.R) if r not in (3, 4)]
    for by in modes(experts):
        out = s.run(experts, case, rows, weights, by)[others]
        s.notes.check_accuracy(f"rows beside those, summed by {by.value}", out, naive[others], truth[others])


def _ids_past_the_end(s: Subject) -> None:
    case = Case(why="", R=9, absent=0.3)
    if s.make(case).activation_format is ActivationFormat.BATCHED:
        return  # rows carry no ids
    experts = s.make(case)
    rows, weights = make(case, s.dtype, s.device)
    past = replace(rows, topk_ids=torch.where(rows.topk_ids < 0, case.E, rows.topk_ids))
    for by in modes(experts):
        try:
            out = s.run(experts, case, past, weights, by)
        except MoEModularError:
            continue
        if by is WeightAndReduceBy.EXPERTS:
            same = torch.equal(out, s.run(experts, case, rows, weights, by))
            s.notes.check(same, "an id past the last local expert counts as one; take it as -1 or refuse it")


def _same_bits(s: Subject) -> None:
    """Whatever ran in between on the same object."""
    big, small = Case(why="", R=40, K=4), Case(why="", R=3, K=4)
    dtype = s.dtypes[-1]
    experts = s.make(big, dtype)
    a, b = make(big, dtype, s.device), make(small, dtype, s.device)
    for by in modes(experts):
        first, _, *others = (s.run(experts, c, *of, by) for c, of in ((big, a), (small, b), (big, a), (big, a)))
        same = all(torch.equal(first, other) for other in others)
        s.notes.check(same, f"summed by {by.value}: the same rows give other bits the next time")


def _random_steps(s: Subject) -> None:
    generator, wrong = torch.Generator().manual_seed(7), []
    shape = Case(why="", R=1)
    experts = s.make(replace(shape, R=12))
    for step in range(100):
        R = int(torch.randint(0, 13, (), generator=generator))
        case = replace(shape, R=R, absent=float(torch.rand((), generator=generator)))
        rows, weights = make(case, s.dtype, s.device, seed=step)
        for by in modes(experts):
            out = s.run(experts, case, rows, weights, by)
            if not is_close(out, right(case, rows, weights), s.dtype):
                wrong.append(step)
    s.notes.check(not wrong, f"{len(wrong)} steps are wrong, the first of them {wrong[:5]}")


CASES: dict[str, Callable[[Subject], None]] = {
    **{case.why: partial(_is_the_layer, case=case) for case in LAYERS},
    "rows without an expert": _rows_without_an_expert,
    "rows of NaN and infinity stay with themselves": _bad_rows_stay,
    "ids past the end": _ids_past_the_end,
    "the same bits every time": _same_bits,
    "100 random steps on one object": _random_steps,
}
"""By name, in the order in which they are run."""


def make(case: Case, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> tuple[StandardRows, ExpertWeights]:
    """Rows at random; behind an id of -1 lies a weight of NaN."""
    g = torch.Generator().manual_seed(seed)
    R, K, E, H, F = case.R, case.K, case.E, case.H, case.F
    width = 2 * F if case.activation.kind.is_gated else F

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    ids = torch.rand(R, max(E, K), generator=g).argsort(dim=1)[:, :K] if E >= K else torch.zeros(R, K).long()
    ids = torch.full_like(ids, case.only_expert) if case.only_expert is not None else ids
    if case.repeated:
        ids[:, -1] = ids[:, 0]
    absent = torch.rand(R, K, generator=g) < case.absent
    topk_weights = torch.rand(R, K, generator=g).masked_fill(absent, NAN)
    rows = StandardRows(
        random(R, H).to(device, dtype),
        ids.masked_fill(absent, -1).to(device, case.ids_dtype),
        topk_weights.to(device),
    )
    return rows, ExpertWeights(
        w13=(random(E, width, H) * H**-0.5).to(device, dtype),
        w2=(random(E, H, F) * F**-0.5).to(device, dtype),
        w13_bias=random(E, width).to(device, dtype) if case.bias else None,
        w2_bias=random(E, H).to(device, dtype) if case.bias else None,
    )


def modes(experts: PermuteExpertsUnpermute) -> list[WeightAndReduceBy]:
    return sorted(experts.weight_and_reduce_by, key=lambda by: by.value)


def _in_format_of(experts: PermuteExpertsUnpermute, rows: StandardRows, E: int) -> tuple[Rows, torch.Tensor | None]:
    """`rows` in the format of `experts`; for the batched one with the place of each slot in the flattened blocks.

    A slot without an expert has the place behind the last block.
    """
    if experts.activation_format is ActivationFormat.STANDARD:
        return rows, None
    R, K = rows.topk_ids.shape
    C = max(R * K, 1)
    x_ECH = torch.full((E, C, rows.x.shape[1]), NAN, dtype=rows.x.dtype, device=rows.x.device)
    counts, places = [0] * E, torch.full((R, K), E * C)
    for r, k in (rows.topk_ids >= 0).nonzero().tolist():
        e = int(rows.topk_ids[r, k])
        x_ECH[e, counts[e]] = rows.x[r]
        places[r, k] = e * C + counts[e]
        counts[e] += 1
    return BatchedRows(x_ECH, torch.tensor(counts, dtype=torch.int32, device=rows.x.device)), places.to(rows.x.device)


def _scratch(specs: Sequence[BufferSpec], device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that were asked for, of NaN, and what lies behind each."""
    buffers, guards = [], []
    for spec in specs:
        size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
        memory = torch.full((size + GUARD,), 0xFF, dtype=torch.uint8, device=device)
        memory[size:] = 0xA5
        buffers.append(memory[:size].view(spec.dtype).view(spec.shape))
        guards.append(memory[size:])
    return buffers, guards


def _tensors(of: Any) -> tuple[Any, ...]:
    """What a frozen dataclass holds."""
    return tuple(getattr(of, name) for name in of.__dataclass_fields__)


def _cpu(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(
        w13=weights.w13.cpu(),
        w2=weights.w2.cpu(),
        w13_bias=None if weights.w13_bias is None else weights.w13_bias.cpu(),
        w2_bias=None if weights.w2_bias is None else weights.w2_bias.cpu(),
        w13_scale=None if weights.w13_scale is None else weights.w13_scale.cpu(),
        w2_scale=None if weights.w2_scale is None else weights.w2_scale.cpu(),
    )


def right(case: Case, rows: StandardRows, weights: ExpertWeights) -> torch.Tensor:
    return moe_layer(
        rows.x.cpu(), rows.topk_ids.cpu(), rows.topk_weights.cpu(), _cpu(weights), case.activation,
        router_weight_on_input=case.weight_on_input,
    )  # fmt: skip


def plain_torch(
    case: Case,
    rows: StandardRows,
    weights: ExpertWeights,
    *,
    on_the_way: Callable[[torch.Tensor], torch.Tensor] = lambda activated: activated,
) -> torch.Tensor:
    """The obvious code, in the dtype of the rows, on the CPU.

    Args:
        on_the_way: what becomes of an activated row before the second GEMM.
    """
    w, x_RH = _cpu(weights), rows.x.cpu()
    out = torch.zeros_like(x_RH)
    for r, k in (rows.topk_ids >= 0).nonzero().tolist():
        e, weight = int(rows.topk_ids[r, k]), rows.topk_weights[r, k].cpu().to(x_RH.dtype)
        x = x_RH[r] * weight if case.weight_on_input else x_RH[r]
        h = linear(x, w.w13[e], None if w.w13_bias is None else w.w13_bias[e])
        y = linear(on_the_way(_activated(h, case.activation)), w.w2[e], None if w.w2_bias is None else w.w2_bias[e])
        out[r] += y if case.weight_on_input else y * weight
    return out


def _activated(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    kind, limit = activation.kind, activation.limit
    gate, up = (h[0::2], h[1::2]) if activation.interleaved else h.chunk(2)
    if not kind.is_gated:
        gate, up = h, torch.ones_like(h)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) if kind.is_gated else up
    match kind:
        case ActivationKind.SWIGLU_OAI:
            return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)
        case ActivationKind.RELU2_NO_MUL:
            return relu(gate) ** 2
        case ActivationKind.SILU | ActivationKind.SILU_NO_MUL:
            return silu(gate) * up
        case _:
            return gelu(gate, approximate="tanh" if kind is ActivationKind.GELU_TANH else "none") * up
