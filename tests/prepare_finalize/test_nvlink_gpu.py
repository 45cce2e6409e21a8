"""`nvlink` on real GPUs, one process each. The order of things is in `tests/kernels/test_nvlink_protocol.py`."""

import random
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from tests.prepare_finalize import nvlink_calls  # noqa: E402
from tests.prepare_finalize.nvlink_calls import Layer  # noqa: E402
from vllm_moe_modular.testing.ranks import Ranks  # noqa: E402

W = 2
TIMEOUT_S = 60.0

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < W, reason=f"needs {W} CUDA GPUs with peer access"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(W, backend="nccl") as started:
        yield started


@pytest.mark.parametrize(
    ("counts", "N", "ids"),
    [
        pytest.param([1, 1], 1, "uniform", id="one token each"),
        pytest.param([8, 8], 8, "uniform", id="fewer tokens than programs"),
        pytest.param([128, 128], 128, "uniform", id="as many tokens as programs"),
        pytest.param([4096, 4096], 4096, "uniform", id="a full step"),
        pytest.param([1000, 37], 1003, "uniform", id="ragged, fewer than announced"),
        pytest.param([0, 200], 200, "uniform", id="a rank without tokens"),
        pytest.param([0, 0], 0, "uniform", id="no tokens anywhere"),
        pytest.param([300, 200], 300, "one expert", id="all tokens to one expert"),
        pytest.param([300, 200], 300, "holes", id="ids of -1 and past the end"),
    ],
)
def test_transport_is_bitwise(ranks: Ranks, counts: list[int], N: int, ids: str) -> None:
    ranks.run(nvlink_calls.there_and_back, Layer(), counts, N, ids, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(Layer(hidden=2048, experts=128), id="narrow rows"),
        pytest.param(Layer(hidden=2880, top_k=4, experts=33), id="hidden and experts not powers of two"),
        pytest.param(Layer(hidden=1000, dtype=torch.float32), id="float32"),
    ],
)
def test_other_layers(ranks: Ranks, layer: Layer) -> None:
    ranks.run(nvlink_calls.there_and_back, layer, [700, 513], 700, "holes", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("layer", "counts", "N"),
    [
        pytest.param(Layer(fp8=True), [1, 1], 1, id="one token each"),
        pytest.param(Layer(fp8=True), [128, 100], 128, id="as many tokens as programs"),
        pytest.param(Layer(fp8=True), [4096, 4096], 4096, id="a full step"),
        pytest.param(Layer(hidden=2048, experts=128, fp8=True), [1000, 37], 1003, id="narrow rows, ragged"),
        pytest.param(Layer(hidden=2944, experts=33, fp8=True), [700, 0], 700, id="23 groups, a rank without tokens"),
        pytest.param(Layer(hidden=1024, dtype=torch.float16, fp8=True), [300, 200], 300, id="float16"),
    ],
)
def test_rows_in_fp8_are_bitwise_what_quantising_first_gives(
    ranks: Ranks, layer: Layer, counts: list[int], N: int
) -> None:
    ranks.run(nvlink_calls.there_and_back, layer, counts, N, "holes", timeout_s=TIMEOUT_S)


both = pytest.mark.parametrize("fp8", [False, True], ids=["as they are", "fp8"])


@both
def test_graphs_of_every_size_replay_in_turn(ranks: Ranks, fp8: bool) -> None:
    ranks.run(nvlink_calls.replay_graphs, Layer(fp8=fp8), [1, 8, 64, 128, 4096], timeout_s=TIMEOUT_S)


@both
@pytest.mark.parametrize("streams", [1, 2], ids=["one stream", "a stream each"])
def test_two_calls_in_flight(ranks: Ranks, streams: int, fp8: bool) -> None:
    ranks.run(nvlink_calls.two_in_flight, Layer(fp8=fp8), streams, timeout_s=TIMEOUT_S)


def test_a_third_call_in_flight_is_refused(ranks: Ranks) -> None:
    said = ranks.run(nvlink_calls.third_in_flight, Layer(), timeout_s=TIMEOUT_S)
    assert all("2 calls are in flight already" in s for s in said)


@both
def test_random_steps(ranks: Ranks, fp8: bool) -> None:
    seed = random.randrange(10**9)
    layer = Layer(hidden=2048, experts=64, fp8=fp8)
    steps = ranks.run(nvlink_calls.stress, layer, seed, 20.0, timeout_s=TIMEOUT_S)
    print(f"seed {seed}: {steps[0]} steps")


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_lost_rank_is_named(ranks: Ranks, phase: str) -> None:
    hidden = {"dispatch": 64, "combine": 128}[phase]  # buffers of its own: they are lost with the rank
    first, second = ranks.run(nvlink_calls.lose_rank_1, Layer(hidden=hidden), phase, timeout_s=TIMEOUT_S)[0]
    assert f"nothing came from rank 1 in the {phase} of step 3" in first
    assert second == first
