"""How the grouped GEMMs are launched: grids that the host can know, and what the copy engine takes."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_moe_modular.kernels.align_rows import AlignedRows
from vllm_moe_modular.kernels.gemm_tiles import HOPPER_SHARED_MEMORY_BYTES, GemmTile


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU; 1 where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Of one program; where the interpreter runs, Hopper's, so that it tests Hopper's tiles."""
    if device.type != "cuda":
        return HOPPER_SHARED_MEMORY_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@cache
def gpu_name(device: torch.device) -> str:
    """As torch names the model; empty: no GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Programmatic dependent launch, and the copy engine behind tensor descriptors: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


TRIED_GLUON = "3.6."
"""Releases of Triton whose Gluon was tried: it is experimental and changes from one to the next."""


@cache
def _has_specialized(device: torch.device) -> bool:
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return is_hopper and triton.__version__.startswith(TRIED_GLUON)


def can_specialize(w13: torch.Tensor, w2: torch.Tensor, *, interleaved: bool) -> bool:
    """Whether `specialized_gemm` and `specialized_gemm_fp8` take experts with these weights.

    Args:
        w13: [E, 2F, H].
        w2: [E, H, F].
        interleaved: gates and ups, column by column.
    """
    H, F = w2.shape[1:]
    is_fp8 = w13.element_size() == 1
    fits = H % 256 == 0 and F % 128 == 0 if is_fp8 else w13.element_size() == 2 and H % 64 == 0
    return fits and not interleaved and _has_specialized(w2.device) and takes_descriptor(w13) and takes_descriptor(w2)


def takes_descriptor(t: torch.Tensor) -> bool:
    """Whether the copy engine can read `t`: contiguous rows of a multiple of 16 bytes, 16-byte aligned."""
    row_bytes = t.shape[-1] * t.element_size()
    has_copy_engine = t.device.type == "cpu" or has_dependent_launch(t.device)  # Triton's interpreter has one
    return has_copy_engine and t.is_contiguous() and row_bytes % 16 == 0 and t.data_ptr() % 16 == 0


def grid_of(rows: AlignedRows, tiles_across: int, tile: GemmTile, device: torch.device) -> tuple[int]:
    """One program per tile that there may be, or as many as run at a time."""
    most = rows.blocks.shape[0] * tiles_across
    if tile.programs_per_sm == 0:
        return (most,)
    return (min(most, tile.programs_per_sm * multiprocessors(device)),)


def grid_over(most_tiles: int, device: torch.device, *, programs_per_sm: int) -> tuple[int]:
    """For programs that go through tiles whose number the device knows: as many as run at a time or may be needed."""
    return (max(1, min(most_tiles, programs_per_sm * multiprocessors(device))),)


@triton.jit
def tile_in_group(tile, num_blocks, tiles_across, GROUP_R: tl.constexpr):
    """The block of rows and the column of a tile: GROUP_R blocks side by side over all columns share weights in L2."""
    first = tile // (GROUP_R * tiles_across) * GROUP_R
    height = tl.minimum(num_blocks - first, GROUP_R)
    within = tile % (GROUP_R * tiles_across)
    return first + within % height, within // height
