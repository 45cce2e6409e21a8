"""A folder that appears whole or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_moe_modular.testing.checkpoints.families import CheckpointError


@contextmanager
def made_beside(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder to write into; what it holds at the end of the block is moved into `out`, after an error nothing is.

    Raises `CheckpointError` when `out` is a file, holds anything while `force` is not given, holds weights of other
    names, or cannot be written.
    """
    if out.is_file():
        raise CheckpointError(f"{out} is a file; name a folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise CheckpointError(f"{out} is not empty; name another folder, or pass --force to replace files")
    others = sorted(f.name for f in out.glob("*.safetensors*") if f.name != "model.safetensors") if out.is_dir() else []
    if others:
        raise CheckpointError(
            f"{out} holds other weights ({', '.join(others[:3])}), which a loader would mix up with these; "
            "name another folder"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            yield Path(scratch)
            out.mkdir(exist_ok=True)
            for made in Path(scratch).iterdir():
                shutil.move(made, out / made.name)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}; name a folder that can be written") from error
