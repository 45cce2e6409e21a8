"""Sampled steps of a kernel, on a CPU."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import BatchedRows, StandardRows
from vllm_moe_modular.modular.trace import Tracer, expert_tokens
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.prepare_finalize.local import LocalPrepareAndFinalize
from vllm_moe_modular.testing.layers import SILU, Case, make_batch, make_weights

CPU = torch.device("cpu")
CASE = Case("", tokens=(6,), G=5, K=3, absent=0.3)


def run(kernel: ModularKernel, *, seconds: float = 0.0) -> None:
    batch = make_batch(CASE, 0, torch.float32)
    kernel.apply(
        batch.x, batch.topk_ids, batch.topk_weights, make_weights(CASE, torch.float32),
        max_tokens_per_rank=6, meanwhile=lambda: time.sleep(seconds),
    )  # fmt: skip


def traced(file: Path, *, every: int, steps: int, seconds: float = 0.0) -> list[dict[str, Any]]:
    tracer = Tracer(file, rank=0, size=1, every=every)
    part = LocalPrepareAndFinalize(placement=ExpertPlacement.linear(CASE.G, 1), rank=0, device=CPU)
    kernels = [ModularKernel(part, TorchExperts(activation=SILU), allocate=Workspace(CPU)) for _ in range(2)]
    for number, kernel in enumerate(kernels):
        kernel.observe = tracer.observe(
            f"layers.{number}", all2all="local", experts="torch", num_experts=CASE.G, traffic=part.traffic
        )
    for _ in range(steps):
        for kernel in kernels:
            run(kernel, seconds=seconds)
    tracer.close()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_one_step_in_so_many_is_written_for_every_layer(tmp_path: Path) -> None:
    run_, *told = traced(tmp_path / "rank0.jsonl", every=3, steps=7)
    assert run_.items() >= {"kind": "run", "format": 1, "rank": 0, "size": 1, "every": 3}.items()
    assert [line["name"] for line in told if line["kind"] == "layer"] == ["layers.0", "layers.1"]
    samples = [line for line in told if line["kind"] == "sample"]
    assert [(s["step"], s["layer"]) for s in samples] == [(step, layer) for step in (0, 3, 6) for layer in (0, 1)]


def test_a_sample_counts_tokens_rows_and_the_load_of_each_expert(tmp_path: Path) -> None:
    ids = make_batch(CASE, 0, torch.float32).topk_ids
    sample = traced(tmp_path / "rank0.jsonl", every=1, steps=1)[-1]
    assert sample["tokens"] == 6
    assert sample["rows_sent"] == sample["rows_received"] == [6]
    assert sample["expert_tokens"] == [int((ids == e).sum()) for e in range(CASE.G)]


def test_times_are_of_their_phases_and_other_work_is_not_finalize(tmp_path: Path) -> None:
    told = traced(tmp_path / "rank0.jsonl", every=1, steps=4, seconds=0.05)
    samples = [line["ms"] for line in told if line["kind"] == "sample"]
    assert all(set(ms) == {"prepare", "experts", "finalize", "meanwhile"} for ms in samples)
    quickest = {phase: min(ms[phase] for ms in samples) for phase in samples[0]}  # other work may disturb some
    assert quickest["meanwhile"] >= 50
    assert all(0 < quickest[phase] < 50 for phase in ("prepare", "experts", "finalize"))


def test_ids_that_are_not_here_count_for_nobody() -> None:
    ids = torch.tensor([[0, -1], [2, 3], [2, 7]], dtype=torch.int32)
    rows = StandardRows(torch.zeros(3, 4), ids, torch.zeros(3, 2))
    assert expert_tokens(rows, 3).tolist() == [1, 0, 2]


def test_blocks_say_themselves_how_full_they_are() -> None:
    rows = BatchedRows(torch.zeros(2, 5, 4), torch.tensor([5, 0], dtype=torch.int32))
    assert expert_tokens(rows, 2).tolist() == [5, 0]


def test_a_folder_that_goes_away_ends_the_trace_and_not_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = Tracer(tmp_path / "gone" / "rank0.jsonl", rank=0, size=1, every=1)
    part = LocalPrepareAndFinalize(placement=ExpertPlacement.linear(CASE.G, 1), rank=0, device=CPU)
    kernel = ModularKernel(part, TorchExperts(activation=SILU), allocate=Workspace(CPU))
    kernel.observe = tracer.observe("l", all2all="local", experts="torch", num_experts=CASE.G, traffic=None)
    run(kernel)
    tracer.close()
    assert "the trace ends here" in caplog.text


def test_a_step_in_rounds_is_one_sample(tmp_path: Path) -> None:
    case = replace(CASE, tokens=(7,))
    batch, weights = make_batch(case, 0, torch.float32), make_weights(case, torch.float32)
    tracer = Tracer(tmp_path / "rank0.jsonl", rank=0, size=1, every=4)
    kernels = []
    for per_round in (3, None):
        part = LocalPrepareAndFinalize(placement=ExpertPlacement.linear(CASE.G, 1), rank=0, device=CPU)
        part.tokens_per_round = per_round
        kernel = ModularKernel(part, TorchExperts(activation=SILU), allocate=Workspace(CPU))
        told = {"all2all": "local", "experts": "torch", "num_experts": CASE.G, "traffic": part.traffic}
        kernel.observe = tracer.observe(f"by {per_round}", **told)  # type: ignore[arg-type]
        kernels.append(kernel)
    for _ in range(8):
        for kernel in kernels:
            kernel.apply(batch.x, batch.topk_ids, batch.topk_weights, weights, max_tokens_per_rank=7)
    tracer.close()
    lines = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    samples = [line for line in lines if line["kind"] == "sample"]
    assert [(s["step"], s["layer"]) for s in samples] == [(0, 0), (0, 1), (4, 0), (4, 1)]
    load = [int((batch.topk_ids == e).sum()) for e in range(CASE.G)]
    for s in samples:
        assert (s["tokens"], s["rows_sent"], s["rows_received"], s["expert_tokens"]) == (7, [7], [7], load)
