"""One rule for 'close enough': the product may be at most `slack` times as wrong as the obvious code."""

import torch


def assert_as_accurate_as(
    got: torch.Tensor, naive: torch.Tensor, truth: torch.Tensor, *, slack: float = 2.0, floor: float = 1e-6
) -> None:
    """Compare largest errors.

    Args:
        got: the result under test.
        naive: the same by plain torch in the dtype under test.
        truth: the same in float64.
        slack: how many times as wrong as `naive` it may be.
        floor: absolute error that is always granted.

    Raises:
        AssertionError: it is wrong by more, of another shape, or not a number.
    """
    assert got.shape == truth.shape, f"expected shape {list(truth.shape)}, got {list(got.shape)}"
    assert not torch.isnan(got).any(), "NaN in the result: an element was read before it was written"
    if not got.numel():
        return
    ours = (got.double() - truth).abs().max().item()
    theirs = (naive.double() - truth).abs().max().item()
    assert ours <= slack * theirs + floor, f"max error {ours:.3e} against {theirs:.3e} for plain torch"
