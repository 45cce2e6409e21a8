"""One way to make any family: transformers gives the configuration and the weight names, `weights` gives the values."""

import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_moe_modular.testing.checkpoints.families import CheckpointError, Family, Sizes, check_sizes, family_named
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
    seed: int = 0,
    force: bool = False,
) -> Path:
    """Writes a float32 checkpoint with its own tokenizer into `out_dir` and returns that folder.

    `hidden`, `intermediate` (of one expert) and `vocab` are elements, the rest counts; None takes the family's tiny
    default (under 5 MB). A folder that holds anything is refused unless `force`; then files of the same names are
    replaced. Raises `CheckpointError` with every objection. An interrupted call leaves `out_dir` as it was.
    """
    known = family_named(family)
    asked = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k, "layers": layers}
    sizes = replace(known.sizes, **{k: v for k, v in {**asked, "vocab": vocab}.items() if v is not None})
    check_sizes(family, known, sizes)
    out = Path(out_dir)
    if out.is_file():
        raise CheckpointError(f"{out} is a file; name a folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise CheckpointError(f"{out} is not empty; name another folder, or pass --force (force=True) to replace files")
    try:
        _write_beside(known, sizes, out, seed)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}; name a folder that can be written") from error
    return out


def _write_beside(family: Family, sizes: Sizes, out: Path, seed: int) -> None:
    """Makes everything in a folder next to `out`, then moves it in."""
    others = sorted(f.name for f in out.glob("*.safetensors*") if f.name != "model.safetensors") if out.is_dir() else []
    if others:
        raise CheckpointError(
            f"{out} holds other weights ({', '.join(others[:3])}), which a loader would mix up with these; "
            "name another folder"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        _write(family, sizes, Path(scratch), seed)
        out.mkdir(exist_ok=True)
        for made in Path(scratch).iterdir():
            shutil.move(made, out / made.name)


def _write(family: Family, sizes: Sizes, folder: Path, seed: int) -> None:
    from safetensors.torch import save_file

    from vllm_moe_modular.testing.checkpoints.weights import draw_all, mtp_copies, mtp_shapes

    shapes = _save_skeleton(family, sizes, folder)
    for layer in range(sizes.layers, sizes.layers + family.mtp_layers):
        shapes |= mtp_shapes(layer, sizes.hidden)
    tensors = draw_all(shapes, seed=seed)
    for layer in range(sizes.layers, sizes.layers + family.mtp_layers):
        tensors |= {copy: tensors[original].clone() for copy, original in mtp_copies(layer).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _finish_config(folder / "config.json", sizes)
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


def _finish_config(path: Path, sizes: Sizes) -> None:
    """Spells the configuration for transformers 4 and 5 alike: they differ in the rotary keys and the expert count."""
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
