"""The tiny checkpoints: every family is small, the same everywhere, and wrong experts show in its tokens."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from vllm_moe_modular.testing.checkpoints import FAMILIES, CheckpointError, make_checkpoint
from vllm_moe_modular.testing.reference_tokens import (
    default_prompts,
    greedy_tokens,
    greedy_tokens_and_margins,
    load_model,
)

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")

PROMPTS = default_prompts()
MAX_TOKENS = 24
MOST = 6  # of the 8 prompts
WITH_SHARED = [name for name, family in FAMILIES.items() if family.shared]


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("made") / request.param)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These models are too small to share out; on a busy machine more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def tokens(folder: Path) -> list[list[int]]:
    model = load_model(folder)
    return [greedy_tokens(model, prompt, MAX_TOKENS) for prompt in PROMPTS]


def changed(folder: Path, damaged: Path, damage: Callable[[str, "torch.Tensor"], "torch.Tensor"]) -> int:
    """Of how many prompts the tokens change when `damage(name, weight)` replaces the weights of every layer."""
    damaged.mkdir()
    for file in folder.glob("*.json"):
        (damaged / file.name).write_bytes(file.read_bytes())
    weights = safetensors.load_file(folder / "model.safetensors")
    replaced = {name: damage(name, weight) for name, weight in weights.items()}
    assert any(not torch.equal(replaced[name], weights[name]) for name in weights), "the damage touched no weight"
    safetensors.save_file(replaced, damaged / "model.safetensors", metadata={"format": "pt"})
    return sum(a != b for a, b in zip(tokens(folder), tokens(damaged), strict=True))


def test_is_small_and_float32(checkpoint: Path) -> None:
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < 5_000_000
    dtypes = {weight.dtype for weight in safetensors.load_file(checkpoint / "model.safetensors").values()}
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("expert", [0, 5])
def test_lost_expert_changes_most_prompts(checkpoint: Path, tmp_path: Path, expert: int) -> None:
    marker = FAMILIES[checkpoint.name].expert

    def lose(name: str, weight: "torch.Tensor") -> "torch.Tensor":
        if "{e}" in marker:
            return torch.zeros_like(weight) if marker.format(e=expert) in name else weight
        if marker not in name:
            return weight
        kept = weight.clone()
        kept[expert] = 0
        return kept

    assert changed(checkpoint, tmp_path / "damaged", lose) >= MOST


def test_swapped_experts_change_most_prompts(checkpoint: Path, tmp_path: Path) -> None:
    marker = FAMILIES[checkpoint.name].expert
    weights = safetensors.load_file(checkpoint / "model.safetensors")

    def swap(name: str, weight: "torch.Tensor") -> "torch.Tensor":
        if "{e}" not in marker:
            return weight.roll(1, dims=0) if marker in name else weight
        for here, there in ((2, 3), (3, 2)):
            if (mine := marker.format(e=here)) in name:
                return weights[name.replace(mine, marker.format(e=there))].clone()
        return weight

    assert changed(checkpoint, tmp_path / "damaged", swap) >= MOST


@pytest.mark.parametrize("family", WITH_SHARED)
def test_lost_shared_expert_changes_most_prompts(family: str, tmp_path: Path) -> None:
    shared = FAMILIES[family].shared
    folder = make_checkpoint(family, tmp_path / family)
    lose = lambda name, weight: torch.zeros_like(weight) if shared in name else weight  # noqa: E731
    assert changed(folder, tmp_path / "damaged", lose) >= MOST


def test_greedy_choice_is_no_tie(checkpoint: Path) -> None:
    """Sums in another order move a float32 logit by about 1e-5 here; the closest choice keeps a distance from that."""
    model = load_model(checkpoint)
    made = [greedy_tokens_and_margins(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert min(min(margins) for _, margins in made) > 3e-4
    assert all(len(set(chosen)) >= 5 for chosen, _ in made), "tokens hardly vary"
    assert all(len(chosen) == MAX_TOKENS for chosen, _ in made), "end of sequence stopped the generation"


def test_routing_uses_every_expert(tmp_path: Path) -> None:
    model = load_model(make_checkpoint("qwen3_moe", tmp_path / "made"))
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPTS[0]]), output_router_logits=True).router_logits
    used = [set(layer.topk(2).indices.flatten().tolist()) for layer in logits]
    assert used == [set(range(8))] * 2


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        make_checkpoint("olmoe", tmp_path / name, seed=seed) / "model.safetensors"
        for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_sizes_are_what_was_asked(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "made", hidden=128, intermediate=96, experts=16, top_k=4, layers=3)
    config = json.loads((folder / "config.json").read_text())
    names = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_hidden_layers")
    assert [config[name] for name in names] == [128, 96, 16, 4, 3]
    weights = safetensors.load_file(folder / "model.safetensors")
    assert weights["model.layers.2.mlp.experts.15.gate_proj.weight"].shape == (96, 128)


def test_expert_names_are_those_of_the_loaders(checkpoint: Path) -> None:
    """The names that vLLM's loaders know, also where transformers itself holds the experts of a layer in one tensor."""
    family = FAMILIES[checkpoint.name]
    names = safetensors.load_file(checkpoint / "model.safetensors")
    last = re.escape(family.expert.format(e=family.sizes.experts - 1))
    layers = {match[1] for name in names if (match := re.search(rf"layers\.(\d+){last}", name))}
    total = family.sizes.layers + family.mtp_layers
    assert layers == {str(layer) for layer in range(family.dense_layers, total)}


def test_mtp_layer_follows_the_last_decoder_layer(tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek_v3_mtp", tmp_path / "made")
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (3, 1)
    weights = safetensors.load_file(folder / "model.safetensors")
    own = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens", "mlp.gate")
    assert [f"model.layers.3.{name}.weight" in weights for name in own] == [True] * len(own)


def test_weights_keep_the_scale_of_their_input() -> None:
    from vllm_moe_modular.testing.checkpoints.weights import draw

    weight = draw("model.layers.0.mlp.experts.0.gate_proj.weight", (512, 256), seed=0)
    assert weight.std().item() == pytest.approx(1 / math.sqrt(256), rel=0.02)


def test_every_id_decodes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint("mixtral", tmp_path / "made"))
    assert len(tokenizer) == 320
    assert tokenizer.decode(tokenizer("Grüße, モデル")["input_ids"]) == "Grüße, モデル"
    assert all(tokenizer.decode([i]) for i in range(320))


def test_unknown_family_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'llama'.*deepseek_v2.*qwen3_moe"):
        make_checkpoint("llama", tmp_path / "made")


def test_every_objection_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        make_checkpoint("deepseek_v3", tmp_path / "made", hidden=100, experts=7, top_k=9, layers=1)
    for part in ("hidden is 100", "experts is 7", "top_k is 9", "layers is 1"):
        assert part in str(error.value)
    assert not (tmp_path / "made").exists()


def test_full_folder_is_refused_and_force_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        make_checkpoint("olmoe", tmp_path)
    make_checkpoint("olmoe", tmp_path, force=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "model.safetensors").exists()


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, vllm_moe_modular.testing.checkpoints, vllm_moe_modular.testing.serving, vllm_moe_modular.cli.main"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules, 'transformers' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "False"]
