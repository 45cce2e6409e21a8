"""`vllm-moe-modular checkpoint`, and what the command line says when it is used wrongly."""

import json
from pathlib import Path

import pytest

from vllm_moe_modular.cli.main import main

pytest.importorskip("transformers")


def test_makes_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiny"
    arguments = ["--hidden", "128", "--experts", "16", "--top-k", "4", "--layers", "1", "--seed", "3"]
    assert main(["checkpoint", "qwen3_moe", str(out), *arguments]) == 0
    config = json.loads((out / "config.json").read_text())
    names = ("hidden_size", "num_experts", "num_experts_per_tok", "num_hidden_layers")
    assert [config[name] for name in names] == [128, 16, 4, 1]
    assert f"vllm serve {out}" in capsys.readouterr().out


def test_makes_a_quantised_checkpoint_and_its_twin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, twin = tmp_path / "fp8", tmp_path / "twin"
    assert main(["checkpoint", "olmoe", str(out), "--quantization", "fp8_block", "--twin", str(twin)]) == 0
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    assert "quantization_config" not in json.loads((twin / "config.json").read_text())
    printed = capsys.readouterr().out
    assert f"vllm serve {out} --dtype bfloat16" in printed
    assert f"{twin}: the same weights unquantised" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["llama"], ["'llama'", "mixtral", "qwen3_moe"], id="unknown family"),
        pytest.param(["mixtral", "--top-k", "9"], ["top_k is 9", "among 8 experts"], id="more experts than there are"),
        pytest.param(["mixtral", "--hidden", "100"], ["hidden is 100", "multiple of 32"], id="odd hidden size"),
        pytest.param(["olmoe", "--quantization", "mxfp4"], ["mxfp4 is for gpt_oss alone"], id="kind of another family"),
        pytest.param(["olmoe", "--twin", "twin"], ["--twin", "--quantization"], id="twin of what is not quantised"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, *rest = arguments
    assert main(["checkpoint", family, str(tmp_path / "out"), *rest]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert all(part in printed.err for part in says), printed.err
    assert not (tmp_path / "out").exists()


def test_full_folder_needs_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["checkpoint", "olmoe", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["checkpoint", "olmoe", str(tmp_path), "--force"]) == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_folder_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "olmoe", "/dev/null/out"]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "cannot write /dev/null/out" in printed.err
