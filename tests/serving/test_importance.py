"""Field importance where some fields are planted to matter and others useless."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import dlrm
from dlrm.model.dlrm import DLRM
from dlrm.serving.importance import contributions, permutation_importance
from dlrm.serving.predictor import Predictor
from dlrm.serving.rows.raw import inputs_of_text, text_of_lines


@pytest.fixture(scope="module")
def rows(trained):
    """The predictor, its inputs for the test rows, and labels.

    Clicks depend on the first number and on all ids, most on those of the first tables
    (`trained_model.write_log`); the second and the third number are useless.
    """
    predictor = dlrm.load(trained.checkpoint)
    lines = "\n".join(trained.rows)
    inputs = inputs_of_text(
        predictor.row_transform, text_of_lines(lines.encode(), len(predictor.row_transform.names))
    )
    return predictor, inputs, np.array([line[0] == "1" for line in trained.lines], np.float32)


def test_planted_fields_matter_and_useless_ones_do_not(rows):
    predictor, inputs, labels = rows
    logits = predictor.logits_of(inputs)
    found = {one.field: one for one in permutation_importance(predictor, inputs, labels)}
    *_, last, least = found
    assert {last, least} == {"numerical 1", "numerical 2"}
    for field in ("categorical 0", "categorical 2"):
        assert found[field].low > 0.005
        assert found[field].log_loss_gained > 0.005
    assert abs(found[last].auc_lost) < 0.01
    np.testing.assert_array_equal(predictor.logits_of(inputs), logits)  # inputs are unchanged


def test_the_wide_term_is_part_of_the_contributions(rows):
    """With the wide term alone, each field contributes the weight of its id."""
    predictor, inputs, _ = rows
    config = replace(predictor.model.config, wide=True)
    model = DLRM(config)
    ((weight, _),) = model.wide.table_parameters()
    with torch.no_grad():
        model.output.weight.zero_()
        weight.normal_(generator=torch.Generator().manual_seed(0))
    found = contributions(Predictor(model, predictor.transform, predictor.path), inputs)
    first_rows = np.cumsum([0, *config.embedding_rows[:-1]])
    np.testing.assert_allclose(found[:, 3:], weight.detach().numpy()[inputs.ids + first_rows, 0])
    np.testing.assert_array_equal(found[:, :3], 0)
