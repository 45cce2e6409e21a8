"""The quantised checkpoints: laid out as vLLM's loaders read them, and each with a twin of exactly the same numbers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_moe_modular.testing.checkpoints import FAMILIES, QUANTIZATIONS, CheckpointError, dequantise, make_checkpoint
from vllm_moe_modular.testing.reference_tokens import default_prompts, greedy_tokens_and_margins, load_model

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")

H, F, E = 256, 128, 8
EXPERT = "model.layers.1.mlp.experts.3."
SHARED = "model.layers.1.mlp.experts."
# Of gate_proj [F, H] and down_proj [H, F]; of gate_up_proj [E, 2F, H] and down_proj [E, H, F] in gpt_oss.
LAYOUT = {
    "fp8_block": {
        f"{EXPERT}gate_proj.weight": (torch.float8_e4m3fn, (F, H)),
        f"{EXPERT}gate_proj.weight_scale_inv": (torch.float32, (1, 2)),
        f"{EXPERT}down_proj.weight": (torch.float8_e4m3fn, (H, F)),
        f"{EXPERT}down_proj.weight_scale_inv": (torch.float32, (2, 1)),
    },
    "fp8_tensor": {
        f"{EXPERT}gate_proj.weight": (torch.float8_e4m3fn, (F, H)),
        f"{EXPERT}gate_proj.weight_scale": (torch.float32, ()),
        f"{EXPERT}down_proj.weight": (torch.float8_e4m3fn, (H, F)),
        f"{EXPERT}down_proj.weight_scale": (torch.float32, ()),
    },
    "fp8_channel": {
        f"{EXPERT}gate_proj.weight": (torch.float8_e4m3fn, (F, H)),
        f"{EXPERT}gate_proj.weight_scale": (torch.float32, (F, 1)),
        f"{EXPERT}down_proj.weight": (torch.float8_e4m3fn, (H, F)),
        f"{EXPERT}down_proj.weight_scale": (torch.float32, (H, 1)),
    },
    "awq": {
        f"{EXPERT}gate_proj.qweight": (torch.int32, (H, F // 8)),
        f"{EXPERT}gate_proj.qzeros": (torch.int32, (H // 64, F // 8)),
        f"{EXPERT}gate_proj.scales": (torch.float16, (H // 64, F)),
        f"{EXPERT}down_proj.qweight": (torch.int32, (F, H // 8)),
        f"{EXPERT}down_proj.qzeros": (torch.int32, (F // 64, H // 8)),
        f"{EXPERT}down_proj.scales": (torch.float16, (F // 64, H)),
    },
    "mxfp4": {
        f"{SHARED}gate_up_proj_blocks": (torch.uint8, (E, 2 * F, H // 32, 16)),
        f"{SHARED}gate_up_proj_scales": (torch.uint8, (E, 2 * F, H // 32)),
        f"{SHARED}gate_up_proj_bias": (torch.bfloat16, (E, 2 * F)),
        f"{SHARED}down_proj_blocks": (torch.uint8, (E, H, F // 32, 16)),
        f"{SHARED}down_proj_scales": (torch.uint8, (E, H, F // 32)),
        f"{SHARED}down_proj_bias": (torch.bfloat16, (E, H)),
    },
}
CONFIG = {
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "fp8_tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8_channel": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    "mxfp4": {"quant_method": "mxfp4"},
}
# The largest error of a weight, as a part of the largest of its tensor. fp8: half of the last of 4 significant bits;
# awq: one step, 2/15 of it by a scale up to 9/8 too large; mxfp4: 1 of 5, which lies between 4 and 6.
STEP = {"fp8_block": 1 / 16, "fp8_tensor": 1 / 16, "fp8_channel": 1 / 16, "awq": 1 / 6, "mxfp4": 1 / 5}


def family_of(kind: str) -> str:
    return (QUANTIZATIONS[kind].families or ("qwen3_moe",))[0]


def weights(folder: Path) -> dict[str, "torch.Tensor"]:
    return safetensors.load_file(folder / "model.safetensors")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(QUANTIZATIONS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder named after its kind, with its twin beside it."""
    folder = tmp_path_factory.mktemp("made") / request.param
    make_checkpoint(family_of(request.param), folder, quantization=request.param)
    dequantise(folder, folder.parent / "twin")
    return folder


@pytest.fixture
def twin(checkpoint: Path) -> Path:
    return checkpoint.parent / "twin"


