"""The tensors in which two checkpoints differ."""

import numpy as np

from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.tables import SavedRows


def weights_of(saved, with_state=True):
    """Returns all tensors of a checkpoint, by name, with the state of its optimizers if wanted."""
    found = {name: tensor.float().numpy() for name, tensor in saved.dense.items()}
    for index, table in enumerate(saved.tables):
        found[f"table {index}"] = table
        state = saved.table_state[index] if with_state and saved.table_state else {}
        found |= {f"table {index}, {name}": rows for name, rows in state.items()}
    if with_state:
        for name, tensor in saved.optimizer.items():
            found[f"optimizer {name}"] = tensor.float().numpy()
    return found


def differing(one, other, *, with_state=True, feature_order=None):
    """Returns the names of the weights, and of the state of optimizers, that differ."""
    opened = (Checkpoint(Checkpoint.open(path).path, feature_order) for path in (one, other))
    left, right = (weights_of(saved, with_state) for saved in opened)
    common = {name for name in left.keys() & right.keys() if equal(left[name], right[name])}
    return (left.keys() | right.keys()) - common


def equal(one, other):
    values = (
        side.part(0, side.rows) if isinstance(side, SavedRows) else side for side in (one, other)
    )
    return np.array_equal(*values, equal_nan=True)
