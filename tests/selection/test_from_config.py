import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_modular.selection.from_config import (
    FAMILIES,
    LayerShape,
    ModelConfigError,
    problems_from_config,
    quant_scheme,
    which,
)
from vllm_moe_modular.selection.problem import Problem

CONFIGS = Path(__file__).parent / "configs"
QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def config(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def only(found: list[LayerShape]) -> LayerShape:
    (shape,) = found
    return shape


def ep8(experts: int, top_k: int, hidden: int, intermediate: int, **more: Any) -> Problem:
    sizes = {"num_experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}
    return Problem(**sizes, num_local_experts=experts // 8, dp_size=8, ep_size=8, **more)


FP8 = {"quant_scheme": "fp8 128x128"}
GPT_OSS = {"quant_scheme": "mxfp4", "activation": "swigluoai", "has_bias": True}


@pytest.mark.parametrize(
    ("name", "layers", "numbers", "problem"),
    [
        ("deepseek_v3", 58, "3-60", ep8(256, 8, 7168, 2048, **FP8)),
        ("kimi_k2", 60, "1-60", ep8(384, 8, 7168, 2048, **FP8)),
        ("qwen3_235b_a22b", 94, "0-93", ep8(128, 8, 4096, 1536)),
        ("qwen3_30b_a3b", 48, "0-47", ep8(128, 8, 2048, 768)),
        ("mixtral_8x7b", 32, "0-31", ep8(8, 2, 4096, 14336)),
        ("gpt_oss_120b", 36, "0-35", ep8(128, 4, 2880, 2880, **GPT_OSS)),
        ("llama_4_maverick", 24, "1, 3, ..., 47", ep8(128, 1, 5120, 8192, router_weight_on_input=True)),
        ("glm_4_5", 89, "3-91", ep8(160, 8, 5120, 1536)),
    ],
)
def test_public_models_on_eight_data_parallel_ranks(name: str, layers: int, numbers: str, problem: Problem) -> None:
    assert only(problems_from_config(config(name), tp=1, dp=8, ep=True)) == (problem, layers, numbers)


def test_every_fixture_is_of_a_known_family_and_none_is_left_out() -> None:
    names = {path.stem for path in CONFIGS.glob("*.json")}
    assert len(names) == 8
    for name in names:
        assert problems_from_config(config(name), tp=1, dp=1, ep=False)


@pytest.mark.parametrize(("model_type", "sparse"), [("qwen2_moe", {"decoder_sparse_step": 2}), ("olmoe", {})])
def test_other_families(model_type: str, sparse: dict[str, Any]) -> None:
    small = QWEN | sparse | {"model_type": model_type, "intermediate_size": 1024}
    shape = only(problems_from_config(small, tp=1, dp=1, ep=False))
    assert shape.problem.intermediate == (1024 if model_type == "olmoe" else 768)
    assert shape.which == ("0-3" if model_type == "olmoe" else "1, 3")


def test_layers_listed_as_dense_are_left_out() -> None:
    shape = only(problems_from_config(QWEN | {"mlp_only_layers": [1]}, tp=1, dp=1, ep=True))
    assert (shape.layers, shape.which) == (3, "0, 2-3")


def test_without_expert_parallelism_all_ranks_cut_every_expert() -> None:
    problem = only(problems_from_config(QWEN, tp=2, dp=2, ep=False)).problem
    assert (problem.num_local_experts, problem.intermediate, problem.ep_size) == (128, 192, 1)


def test_experts_that_do_not_divide_evenly_count_the_fullest_rank() -> None:
    assert only(problems_from_config(QWEN, tp=1, dp=6, ep=True)).problem.num_local_experts == 22


def test_redundant_experts_are_physical_ones() -> None:
    problem = only(problems_from_config(QWEN, tp=1, dp=8, ep=True, redundant_experts=32)).problem
    assert (problem.num_experts, problem.num_local_experts, problem.eplb) == (160, 20, True)


@pytest.mark.parametrize(
    ("name", "tp", "dp", "ep", "sequence_parallel"),
    [
        ("deepseek_v3", 2, 4, True, True),
        ("deepseek_v3", 8, 1, True, False),
        ("deepseek_v3", 1, 8, True, False),
        ("deepseek_v3", 2, 4, False, False),
        ("qwen3_30b_a3b", 2, 2, True, True),
        ("llama_4_maverick", 2, 2, True, True),
        ("gpt_oss_120b", 2, 2, True, True),
        pytest.param("mixtral_8x7b", 2, 2, True, False, id="vLLM's Mixtral does not slice the tokens"),
        pytest.param("glm_4_5", 2, 2, True, False, id="vLLM's GLM does not slice the tokens"),
    ],
)
def test_sequence_parallel_as_vllm_decides_it(name: str, tp: int, dp: int, ep: bool, sequence_parallel: bool) -> None:
    assert only(problems_from_config(config(name), tp=tp, dp=dp, ep=ep)).problem.sequence_parallel is sequence_parallel


def test_a_slice_smaller_than_the_scale_blocks_says_enable_expert_parallel() -> None:
    """96 of 768 columns per rank, in blocks of 128."""
    blocks = QWEN | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(ModelConfigError, match=r"each of 8 ranks would hold 96 of the 768.*enable expert parallel"):
        problems_from_config(blocks, tp=8, dp=1, ep=False)
    assert problems_from_config(blocks, tp=8, dp=1, ep=True)


@pytest.mark.parametrize(
    ("quantization", "scheme"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 128x128"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq 4-bit"),
        ({"quant_method": "gptq", "bits": 8}, "gptq 8-bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes 4-bit"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
            "compressed-tensors int4",
        ),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "modelopt NVFP4"),
    ],
)
def test_quantisation_in_a_few_words(quantization: dict[str, Any], scheme: str) -> None:
    assert quant_scheme(quantization) == scheme
    problem = only(problems_from_config(QWEN | {"quantization_config": quantization}, tp=1, dp=1, ep=True)).problem
    assert problem.quant_scheme == scheme


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("modules_to_not_convert", "model.layers.0.mlp.experts"),
        ("modules_to_not_convert", "model.layers.0"),
        ("ignore", "re:model.layers.0.mlp.*"),
        ("ignore", "model.layers.0.mlp.experts.5.down_proj"),
        ("ignored_layers", "model.layers.0.*"),
    ],
)
def test_layers_that_stay_unquantised_are_a_shape_of_their_own(key: str, entry: str) -> None:
    awq = {"quant_method": "awq", "bits": 4, key: [entry, "lm_head", "re:.*self_attn.*", "model.layers.1.mlp.gate"]}
    found = problems_from_config(QWEN | {"quantization_config": awq}, tp=1, dp=1, ep=True)
    assert [(s.problem.quant_scheme, s.which) for s in found] == [("none", "0"), ("awq 4-bit", "1-3")]


