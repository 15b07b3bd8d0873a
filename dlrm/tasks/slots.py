"""Rows of the next batches, read from a store while a batch is computed."""

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dlrm.data.clicks.batch import Batch
from dlrm.model.dlrm import DLRM
from dlrm.step_clock import STORE, part
from dlrm.store.native import FullError
from dlrm.store.row_stores import RowStores, Tickets

_DEPTH = 2  # number of batches whose rows are read ahead


class _Prepared(NamedTuple):
    """A batch with its records and, if there was room, their slots and ticket."""

    batch: Batch
    records: np.ndarray
    found: tuple[np.ndarray, Tickets] | None


class InOrderOfRecords:
    """Adds gradients of slots, within the block, in the order in which those of rows are added.

    torch merges the sparse gradients of micro-batches in the order of their rows' numbers, which
    slots would change. Within the block, a slot's number is therefore the place of its record among
    the batch's records in ascending order.

    Args:
        stores: the stores, whose last batch is the one that gradients are computed for.
        weights: the weights, which have a row for each slot of their store, with its width.
    """

    def __init__(self, stores: RowStores, weights: Sequence[tuple[Tensor, int]]) -> None:
        assert stores.trained is not None, "no batch has been prepared"
        records, slots = map(torch.from_numpy, stores.trained)
        firsts, orders = stores.first_slots, dict[int, _Order]()
        for width, store in stores.parts.items():
            own = slots - firsts[width]
            here = (own >= 0) & (own < store.slots)
            orders[width] = _Order(records[here], own[here])
        self._weights = [(weight, orders[width]) for weight, width in weights]
        self._hooks = list[RemovableHandle]()

    def __enter__(self) -> None:
        self._hooks = [weight.register_hook(order.placed) for weight, order in self._weights]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for weight, order in self._weights:
            if weight.grad is not None:
                weight.grad = order.of_slots(weight.grad)


class _Order:
    """The slots of a batch, and the places of their records in ascending order.

    Args:
        records, slots: of the look-ups of a batch in one store, `[look-ups]`.
    """

    def __init__(self, records: Tensor, slots: Tensor) -> None:
        self._slots, places = slots.unique(return_inverse=True)
        of_slots = torch.empty_like(self._slots)
        of_slots[places] = records
        self._by_record = of_slots.argsort()
        self._places = self._by_record.argsort()

    def placed(self, grad: Tensor) -> Tensor:
        """Returns a gradient of slots as one of places."""
        return _renumbered(grad, self._places[torch.searchsorted(self._slots, grad._indices())])

    def of_slots(self, grad: Tensor) -> Tensor:
        """Returns a gradient of places as one of slots."""
        return _renumbered(grad, self._slots[self._by_record[grad._indices()]])


class Slots:
    """Replaces ids of batches by the slots of their rows.

    Args:
        model: the model whose tables are in a store.
        trains: whether the rows of the batches change.
    """

    def __init__(self, model: DLRM, trains: bool = False) -> None:
        self.model, self.trains = model, trains

    @property
    def store(self) -> RowStores:
        """Returns the model's stores, or the views that have replaced them."""
        assert self.model.store is not None
        return self.model.store

    def ahead(self, batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        """Yields batches whose rows are in memory until the next one is requested.

        It adds the seconds of waiting for a batch's rows to the store's `waited`. No thread
        outlives the generator: exhaust it, or close it.
        """
        pending: deque[tuple[Future[Batch | None], Future[_Prepared | None]]] = deque()
        reader = ThreadPoolExecutor(1, thread_name_prefix="dlrm-store")
        lacking = False  # whether a pending batch has no slots; later ones must not overtake it

        def submit() -> None:
            loaded = reader.submit(next, batches, None)
            pending.append((loaded, reader.submit(prepare, loaded)))

        def prepare(loaded: Future[Batch | None]) -> _Prepared | None:
            nonlocal lacking
            batch = loaded.result()
            if batch is None:
                return None
            records, found = self.records(batch), None
            if not lacking:
                try:
                    found = self.store.prepare(records, ahead=True)
                except FullError:
                    lacking = True
            return _Prepared(batch, records, found)

        try:
            for _ in range(_DEPTH):
                submit()
            while True:
                loaded, preparing = pending.popleft()
                wait([loaded])  # not a wait for the store
                began = perf_counter()
                with part(STORE):
                    prepared = preparing.result()
                    if prepared is None:
                        return
                    slots, ticket = prepared.found or self.store.prepare_anyhow(prepared.records)
                self.store.waited += perf_counter() - began
                if lacking:  # the reader may set it meanwhile, which must not be lost
                    lacking = any(_lacks(future) for _, future in pending)
                submit()
                if self.trains:
                    self.store.mark(ticket)
                    self.store.trained = prepared.records, slots
                try:
                    yield _with_slots(prepared.batch, slots)
                finally:
                    self.store.release(ticket)
        finally:
            reader.shutdown(wait=True, cancel_futures=True)
            for _, future in pending:
                self._give_back(future)
            batches.close()

    def now(self, batch: Batch) -> tuple[Batch, Tickets]:
        """Returns a batch with slots, and the tickets to return to the stores."""
        slots, ticket = self.store.prepare_anyhow(self.records(batch))
        return _with_slots(batch, slots), ticket

    def records(self, batch: Batch) -> np.ndarray:
        """Returns the store's numbers for the rows of a batch.

        Raises:
            RuntimeError: an id is outside its table.
        """
        return self.model.rows(batch.categorical, batch.lengths).numpy()

    def _give_back(self, future: Future[_Prepared | None]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        prepared = future.result()
        if prepared is not None and prepared.found is not None:
            self.store.release(prepared.found[1])


def _renumbered(grad: Tensor, rows: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(rows, grad._values(), grad.shape, check_invariants=False)


def _lacks(future: Future[_Prepared | None]) -> bool:
    if not future.done() or future.exception() is not None:
        return not future.done()
    prepared = future.result()
    return prepared is not None and prepared.found is None


def _with_slots(batch: Batch, slots: np.ndarray) -> Batch:
    return batch._replace(categorical=torch.from_numpy(slots).view(batch.categorical.shape))
