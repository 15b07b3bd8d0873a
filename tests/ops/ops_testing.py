"""Comparisons shared by tests of the ops."""

import torch


def assert_as_close_as_reference(actual, reference, exact):
    """Allows twice the reference's error against float64, or one half-precision rounding."""
    actual, reference, exact = actual.detach(), reference.detach(), exact.detach()
    if exact.numel() == 0:
        assert actual.shape == exact.shape
        return
    rounding = torch.finfo(actual.dtype).eps / 2 * exact.abs().max()
    allowed = max(2 * (reference.double() - exact).abs().max(), rounding)
    torch.testing.assert_close(actual.double(), exact, atol=float(allowed), rtol=0)