@pytest.mark.parametrize(
    ("stored", "asked_for", "dtype"),
    [
        ({"torch_dtype": "float16"}, "auto", "float16"),
        ({"dtype": "bfloat16"}, "auto", "bfloat16"),
        pytest.param({"torch_dtype": "float32"}, "auto", "bfloat16", id="vLLM serves float32 checkpoints in bfloat16"),
        ({"torch_dtype": "bfloat16"}, "float32", "float32"),
    ],
)
def test_dtype(stored: dict[str, str], asked_for: str, dtype: str) -> None:
    assert only(problems_from_config(QWEN | stored, tp=1, dp=1, ep=True, dtype=asked_for)).problem.dtype == dtype


def test_an_unknown_model_type_lists_the_known_ones() -> None:
    with pytest.raises(ModelConfigError, match="'mamba' is not known here") as error:
        problems_from_config({"model_type": "mamba"}, tp=1, dp=1, ep=True)
    assert all(name in str(error.value) for name in FAMILIES)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts": None}, "has no num_experts; is it a MoE model?"),
        ({"hidden_size": "2048"}, "hidden_size is '2048'; it must be a whole number, at least 1"),
        ({"num_experts_per_tok": 256}, "num_experts_per_tok is 256, num_experts is 128"),
        ({"decoder_sparse_step": 5}, "none of its layers has experts"),
        ({"model_type": None}, "config.json has no model_type"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a whole number, 10000 at most"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be a whole number, at least 1"),
        ({"num_hidden_layers": "48"}, "num_hidden_layers is '48'; it must be a whole number, at least 1"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelConfigError, match=says.replace("?", r"\?")):
        problems_from_config(QWEN | change, tp=1, dp=1, ep=True)


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ("fp8", "quantization_config is 'fp8'; it must be an object"),
        ({"weight_block_size": 128}, "quantization_config.weight_block_size is 128; it must be a list of two"),
        ({"weight_block_size": [0, 0]}, "weight_block_size is [0, 0]"),
        ({"quantization": "x"}, "quantization_config.quantization is 'x'; it must be an object"),
        ({"config_groups": {"g": {"weights": 5}}}, "config_groups.g.weights is 5"),
        ({"config_groups": {"g": 5}}, "config_groups.g is 5"),
        ({"modules_to_not_convert": 5}, "modules_to_not_convert is 5; it must be a list of names"),
        ({"ignore": ["re:["]}, "an entry of quantization_config.ignore is 're:['"),
    ],
)
def test_a_malformed_quantisation_is_named(quantization: Any, says: str) -> None:
    with pytest.raises(ModelConfigError, match=re.escape(says)):
        problems_from_config(QWEN | {"quantization_config": quantization}, tp=8, dp=1, ep=False)


@pytest.mark.parametrize("listed", [5, "abc", ["1"]])
def test_malformed_dense_layers_are_named(listed: Any) -> None:
    with pytest.raises(ModelConfigError, match=r"mlp_only_layers is .* it must be a list of layer numbers"):
        problems_from_config(QWEN | {"mlp_only_layers": listed}, tp=1, dp=1, ep=True)


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ([4], "4"),
        ([0, 1, 2], "0-2"),
        ([0, 1, 4, 6, 7], "0-1, 4, 6-7"),
        ([3, 7, 11, 15], "3, 7, ..., 15"),
        ([1, 3], "1, 3"),
    ],
)
def test_layer_numbers_for_people(numbers: list[int], told: str) -> None:
    assert which(numbers) == told
