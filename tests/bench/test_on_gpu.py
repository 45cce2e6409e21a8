"""What only a GPU can say: accuracy on the shapes that are measured, the same bits in any batch, that commands run."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from vllm_moe_modular.bench import tile_candidates
from vllm_moe_modular.bench.accuracy_sweep import sweep
from vllm_moe_modular.bench.all_to_all_cases import MODES, peer_names
from vllm_moe_modular.bench.all_to_all_report import SHARED, read_results
from vllm_moe_modular.bench.candidates import of_part, ours
from vllm_moe_modular.bench.experts import measure_shape
from vllm_moe_modular.bench.problems import activation_of, random_steps, random_weights
from vllm_moe_modular.bench.shapes import FP8, FP8_MODELS, SHAPES, Shape
from vllm_moe_modular.bench.tuning import SMALL_BATCH, Way, key_of, part_of
from vllm_moe_modular.cli.main import main
from vllm_moe_modular.experts.triton_experts import TritonExperts
from vllm_moe_modular.kernels.tuned_tables import NO_TABLE, read_table, tuned_table
from vllm_moe_modular.modular.prepare_finalize import StandardRows

pytestmark = pytest.mark.gpu

POINTS = [*SHAPES.values(), *(replace(SHAPES[model], weights=FP8) for model in FP8_MODELS)]
SMALL = Shape("small", E=8, K=2, H=512, F=256)
IDS = [f"{shape.model} {shape.weights}" for shape in POINTS]


@pytest.mark.parametrize("shape", POINTS, ids=IDS)
def test_at_most_twice_as_wrong_as_plain_torch(shape: Shape) -> None:
    """Two seeds; `bench experts --accuracy` has twenty."""
    found = list(sweep(shape, partial(ours, shape, tuned_table(torch.device("cuda"))), seeds=2))
    assert found
    assert not [worst for worst in found if not worst.good]


@pytest.mark.parametrize("shape", POINTS, ids=IDS)
@pytest.mark.parametrize("way", ["in blocks", "slot by slot"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(shape: Shape, way: str) -> None:
    """At equal tile choice, which is that for 512 rows."""
    torch.manual_seed(0)
    weights = random_weights(shape)
    (many,) = random_steps(shape, 512 if way == "in blocks" else 4, 1)
    fixed = SMALL_BATCH if way == "slot by slot" else Way(tile_candidates.untuned(shape, 512))
    layer = of_part(part_of(fixed, shape), weights).layer
    together = layer(many).clone()
    for row in (0, len(many.x) // 2, len(many.x) - 1):
        alone = StandardRows(*(t[row : row + 1] for t in (many.x, many.topk_ids, many.topk_weights)))
        assert torch.equal(layer(alone)[0], together[row])


def test_a_point_is_measured_and_what_cannot_run_says_why() -> None:
    results = list(measure_shape(SMALL, [1, 64], ["triton", "vllm", "matmul_ogs", "torch"], NO_TABLE, rounds=5))
    assert {(r["experts"], r["M"]) for r in results} == {
        (name, M) for name in ("triton", "vllm", "matmul_ogs", "torch") for M in (1, 64)
    }
    for r in results:
        assert "not_run" in r or r["p20_us"] <= r["median_us"] <= r["p80_us"]
        if r["experts"] == "triton":
            assert r["error"] <= 2 * r["plain_error"]
            assert r["workspace_bytes"] > 0


def test_all_to_alls_are_measured_also_where_ranks_share_the_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every peer that loads here brings the right answer home, in both modes, or says why it was not run."""
    shared = ["--shared-gpu"] if torch.cuda.device_count() < 2 else []
    command = ["bench", "all-to-all", "--hidden", "2048", "--tokens", "1", "300", "--fp8", *shared]
    assert main([*command, "--out", str(tmp_path / "out.jsonl")]) == 0
    results = read_results([tmp_path / "out.jsonl"])
    assert {r["peer"] for r in results} == set(peer_names())
    nvlink = {(r["rows"], r["mode"], r["T"]) for r in results if r["peer"] == "nvlink" and "median_us" in r}
    assert nvlink == {(rows, mode, T) for rows in ("bfloat16", "fp8") for mode in MODES for T in (1, 300)}
    assert not [r for r in results if "is wrong" in r.get("not_run", "")]
    assert (SHARED in capsys.readouterr().out) == bool(shared)


def test_a_table_is_made_and_honoured(tmp_path: Path) -> None:
    command = ["tune", "--shape", "8,2,512,256", "--rows", "2", "64", "--rounds", "3", "--compilers", "0"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    table = read_table(file)
    assert table.gpu == torch.cuda.get_device_name()
    assert [cell.rows for cell in table.shapes[key_of(SMALL)]] == [2, 64]
    tuned = tuned_table(torch.device("cuda"), str(tmp_path))
    weights = random_weights(SMALL)
    (step,) = random_steps(SMALL, 64, 1)
    fixed = TritonExperts(activation_of(SMALL), tiles=table.shapes[key_of(SMALL)][1].tiles)
    by_table = TritonExperts(activation_of(SMALL), tuned=tuned)
    assert torch.equal(of_part(by_table, weights).layer(step), of_part(fixed, weights).layer(step))
