"""`tune`: what it refuses, what it would do, and going on where it stopped, with a tuner that makes its times up."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from vllm_moe_modular.bench import tile_candidates
from vllm_moe_modular.bench.shapes import BF16, FP8, SHAPES, Shape
from vllm_moe_modular.bench.tuning import TuningError, key_of
from vllm_moe_modular.cli.main import main
from vllm_moe_modular.cli.tune import fill, table_file, table_to_fill
from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.kernels.tuned_tables import TunedCell, TunedTableError, read_table

QWEN_CONFIG = str(Path(__file__).parents[1] / "selection" / "configs" / "qwen3_30b_a3b.json")
QWEN, MIXTRAL = SHAPES["qwen3-30b-a3b"], SHAPES["mixtral-8x7b"]
WORK = [(QWEN, [1, 8]), (MIXTRAL, [1, 8])]


class Tuner:
    """Takes a second for a cell; may be interrupted before one."""

    def __init__(self, interrupted_at: int = 10**9) -> None:
        self.now, self.interrupted_at, self.tuned = 0.0, interrupted_at, list[tuple[str, int]]()

    def __call__(self, shape: Shape, all_rows: Sequence[int]) -> Iterator[TunedCell]:
        for rows in all_rows:
            if len(self.tuned) == self.interrupted_at:
                raise KeyboardInterrupt
            self.now += 1.0
            self.tuned.append((shape.model, rows))
            yield TunedCell(rows, tile_candidates.untuned(shape, rows), grouped_gemm_us=1.0)

    def clock(self) -> float:
        return self.now


class Bar:
    def __init__(self, total: int) -> None:
        self.total, self.done, self.closed = total, 0, False

    def update(self, n: int) -> None:
        self.done += n

    def set_description(self, text: str) -> None:
        assert BF16 in text

    def close(self) -> None:
        self.closed = True


def run(file: Path, tuner: Tuner, seconds: float | None = None, bars: list[Bar] | None = None) -> int:
    bars = [] if bars is None else bars

    def bar(total: int) -> Bar:
        bars.append(Bar(total))
        return bars[-1]

    table = table_to_fill(file, "NVIDIA H200", {"triton": "3.6.0"})
    return fill(table, file, WORK, tuner, progress=bar, seconds=seconds, clock=tuner.clock)


def test_every_cell_is_tuned_once_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, tuner, bars = tmp_path / "table.json", Tuner(), list[Bar]()
    assert run(file, tuner, bars=bars) == 0
    table = read_table(file)
    assert (table.gpu, dict(table.made_with)) == ("NVIDIA H200", {"triton": "3.6.0"})
    assert {shape: [c.rows for c in cells] for shape, cells in table.shapes.items()} == {
        key_of(QWEN): [1, 8], key_of(MIXTRAL): [1, 8],
    }  # fmt: skip
    assert [(bar.total, bar.done, bar.closed) for bar in bars] == [(4, 4, True)]
    assert "qwen3-30b-a3b bfloat16: 2 cells, 2 s" in capsys.readouterr().out


def test_an_interrupted_run_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, first, second, third = tmp_path / "table.json", Tuner(interrupted_at=3), Tuner(), Tuner()
    with pytest.raises(KeyboardInterrupt):
        run(file, first)
    assert run(file, second) == 0
    assert first.tuned + second.tuned == [(s.model, rows) for s, all_rows in WORK for rows in all_rows]
    assert "1 cells tuned, 3 were there already" in capsys.readouterr().out
    assert run(file, third) == 0
    assert not third.tuned


def test_no_cell_is_begun_after_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, tuner = tmp_path / "table.json", Tuner()
    assert run(file, tuner, seconds=0.5) == 1
    assert tuner.tuned == [(QWEN.model, 1)]
    assert "3 cells are left: time ran out" in capsys.readouterr().out
    assert run(file, tuner) == 0


def test_a_table_of_another_gpu_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    run(file, Tuner())
    with pytest.raises(TuningError, match="is the table of NVIDIA H200, and this is NVIDIA H100"):
        table_to_fill(file, "NVIDIA H100", {})
    file.write_text("[]")
    with pytest.raises(TunedTableError, match="takes an object"):
        table_to_fill(file, "NVIDIA H200", {})
    with pytest.raises(TuningError, match="its folder does not exist"):
        table_to_fill(tmp_path / "none" / "table.json", "NVIDIA H200", {})


def test_what_cannot_be_written_is_said_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(TunedTableError, match=r"/proc/x.json cannot be written: .*; name a file"):
        table_to_fill(Path("/proc/x.json"), "NVIDIA H200", {})
    with pytest.raises(MoEModularError, match="cannot be looked for: File name too long"):
        table_file(tmp_path / ("x" * 300), "NVIDIA H200")
    table_to_fill(tmp_path / "table.json", "NVIDIA H200", {})
    assert not list(tmp_path.iterdir()), "nothing is left of the attempt"


@pytest.mark.parametrize("text", ["[" * 200_000, "9" * 5000])
def test_a_config_that_cannot_be_decoded_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    assert main(["tune", "--model", str(file), "--dry-run"]) == 2
    assert f"{file} is not JSON that can be read" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")
def test_needs_a_gpu_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--shape", "8,2,64,32", "--out", str(tmp_path / "table.json")]) == 2
    assert "tune measures a CUDA GPU, and torch sees none here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "name what to tune"),
        (["--shape", "8,2,64"], "--shape 8,2,64: takes E,K,H,F"),
        (["--shape", "8,2,64,x"], "takes E,K,H,F"),
        (["--shape", "2,8,64,32"], "top-k is 8, and there are 2 experts"),
        (["--shape", "8,2,64,32"], "--out names the table"),
        (["--shape", "8,2,64,32", "--dtype", "int4"], "--dtype int4 is not known"),
        (["--shape", "8,2,64,32", "--dtype", "fp8"], "a multiple of 128"),
        (["--model", "gpt-oss-120b", "--dtype", "fp8"], "not interleaved"),
        (["--shape", "8,2,64,32", "--rows", "0"], "--rows and --rounds take whole numbers"),
        (["--shape", "8,2,64,32", "--rows", "12"], "--rows 12: takes powers of two"),
        (["--shape", "8,2,64,32", "--seconds", "-4"], "--seconds -4: takes a number of seconds, more than 0"),
        (["--shape", "8,2,64,32", "--seconds", "nan"], "--seconds nan"),
        (["--shape", f"8,2,128,{'1' * 5000}"], "each of 7 digits at most"),
        (["--shape", "8,2,64,\u0663\u0662"], "takes E,K,H,F"),
        (["--shape", "8,2,64,32", "--ep", "2"], "--shape 8,2,64,32 is one rank's share already"),
        (["--model", "qwen3-30b-a3b", "--tp", "2"], "--model qwen3-30b-a3b is one rank's share already"),
        (["--model", QWEN_CONFIG, "--ep", "0"], "--ep 0: takes a whole number, 1 or more"),
        (["--model", QWEN_CONFIG, "--tp", "-2"], "--tp -2: takes a whole number, 1 or more"),
        (["--model", QWEN_CONFIG, "--ep", "32"], "top-k is 8, and there are 4 experts"),
        (["--model", "m" * 300], "cannot be read: File name too long"),
        (["--model", "no-such-model"], "no-such-model does not exist"),
        (["--model", QWEN_CONFIG, "--ep", "2", "--tp", "2"], "--ep and --tp"),
    ],
)
def test_bad_options_are_named(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *options]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        (["--shape", "8,2,64,32", "8,2,64,32"], ["8,2,64,32 bfloat16: E 8, K 2, H 64, F 32"]),
        (["--model", "qwen3-30b-a3b", "--dtype", "fp8"], [f"qwen3-30b-a3b {FP8}: E 128, K 8, H 2048, F 768"]),
        (["--model", QWEN_CONFIG, "--ep", "4"], ["qwen3_30b_a3b bfloat16: E 32, K 8, H 2048, F 768"]),
        (["--model", QWEN_CONFIG, "--tp", "2"], ["qwen3_30b_a3b bfloat16: E 128, K 8, H 2048, F 384"]),
    ],
)  # fmt: skip
def test_a_dry_run_needs_no_gpu(options: list[str], heads: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *options, "--dry-run", "--rows", "8", "512"]) == 0
    legend, _, told = capsys.readouterr().out.partition("second GEMM.\n")
    assert legend.startswith("A cell is a shape (E experts")
    lines = told.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == heads
    assert len(lines) == 3 * len(heads)
