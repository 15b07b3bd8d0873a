"""Checkpoints of tables whose rows are in a store.

The configuration of such a checkpoint has, under "stores", the location of each rank's store and
the record that restores its rows (`RowStore.checkpoint`); there are no files of tables.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from dlrm.distributed import World, agreed
from dlrm.ops import split_float32
from dlrm.store.layout import Layout, RowBlock
from dlrm.store.row_store import RowStore
from dlrm.store.row_view import RowView
from dlrm.train.checkpoints.saved_model import SavedModel
from dlrm.train.checkpoints.saved_rows import STORES, prefix_of
from dlrm.train.checkpoints.state import Parameters, optimizer_state

_ROWS_AT_ONCE = 1 << 14


def start_store(
    parameters: Parameters, world: World, beat: Callable[[], object] = lambda: None
) -> None:
    """Creates the store of a new training, with the initial rows, if it uses one.

    Args:
        parameters: parameters of the training.
        world: the processes.
        beat: called before each block of rows.

    Raises:
        ValueError, OSError: the store cannot be created.
        OtherRankError: the store of another rank cannot be created.
    """
    store = parameters.store
    if isinstance(store, RowStore) and not store.is_open:
        with agreed(world, ValueError, OSError):
            store.create(fields_of(parameters), _beating(store.initial(), beat))
            store.pin()


def _beating(blocks: Iterable[RowBlock], beat: Callable[[], object]) -> Iterator[RowBlock]:
    for block in blocks:
        beat()
        yield block


def fields_of(parameters: Parameters) -> dict[str, Tensor]:
    """Returns the tensors whose rows are stored, by name."""
    by_row, _, _ = optimizer_state(parameters)
    low, fields = parameters.lower_halves(), {}
    for index, (weight, _) in enumerate(parameters.tables):
        prefix, key = prefix_of(index), id(weight)
        fields[f"{prefix}weight"] = weight.detach()
        if key in low:
            fields[f"{prefix}low"] = low[key]
        fields |= {f"{prefix}{name}": value for name, value in by_row.get(key, {}).items()}
    return fields


def load_rows(parameters: Parameters, saved: SavedModel, resume: bool, with_state: bool) -> None:
    """Makes the rows of a checkpoint available in the store of a model.

    When a run resumes, its store returns to the checkpoint. If the store is open, or nothing is
    trained, a view of the checkpoint's rows replaces it; otherwise it is created anew.

    Raises:
        ValueError, OSError: the rows cannot be read, or the store cannot be created.
    """
    store = parameters.store
    assert store is not None
    fields, entries = fields_of(parameters), saved.config.get(STORES, [])
    own = next((entry for entry in entries if store.holds(entry)), None)
    same = (e for e in entries if Layout.from_dict(e).tables == store.tables)
    shown = own or next(same, None)
    if shown and not (own and resume) and (store.is_open or not parameters.optimizers):
        store.close()
        store = RowView(shown, fields, store.slots, store.row_bytes, store.memory)
        parameters.model.store = store  # type: ignore[assignment]
    else:
        assert isinstance(store, RowStore), "only another view replaces a view"
        if own and resume:
            store.restore(own, fields)
        else:
            store.create(fields, _blocks(parameters, saved, with_state))
    store.pin()


def _blocks(parameters: Parameters, saved: SavedModel, with_state: bool) -> Iterator[RowBlock]:
    """Yields all rows of a checkpoint in the form that a store takes."""
    store, low, first = parameters.store, parameters.lower_halves(), 0
    assert store is not None
    for position, rows in enumerate(store.tables.values()):
        for begin in range(0, rows, _ROWS_AT_ONCE):
            count, fields = min(_ROWS_AT_ONCE, rows - begin), {}
            for index, (weight, tables) in enumerate(parameters.tables):
                number, prefix = [*tables][position], prefix_of(index)
                values = torch.from_numpy(saved.tables[number].part(begin, count))
                if id(weight) in low:
                    fields[f"{prefix}weight"], fields[f"{prefix}low"] = split_float32(values)
                else:
                    fields[f"{prefix}weight"] = values
                for name, state in saved.table_state[number].items() if with_state else ():
                    fields[prefix + name] = torch.from_numpy(state.part(begin, count))
            yield RowBlock(first + begin, count, {n: v.contiguous() for n, v in fields.items()})
        first += rows
