"""Every interaction has the width, the padding and the exported form that it declares."""

import pytest
import torch
import torch.nn.functional as F

from dlrm.model.layers.interaction import INTERACTIONS

SHAPES = [(9, 8), (1, 4), (7, 3), (27, 16)]  # vectors per sample, and their width


@pytest.fixture(params=INTERACTIONS)
def kind(request):
    return INTERACTIONS[request.param]


def vectors(num_vectors, dim, device="cpu", batch=5):
    random = torch.Generator().manual_seed(num_vectors)
    dense = torch.randn(batch, dim, generator=random)
    return dense.to(device), torch.randn(batch, num_vectors - 1, dim, generator=random).to(device)


@pytest.mark.parametrize(("num_vectors", "dim"), SHAPES)
def test_width_and_padding_are_those_of_the_output(kind, num_vectors, dim, device):
    interaction = kind(num_vectors, dim)
    output = interaction(*vectors(num_vectors, dim, device))
    assert output.shape == (5, interaction.width)
    used = interaction.width - interaction.padding
    assert not output[:, used:].any()
    if num_vectors > 1:
        assert output[:, :used].any(0).all()


@pytest.mark.parametrize(("num_vectors", "dim"), SHAPES)
def test_the_exportable_form_has_every_column(kind, num_vectors, dim):
    interaction = kind(num_vectors, dim)
    inputs = vectors(num_vectors, dim)
    module, columns = interaction.exportable()
    expected, found = interaction(*inputs), module(*inputs)
    if columns is None:
        torch.testing.assert_close(found, expected)
        return
    assert {*columns} - {-1} == set(range(interaction.width - interaction.padding))
    known = torch.tensor(columns) >= 0
    padded = F.pad(expected, (0, 1))  # column -1 is padding
    torch.testing.assert_close(found[:, known], padded[:, columns][:, known])


def test_interactions_add_nothing_to_a_checkpoint(kind):
    assert not kind(3, 4).state_dict()
