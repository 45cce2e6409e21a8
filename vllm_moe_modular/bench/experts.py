"""Our experts against their peers, one point after the other: checked, then timed in turns in CUDA graphs.

Every result is a flat dictionary, one JSON line:

    experts, model, weights, M, and either
    median_us, p20_us, p80_us, roof_us, eff, error, plain_error, workspace_bytes, chosen; note where there is one; or
    not_run: the reason.

Letters: M tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from vllm_moe_modular.bench.accuracy import Judge
from vllm_moe_modular.bench.candidates import CANDIDATES, Candidate
from vllm_moe_modular.bench.problems import random_steps, random_weights, roof_us
from vllm_moe_modular.bench.shapes import Shape, steps_to_rotate
from vllm_moe_modular.bench.timing import captured, time_in_turns
from vllm_moe_modular.experts.triton_or_deep_gemm_experts import prefers_deep_gemm
from vllm_moe_modular.kernels.tuned_tables import TunedTable, tuned_shape
from vllm_moe_modular.modular.experts import ExpertWeights
from vllm_moe_modular.modular.prepare_finalize import StandardRows

Result = dict[str, Any]


def measure_shape(
    shape: Shape, tokens: Sequence[int], names: Sequence[str], tuned: TunedTable, *, rounds: int
) -> Iterator[Result]:
    """All points of one shape.

    Args:
        names: of `CANDIDATES`.
        rounds: of replays, in turns.
    """
    weights = random_weights(shape)
    made: dict[str, Candidate] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            made[name] = CANDIDATES[name](shape, weights, tuned)
        except Exception as error:  # of a library that need not be there, or not as it was
            reasons[name] = in_a_line(error)
    for M in tokens:
        of_point = {"model": shape.model, "weights": shape.weights, "M": M}
        for name, why in reasons.items():
            yield {"experts": name, **of_point, "not_run": why}
        for result in measure_point(shape, weights, M, made, tuned, rounds=rounds):
            yield {**result, **of_point}


def measure_point(
    shape: Shape, weights: ExpertWeights, M: int, made: dict[str, Candidate], tuned: TunedTable, *, rounds: int
) -> Iterator[Result]:
    """All candidates on the same steps."""
    steps = random_steps(shape, M, steps_to_rotate(shape, M))
    judge, roof = Judge.of(shape, weights, steps[-1]), roof_us(shape, steps)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    told: dict[str, Result] = {}
    for name, candidate in made.items():
        try:
            told[name] = {"experts": name, "roof_us": roof, **_checked(candidate, judge, steps[-1])}
            told[name] |= {"note": candidate.note} if candidate.note else {}
            if "not_run" not in told[name]:
                graphs[name] = captured([partial(candidate.layer, step) for step in steps])
        except Exception as error:
            told[name] = {"experts": name, "not_run": in_a_line(error)}
    chosen = "deep_gemm" if _deep_gemm_chosen(shape, weights, M, tuned) and "deep_gemm" in graphs else "triton"
    timings = time_in_turns(graphs, len(steps), rounds)
    for name, result in told.items():
        if name in timings:
            result |= asdict(timings[name]) | {"eff": roof / timings[name].median_us, "chosen": name == chosen}
        yield result


def _checked(candidate: Candidate, judge: Judge, step: StandardRows) -> Result:
    got = candidate.layer(step)
    if not candidate.is_layer:
        return {}
    error = judge.error(got)
    if objection := judge.objection(error):
        return {"not_run": objection}
    result_bytes = got.numel() * got.element_size()
    del got
    nbytes = candidate.workspace_bytes
    return {
        "error": error,
        "plain_error": judge.plain,
        "workspace_bytes": nbytes(step) if nbytes else peak_bytes(candidate, step) - result_bytes,
    }


def peak_bytes(candidate: Candidate, step: StandardRows) -> int:
    """The most memory that one call holds beyond what was held before, its result included; not the first call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    candidate.layer(step)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _deep_gemm_chosen(shape: Shape, weights: ExpertWeights, M: int, tuned: TunedTable) -> bool:
    """What `triton_or_deep_gemm` would run; without biases, which DeepGEMM does not take."""
    if weights.w2_bias is not None:
        return False
    return prefers_deep_gemm(
        slots=M * shape.K,
        num_experts=shape.E,
        fp8=shape.fp8,
        tuned=tuned.cell(tuned_shape(weights, shape.K), M),
    )


def in_a_line(error: Exception) -> str:
    """What kind of error, and the first line of what it says."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
