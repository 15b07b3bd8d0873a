"""Errors name the dataset row with an id outside its table, for any number of ids."""

import pytest
import torch

from dlrm.data.clicks.batch import Batch
from dlrm.data.clicks.datasets import Datasets
from dlrm.data.prefetch import BatchedRows
from dlrm.tasks.splits import bad_ids_named

ONE_EACH = [(torch.tensor([[1, 2], [9, 4], [3, 9]]), None)]
BAGS = [  # the second batch: row 2 has ids 9 | none, row 3 has 1, 9 | 4, 10
    (torch.tensor([9, 9, 0, 9]), torch.tensor([[1, 1], [1, 1]])),
    (torch.tensor([9, 1, 9, 4, 10]), torch.tensor([[1, 0], [2, 2]])),
]


def named(batches, batch_size, sizes, kind=ValueError, match=r"^data: train row", error=None):

    class Rows:
        table_sizes, categorical_names = sizes, ["user", "item"]

        def __len__(self):
            return len(batches)

        def batch(self, index):
            ids, lengths = batches[index]
            count = len(ids if lengths is None else lengths)
            return Batch(torch.zeros(count, 1), ids, torch.zeros(count), lengths)

    rows = Rows()
    rows.batch_size = batch_size
    splits = Datasets(rows, None, None)
    with (
        pytest.raises(kind, match=match) as caught,
        bad_ids_named(splits, "data"),
    ):
        raise RuntimeError(error or "joint_embedding: id 9 of table 1")
    return str(caught.value)


@pytest.mark.parametrize(
    ("batches", "batch_size", "sizes", "message"),
    [
        (ONE_EACH, 3, [10, 5], "row 2, field item: expected an id from 0 to 4, got 9."),
        (ONE_EACH, 3, [9, 10], "row 1, field user: expected an id from 0 to 8, got 9."),
        (BAGS, 2, [10, 10], "row 3, field item, place 1 of the list: expected an id from 0 to 9"),
        (BAGS, 2, [10, 9], "row 0, field item: expected an id from 0 to 8, got 9."),
    ],
)
def test_the_first_bad_id_is_named_by_row_and_feature(batches, batch_size, sizes, message):
    assert message in named(batches, batch_size, sizes)


@pytest.mark.parametrize(("sizes", "error"), [([10, 10], None), ([5, 5], "out of memory")])
def test_other_errors_stay_as_they_are(sizes, error):
    named(ONE_EACH, 3, sizes, RuntimeError, error or "^joint_embedding: id 9 of table 1$", error)


def test_a_row_that_is_set_aside_has_its_number_among_the_training_rows():
    aside = BatchedRows(10, 2, part=(0.7, 1.0))
    datasets = Datasets(BatchedRows(10, 2, part=(0.0, 0.7)), aside, None, aside)
    assert datasets.row_text("set_aside", 2) == "train row 9 (set aside)"
    assert datasets.row_text("test", 2) == "test row 2"
