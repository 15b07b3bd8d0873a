"""Comparisons that several tests of the ops share."""

import torch


def assert_as_close_as_reference(actual, reference, exact):
    """Half precision: at most twice the reference's own error against float64, or one rounding."""
    actual, reference, exact = actual.detach(), reference.detach(), exact.detach()
    if exact.numel() == 0:
        assert actual.shape == exact.shape
        return
    rounding = torch.finfo(actual.dtype).eps / 2 * exact.abs().max()
    allowed = max(2 * (reference.double() - exact).abs().max(), rounding)
    torch.testing.assert_close(actual.double(), exact, atol=float(allowed), rtol=0)
