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
    before = [array.copy() for array in inputs.arrays]
    logits = predictor.logits_of(inputs)
    found = {one.field: one for one in permutation_importance(predictor, inputs, labels)}
    assert len(found) == 7
    first, *_, last, least = found
    assert {last, least} == {"numerical 1", "numerical 2"}
    assert first.startswith("categorical ")
    for field in ("categorical 0", "categorical 2"):
        assert found[field].low > 0.005
        assert found[field].log_loss_gained > 0.005
    for field in (last, least):
        assert abs(found[field].auc_lost) < 0.01
    for array, copy in zip(inputs.arrays, before, strict=True):
        np.testing.assert_array_equal(array, copy)
    np.testing.assert_array_equal(predictor.logits_of(inputs), logits)


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


def test_contributions_are_what_growing_inputs_add(rows):
    """Checks each field's derivative by a factor on its input by differences."""
    predictor, inputs, _ = rows
    part = inputs.part(0, 20)
    found = contributions(predictor, part)
    assert found.shape == (20, 7)
    step, model = 1e-2, predictor.model

    def logits(numerical):
        with torch.no_grad():
            return model(numerical, torch.from_numpy(part.ids)).double().numpy()

    numbers = torch.from_numpy(part.numerical).float()
    first_row = 0
    (weight, _), *_ = model.embeddings.table_parameters()
    for field in range(7):
        sides = []
        for factor in (1 + step, 1 - step):
            if field < 3:
                scaled = numbers.clone()
                scaled[:, field] *= factor
                sides.append(logits(scaled))
                continue
            table = slice(first_row, first_row + model.config.embedding_rows[field - 3])
            kept = weight.detach()[table].clone()
            with torch.no_grad():
                weight[table] *= factor
            sides.append(logits(numbers))
            with torch.no_grad():
                weight[table] = kept
        if field >= 3:
            first_row += model.config.embedding_rows[field - 3]
        np.testing.assert_allclose(
            found[:, field], (sides[0] - sides[1]) / (2 * step), atol=0.02, rtol=0.05
        )
