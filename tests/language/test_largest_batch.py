"""The search for the largest batch, on a device whose memory is a number."""

import pytest
import torch

from dlrm.language.command import largest_batch

pytestmark = pytest.mark.long


@pytest.mark.parametrize("most", [1, 7, 64, 1000])
@pytest.mark.parametrize("room", [1, 2, 3, 63, 64, 65, 999, 1000, 5000])
def test_it_is_the_largest_that_fits(room, most):
    tried = []

    def compute(size):
        tried.append(size)
        if size > room:
            raise torch.OutOfMemoryError("full")

    assert largest_batch(compute, most) == min(room, most)
    assert max(tried) <= most
    assert len(tried) <= 22


def test_no_room_at_all_is_an_error_and_other_errors_are_not_hidden():
    def full(size):
        raise torch.OutOfMemoryError("full")

    def wrong(size):
        raise RuntimeError("another")

    with pytest.raises(ValueError, match="--batch_size max: not even one"):
        largest_batch(full)
    with pytest.raises(RuntimeError, match="another"):
        largest_batch(wrong)
