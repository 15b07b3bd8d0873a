"""Attended bags, computed by hand; test_operators.py compares them with plain torch."""

import pytest
import torch
from op_cases import LISTS, attended_inputs

from dlrm import ops


def test_a_known_answer():
    """The neuron is x * c - 1 of items 1 and 3 and candidate 2: 1 and 5; their weights 3 and 11."""
    weight = torch.tensor([[1.0], [3.0], [2.0]])
    ids, lengths = torch.tensor([2, 0, 1]), torch.tensor([[1, 2]])
    offsets = torch.tensor([[0, 0], [3, 3]])
    one, none = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    flat = torch.tensor([[-1.0]]), torch.tensor([[2.0]]), torch.tensor([1.0])
    units = ops.ActivationUnits(none, one, none, *flat)
    found = ops.attended_bag(weight, ids, offsets, lengths, [(1, 0)], units)
    assert found.tolist() == [[[2.0], [1 * 3.0 + 3 * 11.0]]]


def test_bad_ids_and_shapes_are_named():
    weight, ids, offsets, lengths, *units, _ = attended_inputs((37, 16, 36, 50), torch.float32)
    units = ops.ActivationUnits(*units)
    bad = ids.clone()
    bad[0] = 20
    with pytest.raises(
        RuntimeError, match="id 20 of table 0 in batch row 0: expected 0 <= id < 20"
    ):
        ops.attended_bag(weight, bad, offsets, lengths, LISTS, units)
    with pytest.raises(RuntimeError, match="expected lists of fields below 4, got 4"):
        ops.attended_bag(weight, ids, offsets, lengths, [(4, 0), (1, 0)], units)
    with pytest.raises(RuntimeError, match="expected each list once"):
        ops.attended_bag(weight, ids, offsets, lengths, [(1, 0), (1, 0)], units)
    wrong = units._replace(bias=units.bias[:, 1:])
    with pytest.raises(RuntimeError, match=r"expected bias of 2 lists, 36 neurons and dim 16"):
        ops.attended_bag(weight, ids, offsets, lengths, LISTS, wrong)
