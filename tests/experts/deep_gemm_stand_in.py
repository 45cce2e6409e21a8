"""What is used of DeepGEMM, in plain torch and as strict: its grouped GEMMs.

Each refuses what DeepGEMM 2.5 refuses on Hopper, or would copy, computes the rows up to the end of an expert's last
block, and leaves alone those past it.
"""

import torch

__version__ = "2.5.0"

Scaled = tuple[torch.Tensor, torch.Tensor]

ALIGNMENT = 128


def get_mk_alignment_for_contiguous_layout() -> int:
    return ALIGNMENT


def _grouped(
    a_PK: torch.Tensor, b_ENK: torch.Tensor, d_PN: torch.Tensor, grouped_layout: torch.Tensor,
    use_psum_layout: bool, expected_m_for_psum_layout: int,
) -> None:  # fmt: skip
    P, K = a_PK.shape
    E, N, _ = b_ENK.shape
    assert b_ENK.shape[2] == K
    assert d_PN.shape == (P, N)
    assert d_PN.dtype == torch.bfloat16
    assert grouped_layout.shape == (E,)
    assert grouped_layout.dtype == torch.int32
    assert P % ALIGNMENT == 0
    assert use_psum_layout
    assert expected_m_for_psum_layout > 0
    start = 0
    for e, end in enumerate(grouped_layout.tolist()):
        assert start <= end <= P, f"expert {e} ends at {end} and begins at {start}"
        last = -(-end // ALIGNMENT) * ALIGNMENT
        d_PN[start:last] = (a_PK[start:last].float() @ b_ENK[e].float().T).to(d_PN.dtype)
        start = last


def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, grouped_layout: torch.Tensor, *,
    use_psum_layout: bool, expected_m_for_psum_layout: int,
) -> None:  # fmt: skip
    assert a.dtype == b.dtype == torch.bfloat16
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert a.shape[1] % 64 == 0
    _grouped(a, b, d, grouped_layout, use_psum_layout, expected_m_for_psum_layout)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Scaled, b: Scaled, d: torch.Tensor, grouped_layout: torch.Tensor, *,
    use_psum_layout: bool, expected_m_for_psum_layout: int,
) -> None:  # fmt: skip
    (a_PK, a_scales), (b_ENK, b_scales) = a, b
    P, K = a_PK.shape
    E, N, _ = b_ENK.shape
    assert a_PK.dtype == b_ENK.dtype == torch.float8_e4m3fn
    assert a_scales.dtype == b_scales.dtype == torch.float32
    assert a_scales.shape == (P, K // 128)
    assert a_scales.stride() == (1, P), "else it copies them"
    assert b_scales.shape == (E, -(-N // 128), K // 128)
    assert b_scales.is_contiguous()
    a_float = (a_PK.float().unflatten(1, (-1, 128)) * a_scales[..., None]).flatten(1)
    per_row = b_scales.repeat_interleave(128, 1)[:, :N]
    b_float = (b_ENK.float().unflatten(2, (-1, 128)) * per_row[..., None]).flatten(2)
    _grouped(a_float, b_float, d, grouped_layout, use_psum_layout, expected_m_for_psum_layout)


def m_grouped_fp8_gemm_nt_masked(
    a: Scaled, b: Scaled, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> None:  # fmt: skip
    (a_EDK, a_scales), (b_ENK, b_scales) = a, b
    E, D, K = a_EDK.shape
    N = b_ENK.shape[1]
    G = K // 128
    assert a_EDK.dtype == b_ENK.dtype == torch.float8_e4m3fn
    assert b_ENK.shape == (E, N, K)
    assert d.shape == (E, D, N)
    assert d.dtype == torch.bfloat16
    assert all(t.is_contiguous() for t in (a_EDK, b_ENK, b_scales, d, masked_m))
    assert a_scales.dtype == b_scales.dtype == torch.float32
    assert a_scales.shape == (E, D, G)
    assert a_scales.stride() == (G * D, 1, D), "else it copies them"
    assert b_scales.shape == (E, -(-N // 128), G)
    assert masked_m.shape == (E,)
    assert masked_m.dtype == torch.int32
    assert expected_m > 0
    assert D % 128 == 0, "a tile would be stored into the next expert's block"
    per_row = b_scales.repeat_interleave(128, 1)[:, :N]
    for e, rows in enumerate(masked_m.tolist()):
        assert 0 <= rows <= D
        last = -(-rows // 128) * 128
        x = (a_EDK[e, :last].float().unflatten(1, (-1, 128)) * a_scales[e, :last, :, None]).flatten(1)
        w = (b_ENK[e].float().unflatten(1, (-1, 128)) * per_row[e, :, :, None]).flatten(1)
        d[e, :last] = (x @ w.T).to(d.dtype)
