"""The composer: prepare, experts, finalize."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import CapacityError, IncompatiblePartsError, ShapeError
from vllm_moe_modular.modular.experts import ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.fp8 import BLOCK
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, PrepareAndFinalize, Rows, StandardRows
from vllm_moe_modular.modular.workspace import Allocate


def pair_objections(
    prepare_finalize: PrepareAndFinalize[Any] | type[PrepareAndFinalize[Any]],
    experts: PermuteExpertsUnpermute | type[PermuteExpertsUnpermute],
) -> list[str]:
    """Why these two cannot be composed; empty if they can."""
    objections = []
    if prepare_finalize.activation_format is not experts.activation_format:
        objections.append(
            f"the all-to-all delivers the {prepare_finalize.activation_format.value} format, "
            f"the experts take the {experts.activation_format.value} format"
        )
    if prepare_finalize.weight_and_reduce_by not in experts.weight_and_reduce_by:
        able = " or ".join(sorted(by.value for by in experts.weight_and_reduce_by))
        objections.append(
            f"the all-to-all leaves the top-k weight and reduce to {prepare_finalize.weight_and_reduce_by.value}, "
            f"the experts leave it to {able}"
        )
    return objections


class Mark(Protocol):
    """Told at the end of each phase of one call, in each of its rounds."""

    def __call__(self, phase: str, rows: Rows | None = None) -> None:
        """`phase` is over: "prepare" (with the rows that arrived), "experts", "send home", "meanwhile", "finalize".

        "call" comes once, after the last round.
        """


Observe = Callable[[torch.Tensor], Mark]
"""Called with x [T, H] as a call begins, once however many rounds it takes. Must not wait for the device."""


def unobserved(phase: str, rows: Rows | None = None) -> None:
    """The `Mark` of a call that nobody looks at."""


def rounds_of(tokens: int, max_tokens_per_rank: int, tokens_per_round: int | None) -> list[tuple[slice, int]]:
    """The rounds of a step: this rank's tokens in each, and the most of any rank.

    Their number follows from the fullest rank alone, so that it is the same on all of them. What a rank has beyond what
    was announced would be in its last round; the kernel refuses it before the first.
    """
    per_round = tokens_per_round or max_tokens_per_rank
    if max_tokens_per_rank <= per_round:
        return [(slice(0, tokens), max_tokens_per_rank)]
    starts = range(0, max_tokens_per_rank, per_round)
    bounds = [min(per_round, max_tokens_per_rank - start) for start in starts]
    ends = [*(start + per_round for start in starts[:-1]), max(tokens, max_tokens_per_rank)]
    return [(slice(start, end), bound) for start, end, bound in zip(starts, ends, bounds, strict=True)]


def sizes_up_to(most: int) -> list[int]:
    """Numbers of rows that between them need every kernel of a step with up to `most`: four in each doubling, and one
    less than each, because kernels differ by whether 16 divides a number."""
    quarters = {2**i * q // 4 for i in range(most.bit_length()) for q in (4, 5, 6, 7)}
    return sorted(R for R in {most, *quarters, *(R - 1 for R in quarters)} if 1 <= R <= most)


_compiled: WeakKeyDictionary[PermuteExpertsUnpermute, dict[tuple[object, ...], int]] = WeakKeyDictionary()
"""Of each expert kernel, up to how many rows it was compiled for, by the shape of the weights."""


class ModularKernel:
    """A mixture-of-experts layer composed of an all-to-all and an expert kernel. Holds no per-call state.

    Args:
        prepare_finalize: the all-to-all.
        experts: the expert kernel.
        allocate: scratch memory for the experts.
        on_error: told of whatever a call raises, before it is raised; `RankGroup.say_raised` where there is a group.

    Attributes:
        observe: looks at calls; None: nobody does.

    Raises:
        IncompatiblePartsError: the two do not fit, with every reason.
    """

    def __init__(
        self,
        prepare_finalize: PrepareAndFinalize[Any],
        experts: PermuteExpertsUnpermute,
        *,
        allocate: Allocate,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        if objections := pair_objections(prepare_finalize, experts):
            raise IncompatiblePartsError(
                f"{type(prepare_finalize).__name__} with {type(experts).__name__}: {'; '.join(objections)}; "
                "choose experts of that format (`vllm-moe-modular explain` lists the pairs)"
            )
        self.prepare_finalize = prepare_finalize
        self.experts = experts
        self.observe: Observe | None = None
        self._allocate = allocate
        self._on_error = on_error

    @property
    def output_is_reduced(self) -> bool:
        """See `PrepareAndFinalize`."""
        return self.prepare_finalize.output_is_reduced

    @property
    def supports_async(self) -> bool:
        """Whether work that is given as `meanwhile` overlaps with anything."""
        return self.prepare_finalize.supports_async

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        """The dtype that the router should give topk_ids in; `apply` casts what differs."""
        return self.prepare_finalize.topk_indices_dtype or self.experts.topk_indices_dtype

    def workspace_bytes(
        self,
        weights: ExpertWeights,
        *,
        max_tokens_per_rank: int,
        top_k: int,
        dtype: torch.dtype,
        fp8_rows: bool = False,
    ) -> int:
        """The scratch memory that the experts take in the largest step of up to `max_tokens_per_rank` tokens.

        Args:
            top_k: of the layer.
            dtype: of the activations.
            fp8_rows: the all-to-all may send rows in fp8; it may also not.
        """
        most = self.prepare_finalize.most_rows(max_tokens_per_rank)
        # Experts treat few rows differently, so that the most rows need not take the most memory.
        steps = {most, *(2**i for i in range(most.bit_length()))}
        rows_of_steps = [
            self._empty_rows(weights, R, top_k=top_k, dtype=dtype, fp8=fp8)
            for R in steps
            for fp8 in ((False, True) if fp8_rows else (False,))
        ]
        return max(sum(s.nbytes for s in self.experts.workspace(rows, weights)) for rows in rows_of_steps)

    def compile_ahead(
        self,
        weights: ExpertWeights,
        *,
        max_tokens_per_rank: int,
        top_k: int,
        dtype: torch.dtype,
        fp8_rows: bool = False,
        router_weight_on_input: bool = False,
    ) -> None:
        """Run the experts on rows without one, at sizes that between them need every kernel, so that no step of up to
        `max_tokens_per_rank` tokens waits for a compiler. Once for weights of a shape; see `workspace_bytes`."""
        if not self.experts.compiles_by_rows or self.experts.activation_format is ActivationFormat.BATCHED:
            return
        shape = (weights.w13.shape, weights.w13.dtype, top_k, dtype, fp8_rows, router_weight_on_input)
        most = self.prepare_finalize.most_rows(max_tokens_per_rank)
        compiled = _compiled.setdefault(self.experts, {})
        if compiled.get(shape, 0) >= most:
            return
        compiled[shape] = most
        by = self.prepare_finalize.weight_and_reduce_by
        for fp8 in (False, True) if fp8_rows else (False,):
            empty = self._empty_rows(weights, most, top_k=top_k, dtype=dtype, fp8=fp8)
            assert isinstance(empty, StandardRows), "the batched format has one size, of its first call"
            x, ids = empty.x.new_zeros(empty.x.shape), empty.topk_ids.new_full(empty.topk_ids.shape, -1)
            topk_weights, x_scale = empty.topk_weights.new_zeros(empty.topk_weights.shape), empty.x_scale
            x_scale = None if x_scale is None else x_scale.new_ones(x_scale.shape)
            for R in sizes_up_to(most):
                scale = None if x_scale is None else x_scale[:R]
                rows = StandardRows(x[:R], ids[:R], topk_weights[:R], x_scale=scale, out_dtype=dtype)
                self.experts.apply(
                    rows,
                    weights,
                    workspace=self._allocate(self.experts.workspace(rows, weights)),
                    weight_and_reduce_by=by,
                    router_weight_on_input=router_weight_on_input,
                )

    def _empty_rows(self, weights: ExpertWeights, R: int, *, top_k: int, dtype: torch.dtype, fp8: bool) -> Rows:
        """Rows of the right shapes without memory of their own."""
        E, H, _ = weights.w2.shape
        x_H = weights.w2.new_empty(H, dtype=torch.float8_e4m3fn if fp8 else dtype)
        scale_G = weights.w2.new_empty(-(-H // BLOCK), dtype=torch.float32) if fp8 else None
        if self.experts.activation_format is ActivationFormat.BATCHED:
            return BatchedRows(
                x_H.expand(E, R, H),
                weights.w2.new_empty(E, dtype=torch.int32),
                x_scale=None if scale_G is None else scale_G.expand(E, R, -1),
                out_dtype=dtype,
            )
        ids_K = weights.w2.new_empty(top_k, dtype=self.experts.topk_indices_dtype or torch.int32)
        weights_K = weights.w2.new_empty(top_k, dtype=torch.float32)
        return StandardRows(
            x_H.expand(R, H),
            ids_K.expand(R, top_k),
            weights_K.expand(R, top_k),
            x_scale=None if scale_G is None else scale_G.expand(R, -1),
            out_dtype=dtype,
        )

    def apply(
        self,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        weights: ExpertWeights,
        *,
        max_tokens_per_rank: int,
        router_weight_on_input: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Run the layer on this rank's tokens.

        Args:
            x_TH: [T, H]; never written to.
            topk_ids_TK: [T, K], int32 or int64, global ids; -1 = no expert.
            topk_weights_TK: [T, K], any float dtype; parts get float32.
            weights: of this rank's experts.
            max_tokens_per_rank: the largest T of any rank in this step, the same on every rank.
            router_weight_on_input: the weights multiply the experts' input rather than their output.
            meanwhile: work to overlap with the way home, the shared experts usually. Called at most once;
                not if a round before it fails.

        Returns:
            [T, H], dtype of `x_TH`.

        Raises:
            CapacityError: more tokens than `max_tokens_per_rank`.
            ShapeError: ids or weights are of other tokens.
        """
        try:
            return self._run(
                x_TH,
                topk_ids_TK,
                topk_weights_TK,
                weights,
                max_tokens_per_rank=max_tokens_per_rank,
                router_weight_on_input=router_weight_on_input,
                meanwhile=meanwhile,
            )
        except Exception as error:
            if self._on_error is not None:
                self._on_error(error)
            raise

    def _run(
        self,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        weights: ExpertWeights,
        *,
        max_tokens_per_rank: int,
        router_weight_on_input: bool,
        meanwhile: Callable[[], None] | None,
    ) -> torch.Tensor:
        T, K = x_TH.shape[0], topk_ids_TK.shape[-1]
        if topk_weights_TK.shape != topk_ids_TK.shape or topk_ids_TK.shape[0] != T:
            wrong = "topk_ids_TK" if topk_ids_TK.shape[0] != T else "topk_weights_TK"
            got = topk_ids_TK.shape if wrong == "topk_ids_TK" else topk_weights_TK.shape
            raise ShapeError(wrong, want=("T", "K"), values={"T": T, "K": K}, got=got)
        *before, (last, bound) = rounds_of(T, max_tokens_per_rank, self.prepare_finalize.tokens_per_round)
        if before and max_tokens_per_rank < T:
            raise CapacityError(
                f"{type(self.prepare_finalize).__name__}: {T} tokens in a step of {len(before) + 1} rounds announced "
                f"as at most {max_tokens_per_rank} per rank; give max_tokens_per_rank, on all ranks alike, the largest "
                "number of tokens of any rank in the step"
            )
        out_TH = torch.empty_like(x_TH)
        mark = unobserved if self.observe is None else self.observe(x_TH)
        call = partial(self._run_round, weights=weights, router_weight_on_input=router_weight_on_input, mark=mark)
        for tokens, full in before:
            given = x_TH[tokens], topk_ids_TK[tokens], topk_weights_TK[tokens]
            call(*given, max_tokens_per_rank=full, meanwhile=None, out_TH=out_TH[tokens])
        rest = (x_TH, topk_ids_TK, topk_weights_TK, out_TH)
        x, ids, topk_weights, out = (t[last] for t in rest) if before else rest
        call(x, ids, topk_weights, max_tokens_per_rank=bound, meanwhile=meanwhile, out_TH=out)
        mark("call")
        return out_TH

    def _run_round(
        self,
        x_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        weights: ExpertWeights,
        max_tokens_per_rank: int,
        router_weight_on_input: bool,
        meanwhile: Callable[[], None] | None,
        mark: Mark,
        out_TH: torch.Tensor,
    ) -> None:
        by = self.prepare_finalize.weight_and_reduce_by
        dispatched = self.prepare_finalize.prepare(
            x_TH,
            topk_ids_TK.to(self.prepare_finalize.topk_indices_dtype or topk_ids_TK.dtype),
            topk_weights_TK.to(torch.float32),
            max_tokens_per_rank=max_tokens_per_rank,
            router_weight_on_input=router_weight_on_input,
        )
        try:
            rows = dispatched.rows.for_experts(ids_dtype=self.experts.topk_indices_dtype, dtype=x_TH.dtype)
            mark("prepare", rows)
            y = self.experts.apply(
                rows,
                weights,
                workspace=self._allocate(self.experts.workspace(rows, weights)),
                weight_and_reduce_by=by,
                router_weight_on_input=router_weight_on_input,
                out_RH=out_TH if self.prepare_finalize.rows_are_tokens else None,
            )
        except BaseException:
            self.prepare_finalize.abandon(dispatched.ticket)
            raise
        mark("experts")
        if meanwhile is None:
            self.prepare_finalize.finalize(y, dispatched.ticket, out_TH=out_TH)
            mark("finalize")
            return
        wait = self.prepare_finalize.finalize_async(y, dispatched.ticket, out_TH=out_TH)
        mark("send home")
        try:
            meanwhile()
            mark("meanwhile")
        finally:
            wait()  # whatever became of it: rows that are on their way must be taken in
        mark("finalize")
