"""Worker processes of a library call, whose results arrive in order."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.context import ForkContext, ForkProcess, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

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
        yield lambda task, items: in_order(pool, task, items, 2 * processes)
        pool.shutdown(wait=True, cancel_futures=True)
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a process was killed, as by a kernel that ran out of memory; fewer --processes need "
            "less"
        ) from error
    finally:
        end_processes(pool)


def in_order(pool: Executor, task: Callable, items: Iterable, ahead: int) -> Iterator:
    """Yields the results of a task in the order of its items, of which some are begun ahead."""
    remaining = iter(items)
    pending = deque(pool.submit(task, item) for item in islice(remaining, ahead))
    while pending:
        result = pending.popleft().result()
        pending.extend(pool.submit(task, item) for item in islice(remaining, 1))
        yield result


def process_pool(processes: int, forked: bool = False) -> ProcessPoolExecutor:
    """Starts processes on demand, which end with this one at the latest.

    Ctrl-C, which a terminal sends to all of them, is for this process alone to handle.

    Args:
        forked: whether all processes may be copies of this one at the first task, which saves their
            start and imports. A program may say so that has used no threads of its own, of torch
            or of Arrow; others of Python are noticed, and processes are then started anew.
    """
    sys.warnoptions.append("ignore:resource_tracker")  # which the process started here inherits
    try:
        resource_tracker.ensure_running()  # it frees semaphores after a `kill -9`
    finally:
        sys.warnoptions.pop()
    is_copied = forked and sys.platform == "linux" and threading.active_count() == 1
    return ProcessPoolExecutor(processes, _context(is_copied), _begin)


class _WithoutInterrupts:
    """Processes that block SIGINT from their first instruction, and print no traceback for it."""

    def start(self) -> None:
        signals = {signal.SIGINT, signal.SIGTERM}  # until `_begin` has dropped a copied handler
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # inherited
        try:
            super().start()  # type: ignore[misc]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _SpawnedProcess(_WithoutInterrupts, SpawnProcess):
    pass


class _ForkedProcess(_WithoutInterrupts, ForkProcess):
    pass


def _context(forked: bool) -> Any:
    """Returns a context with its `processes`, of which a pool learns a moment after their start."""
    context: Any = ForkContext() if forked else SpawnContext()
    make = _ForkedProcess if forked else _SpawnedProcess
    context.processes = []

    def remembered(*arguments: Any, **options: Any) -> BaseProcess:
        context.processes.append(make(*arguments, **options))
        process: BaseProcess = context.processes[-1]
        return process

    context.Process = remembered
    return context


def end_processes(pool: ProcessPoolExecutor) -> None:
    """Ends the processes of a pool, whatever they do."""
    context: Any = pool._mp_context
    begun = [process for process in context.processes if process.pid]
    pool.shutdown(wait=False, cancel_futures=True)
    for process in begun:
        process.kill()
    for process in begun:
        process.join()


def _begin() -> None:
    """Makes a process end with its parent, even when that is killed by `kill -9`."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
