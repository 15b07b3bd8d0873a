"""Worker processes of a library call, whose results arrive in order."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice

InOrder = Callable[[Callable, Iterable], Iterator]


@contextmanager
def workers(processes: int) -> Iterator[InOrder]:
    """Yields a `map` over a number of processes, or this one, that works a few items ahead.

    The processes end with the block, or with this process. Errors of tasks are raised here.

    Raises:
        ChildProcessError: a process was killed.
    """
    if processes == 1:
        yield map
        return
    pool = process_pool(processes)
    try:
        yield lambda task, items: _in_order(pool, task, items, 2 * processes)
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a process was killed, as by a kernel that ran out of memory; fewer --processes need "
            "less"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, task: Callable, items: Iterable, ahead: int) -> Iterator:
    remaining = iter(items)
    pending: deque[Future] = deque(pool.submit(task, item) for item in islice(remaining, ahead))
    while pending:
        result = pending.popleft().result()
        pending.extend(pool.submit(task, item) for item in islice(remaining, 1))
        yield result


def process_pool(processes: int) -> ProcessPoolExecutor:
    """Starts processes on demand, which end with this one at the latest."""
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _end_with_parent)


def _end_with_parent() -> None:
    """Makes a process end with its parent, even when that is killed by `kill -9`."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