def test_tensors_are_those_of_the_loaders(checkpoint: Path) -> None:
    made = weights(checkpoint)
    layout = LAYOUT[checkpoint.name]
    assert {name: (made[name].dtype, tuple(made[name].shape)) for name in layout} == layout
    stems = (f"{EXPERT}gate_proj.", f"{EXPERT}down_proj.", f"{SHARED}gate_up_proj", f"{SHARED}down_proj")
    assert {name for name in made if name.startswith(stems)} == set(layout)
    assert {tensor.dtype for name, tensor in made.items() if ".experts." not in name} == {torch.bfloat16}


def test_config_names_the_kind_and_every_other_linear_layer(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    said = config["quantization_config"]
    assert said.items() >= CONFIG[checkpoint.name].items()
    assert (config["hidden_size"], config["dtype"], config["torch_dtype"]) == (H, "bfloat16", "bfloat16")
    ignored = said["ignore" if checkpoint.name == "fp8_channel" else "modules_to_not_convert"]
    attention = [f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qkvo"]
    router = "router" if checkpoint.name == "mxfp4" else "gate"
    assert sorted(ignored) == sorted([*attention, *(f"model.layers.{i}.mlp.{router}" for i in (0, 1)), "lm_head"])


def test_channel_scheme_is_that_of_compressed_tensors(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "made", quantization="fp8_channel", layers=1)
    (group,) = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert group["targets"] == ["Linear"]
    for numbers, strategy, dynamic in (("weights", "channel", False), ("input_activations", "token", True)):
        assert group[numbers] == {
            **{"num_bits": 8, "type": "float", "symmetric": True},
            **{"strategy": strategy, "dynamic": dynamic},
        }


def by_hand(kind: str, made: dict[str, "torch.Tensor"], row: int, column: int) -> float:
    """Element [row, column] of the down projection [out, in] of expert 3, by the definition of each format."""
    stem = f"{EXPERT}down_proj."
    if kind.startswith("fp8"):
        scale = {
            "fp8_block": lambda: made[f"{stem}weight_scale_inv"][row // 128, column // 128],
            "fp8_tensor": lambda: made[f"{stem}weight_scale"],
            "fp8_channel": lambda: made[f"{stem}weight_scale"][row, 0],
        }[kind]()
        return float(made[f"{stem}weight"].float()[row, column]) * float(scale)
    if kind == "awq":
        shift = 4 * [0, 4, 1, 5, 2, 6, 3, 7][row % 8]  # where output `row` of 8 lies
        code, zero = (
            int(made[stem + part][index, row // 8]) >> shift & 15
            for part, index in (("qweight", column), ("qzeros", column // 64))
        )
        return (code - zero) * float(made[f"{stem}scales"][column // 64, row])
    byte = int(made[f"{SHARED}down_proj_blocks"][3, row, column // 32, column % 32 // 2])
    code = byte >> 4 if column % 2 else byte & 15
    magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code & 7]
    exponent = int(made[f"{SHARED}down_proj_scales"][3, row, column // 32]) - 127
    return (-1 if code & 8 else 1) * magnitude * 2.0**exponent


def test_twin_is_what_the_format_defines(checkpoint: Path, twin: Path) -> None:
    made, kind = weights(checkpoint), checkpoint.name
    whole = weights(twin)
    down = whole[f"{SHARED}down_proj"][3].t() if kind == "mxfp4" else whole[f"{EXPERT}down_proj.weight"]
    assert down.shape == (H, F)
    places = [(row, column) for row in (*range(9), 127, 128, 255) for column in (*range(9), 31, 32, 63, 64, 127)]
    assert [float(down[place]) for place in places] == [by_hand(kind, made, *place) for place in places]


def test_twin_is_the_unquantised_model_within_a_step(checkpoint: Path, twin: Path, tmp_path: Path) -> None:
    plain = weights(make_checkpoint(family_of(checkpoint.name), tmp_path / "plain", hidden=H, intermediate=F))
    whole = weights(twin)
    assert {name: tensor.shape for name, tensor in whole.items()} == {n: t.shape for n, t in plain.items()}
    for name, tensor in whole.items():
        step = STEP[checkpoint.name] if ".experts." in name and "bias" not in name else 2**-8
        assert (tensor - plain[name]).abs().max() <= step * plain[name].abs().max(), name


def test_bfloat16_holds_every_number_of_the_twin(checkpoint: Path, twin: Path) -> None:
    whole = weights(twin)
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}
    assert all(torch.equal(tensor.bfloat16().float(), tensor) for tensor in whole.values())
    assert "quantization_config" not in json.loads((twin / "config.json").read_text())
    assert (twin / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()


def test_twin_behaves(twin: Path) -> None:
    """As the unquantised checkpoints do: no tie, tokens that vary, no end before the last token."""
    model = load_model(twin)
    for prompt in default_prompts(3, longest=40, shortest=10):
        tokens, margins = greedy_tokens_and_margins(model, prompt, 12)
        assert min(margins) > 3e-4
        assert len(set(tokens)) >= 4


def test_gate_and_up_have_one_scale_per_tensor(tmp_path: Path) -> None:
    """vLLM has one for both; it would quantise the one with the smaller scale again."""
    made = weights(make_checkpoint("mixtral", tmp_path / "made", quantization="fp8_tensor", layers=1))
    for e in range(E):
        first, third = (made[f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight_scale"] for w in ("w1", "w3"))
        assert torch.equal(first, third)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt_oss"])
def test_every_family_but_gpt_oss_has_quantised_experts_only(family: str, tmp_path: Path) -> None:
    made = weights(make_checkpoint(family, tmp_path / "made", quantization="fp8_block"))
    per_layer = 3 * FAMILIES[family].sizes.experts
    layers = FAMILIES[family].sizes.layers + FAMILIES[family].mtp_layers - FAMILIES[family].dense_layers
    quantised = [name for name, tensor in made.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(quantised) == layers * per_layer
    assert all(".experts." in name for name in quantised)


@pytest.mark.parametrize(
    ("intermediate", "group"),
    [
        pytest.param(256, 128, id="two of the largest"),
        pytest.param(192, 64, id="not a multiple of 128"),
        pytest.param(128, 64, id="only one of 128"),
        pytest.param(64, 32, id="only one of 64"),
    ],
)
def test_both_matrices_have_two_awq_groups_or_more(intermediate: int, group: int, tmp_path: Path) -> None:
    folder = make_checkpoint("olmoe", tmp_path / "made", quantization="awq", intermediate=intermediate, layers=1)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["group_size"] == group
    scales = weights(folder)["model.layers.0.mlp.experts.0.down_proj.scales"]
    assert scales.shape == (intermediate // group, H)


def test_scales_have_four_bits_and_are_not_too_small() -> None:
    from vllm_moe_modular.testing.checkpoints.codecs import round_up_to_4_bits

    wanted = torch.tensor([0.0, 1.0, 1.01, 0.9999, 3e-5, 447.0])
    assert round_up_to_4_bits(wanted).tolist() == [1.0, 1.0, 1.125, 1.0, 2**-15, 448.0]


def test_weights_of_zero_stay_zero() -> None:
    from vllm_moe_modular.testing.checkpoints import codecs

    nothing = torch.zeros(128, 256)
    for parts in (
        codecs.encode_fp8_block(nothing),
        codecs.encode_fp8_tensor(nothing, 0.0),
        codecs.encode_fp8_channel(nothing),
        codecs.encode_awq(nothing, 128),
    ):
        assert torch.equal(codecs.decode(parts), nothing)
    assert torch.equal(codecs.decode(codecs.encode_mxfp4(nothing[None])), nothing[None])


@pytest.mark.parametrize(
    ("family", "kind", "sizes", "says"),
    [
        pytest.param("qwen3_moe", "int3", {}, ["'int3' is not known", "awq", "fp8_block", "mxfp4"], id="unknown kind"),
        pytest.param(
            "llama", "int3", {}, ["'llama' is not known", "'int3' is not known"], id="family and kind unknown"
        ),
        pytest.param("qwen3_moe", "mxfp4", {}, ["mxfp4 is for gpt_oss alone"], id="mxfp4 of another family"),
        pytest.param("gpt_oss", "awq", {}, ["tensors of its own", "choose one of mxfp4"], id="experts in one tensor"),
        pytest.param(
            "olmoe",
            "fp8_block",
            {"hidden": 192, "intermediate": 96, "top_k": 9},
            ["hidden is 192", "intermediate is 96", "multiple of 128", "top_k is 9"],
            id="half a block, and another objection",
        ),
        pytest.param("mixtral", "awq", {"hidden": 64}, ["hidden is 64", "multiple of 128"], id="too narrow for Marlin"),
        pytest.param(
            "deepseek_v3",
            "mxfp4",
            {"hidden": 80},
            ["gpt_oss alone", "quantization mxfp4 wants a multiple of 32"],
            id="family and size",
        ),
    ],
)
def test_every_objection_is_reported(
    family: str, kind: str, sizes: dict[str, int], says: list[str], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as error:
        make_checkpoint(family, tmp_path / "made", quantization=kind, **sizes)
    assert all(part in str(error.value) for part in says), error.value
    assert not (tmp_path / "made").exists()


def test_twin_wants_a_quantised_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        dequantise(tmp_path, tmp_path / "twin")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not quantised"):
        dequantise(tmp_path, tmp_path / "twin")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(CheckpointError, match="the quantised checkpoint itself"):
        dequantise(tmp_path, tmp_path, force=True)
