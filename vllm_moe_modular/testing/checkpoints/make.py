"""One way to make any family: transformers gives the configuration and the weight names, `weights` gives the values."""

import importlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_moe_modular.testing.checkpoints.families import (
    FAMILIES,
    CheckpointError,
    Family,
    Sizes,
    name_objections,
    size_objections,
)
from vllm_moe_modular.testing.checkpoints.folder import made_beside
from vllm_moe_modular.testing.checkpoints.quantization import QUANTIZATIONS, quantization_objections, sizes_for
from vllm_moe_modular.testing.checkpoints.tokenizer import write_tokenizer

SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make_checkpoint(
    family: str,
    out_dir: Path | str,
    *,
    hidden: int | None = None,
    intermediate: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    layers: int | None = None,
    vocab: int | None = None,
    quantization: str | None = None,
    config: Mapping[str, object] | None = None,
    seed: int = 0,
    force: bool = False,
) -> Path:
    """Writes a checkpoint with its own tokenizer into `out_dir` and returns that folder.

    `hidden`, `intermediate` (of one expert) and `vocab` are elements, the rest counts; None takes the tiny default of
    the family, or of the quantisation (a few MB). Weights are float32; with a `quantization` (one of
    `QUANTIZATIONS`) those of the routed experts are quantised and all others bfloat16. `config` has further entries of
    the configuration, as transformers spells them. A folder that holds anything is refused unless `force`; then files
    of the same names are replaced. Raises `CheckpointError` with every objection. An interrupted call leaves `out_dir`
    as it was.
    """
    chosen = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k, "layers": layers}
    known, sizes = _checked(family, quantization, {**chosen, "vocab": vocab})
    known = replace(known, config={**known.config, **(config or {})})
    with made_beside(Path(out_dir), force=force) as folder:
        _write(known, sizes, folder, quantization, seed)
    return Path(out_dir)


def dequantise(checkpoint: Path | str, out_dir: Path | str, *, force: bool = False) -> Path:
    """Writes the twin of a quantised checkpoint into `out_dir`: the same model, unquantised, in float32.

    Every weight is exactly the number that the quantised tensors stand for, and bfloat16 holds it too. `force` and the
    errors are those of `make_checkpoint`.
    """
    from safetensors.torch import load_file, save_file

    from vllm_moe_modular.testing.checkpoints.quantise import dequantise_tensors

    source = Path(checkpoint)
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source} holds no config.json; name the folder of a checkpoint")
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    if config.pop("quantization_config", None) is None:
        raise CheckpointError(f"{source} is not quantised; use it as it is")
    if source.resolve() == Path(out_dir).resolve():
        raise CheckpointError(f"{source} is the quantised checkpoint itself; name another folder for its twin")
    config["torch_dtype"] = config["dtype"] = "float32"
    with made_beside(Path(out_dir), force=force) as folder:
        for file in source.glob("*.json"):
            shutil.copyfile(file, folder / file.name)
        _write_config(folder / "config.json", config)
        tensors = dequantise_tensors(load_file(source / "model.safetensors"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Path(out_dir)


def _checked(name: str, quantization: str | None, chosen: Mapping[str, int | None]) -> tuple[Family, Sizes]:
    """The family and its sizes with those that were chosen; raises a `CheckpointError` with every objection."""
    unknown = name_objections("checkpoint family", name, FAMILIES)
    if quantization is not None:
        unknown += name_objections("quantization", quantization, QUANTIZATIONS)
    if unknown:
        raise CheckpointError("; ".join(unknown))
    family = FAMILIES[name]
    sizes = replace(sizes_for(family, quantization), **{k: v for k, v in chosen.items() if v is not None})
    objections = size_objections(name, family, sizes)
    if quantization:
        objections += quantization_objections(name, family, quantization, sizes)
    if objections:
        raise CheckpointError(f"cannot make a {name} checkpoint: {'; '.join(objections)}")
    return family, sizes


def _write(family: Family, sizes: Sizes, folder: Path, quantization: str | None, seed: int) -> None:
    from safetensors.torch import save_file

    from vllm_moe_modular.testing.checkpoints.quantise import quantise
    from vllm_moe_modular.testing.checkpoints.weights import draw_all, mtp_copies, mtp_shapes

    shapes = _save_skeleton(family, sizes, folder)
    for layer in range(sizes.layers, sizes.layers + family.mtp_layers):
        shapes |= mtp_shapes(layer, sizes.hidden)
    tensors = draw_all(shapes, seed=seed)
    for layer in range(sizes.layers, sizes.layers + family.mtp_layers):
        tensors |= {copy: tensors[original].clone() for copy, original in mtp_copies(layer).items()}
    config = _portable_config(folder / "config.json", sizes)
    if quantization:
        tensors, ignored = quantise(tensors, quantization, family, sizes)
        config["quantization_config"] = QUANTIZATIONS[quantization].config(sizes, ignored)
        config["torch_dtype"] = config["dtype"] = "bfloat16"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(folder / "config.json", config)
    write_tokenizer(folder, sizes.vocab)


def _save_skeleton(family: Family, sizes: Sizes, folder: Path) -> dict[str, tuple[int, ...]]:
    """Has transformers write its own checkpoint, which fixes the names that loaders expect; returns name and shape."""
    from safetensors import safe_open

    transformers: Any = importlib.import_module("transformers")  # Any: its own types are incomplete
    # The decoder part of a prediction layer is one more decoder layer.
    skeleton = replace(sizes, layers=sizes.layers + family.mtp_layers)
    config = transformers.AutoConfig.for_model(family.model_type, **family.config_for(skeleton), **SPECIAL_IDS)
    with _no_progress_bar():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="1TB")
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping


def _portable_config(path: Path, sizes: Sizes) -> dict[str, Any]:
    """The configuration spelt for transformers 4 and 5 alike: they differ in the rotary keys and the expert count."""
    config: dict[str, Any] = json.loads(path.read_text())
    config["num_hidden_layers"] = sizes.layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: sizes.layers]
    rotary = config.get("rope_parameters")
    if rotary is not None:
        config["rope_theta"] = rotary["rope_theta"]
        if rotary["rope_type"] != "default":
            config["rope_scaling"] = {k: v for k, v in rotary.items() if k != "rope_theta"}
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    config["torch_dtype"] = config["dtype"] = "float32"
    return config


def _write_config(path: Path, config: dict[str, Any]) -> None:
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    logging: Any = importlib.import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
