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
        beat: called before each block of rows.

    Raises:
        ValueError, OSError: the store cannot be created.
        OtherRankError: the store of another rank cannot be created.
    """
    stores = parameters.store
    if stores is None or all(part.is_open for part in stores.parts.values()):
        return
    with agreed(world, ValueError, OSError):
        for dim, store in stores.parts.items():
            assert isinstance(store, RowStore), "a view is open"
            store.create(fields_of(parameters, dim), _beating(store.initial(), beat))
            store.pin()


def _beating(blocks: Iterable[RowBlock], beat: Callable[[], object]) -> Iterator[RowBlock]:
    for block in blocks:
        beat()
        yield block


def fields_of(parameters: Parameters, dim: int) -> dict[str, Tensor]:
    """Returns the tensors whose rows are in the store of a width, by name."""
    by_row, _, _ = optimizer_state(parameters)
    low, fields = parameters.lower_halves(), {}
    for prefix, weight, _ in _weights_of(parameters, dim):
        key = id(weight)
        fields[f"{prefix}weight"] = weight.detach()
        if key in low:
            fields[f"{prefix}low"] = low[key]
        fields |= {f"{prefix}{name}": value for name, value in by_row.get(key, {}).items()}
    return fields


def _weights_of(parameters: Parameters, dim: int) -> Iterator[tuple[str, Tensor, list[int]]]:
    """Yields the prefix of each weight in the store of a width, the weight and its tables."""
    assert parameters.store is not None
    widths = parameters.store.widths_of(parameters.tables)
    own = (one for one, width in widths if width == dim)
    for index, (weight, tables) in enumerate(own):
        yield prefix_of(index), weight, [*tables]


def load_rows(parameters: Parameters, saved: SavedModel, resume: bool, with_state: bool) -> None:
    """Makes the rows of a checkpoint available in the stores of a model.

    When a run resumes, its stores return to the checkpoint. If a store is open, or nothing is
    trained, a view of the checkpoint's rows replaces it; otherwise it is created anew.

    Raises:
        ValueError, OSError: the rows cannot be read, or a store cannot be created.
    """
    stores, entries = parameters.store, saved.config.get(STORES, [])
    assert stores is not None
    for dim, store in stores.parts.items():
        fields = fields_of(parameters, dim)
        own = next((entry for entry in entries if store.holds(entry)), None)
        same = (e for e in entries if Layout.from_dict(e).tables == store.tables)
        shown = own or next(same, None)
        if shown and not (own and resume) and (store.is_open or not parameters.optimizers):
            store.close()
            view = RowView(shown, fields, store.slots, store.row_bytes, store.memory)
            view.beside, stores.parts[dim] = store.beside, view
        else:
            assert isinstance(store, RowStore), "only another view replaces a view"
            if own and resume:
                store.restore(own, fields)
            else:
                store.create(fields, _blocks(parameters, saved, with_state, dim))
        stores.parts[dim].pin()


def _blocks(
    parameters: Parameters, saved: SavedModel, with_state: bool, dim: int
) -> Iterator[RowBlock]:
    """Yields all rows of a checkpoint that are in the store of a width, as it takes them."""
    assert parameters.store is not None
    store, low, first = parameters.store.parts[dim], parameters.lower_halves(), 0
    for position, rows in enumerate(store.tables.values()):
        for begin in range(0, rows, _ROWS_AT_ONCE):
            count, fields = min(_ROWS_AT_ONCE, rows - begin), {}
            for prefix, weight, tables in _weights_of(parameters, dim):
                number = tables[position]
                values = torch.from_numpy(saved.tables[number].part(begin, count))
                if id(weight) in low:
                    fields[f"{prefix}weight"], fields[f"{prefix}low"] = split_float32(values)
                else:
                    fields[f"{prefix}weight"] = values
                for name, state in saved.table_state[number].items() if with_state else ():
                    fields[prefix + name] = torch.from_numpy(state.part(begin, count))
            yield RowBlock(first + begin, count, {n: v.contiguous() for n, v in fields.items()})
        first += rows
