"""Detects a rank that hangs, reports its stack, and ends the run; a launcher restarts it."""

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from dlrm import distributed
from dlrm.distributed import World, clone_store
from dlrm.train import agreement, gradient_sum

EXIT_CODE = 76  # EX_PROTOCOL: another rank did not answer
_WAITING_IN = (*distributed.__path__, str(gradient_sum.__file__), str(agreement.__file__))


class Watchdog:
    """Ends this process, after a report, when a rank has made no progress within the timeout.

    A thread of each rank tells the others the time since its last `beat`. Ranks that wait for
    others make no progress either, so the run ends when all ranks that answer have stopped. The
    report names the ranks that do not answer, or that hang without waiting in a transfer.

    Args:
        world: the ranks; a single rank is not watched.
        timeout: seconds without a beat, after the first one, that end the run.
    """

    def __init__(self, world: World, timeout: float):
        self._world, self._timeout = world, timeout
        self._step, self._beaten = 0, math.inf
        self._over = threading.Event()
        self._said = 0
        self._main = threading.get_ident()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._world.size > 1:
            self._store = clone_store()
            self._thread = threading.Thread(target=self._watch, name="dlrm-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(self._timeout)

    def beat(self, step: int | None = None) -> None:
        """Reports progress of the training, optionally with the step."""
        self._step = self._step if step is None else step
        self._beaten = time.monotonic()

    def rest(self) -> None:
        """Announces a pause: no beats are expected until the next one."""
        self._beaten = math.inf

    def _watch(self) -> None:
        pause = min(self._timeout / 5, 5.0)
        try:
            while not self._over.wait(pause):
                self._say()
                if self._age() > self._timeout:
                    self._end_unless_one_gets_on(pause)
        except dist.DistError:  # the store's process is gone: the launcher ends the run
            return

    def _age(self) -> float:
        return max(time.monotonic() - self._beaten, 0.0)

    def _say(self) -> None:
        self._said += 1
        said = {"said": self._said, "step": self._step, "age": self._age()}
        if self._age() > self._timeout / 2:
            said |= _where(self._main)
        self._store.set(f"beat/{self._world.rank}", json.dumps(said))

    def _listen(self) -> list[dict[str, Any]]:
        keys = [f"beat/{rank}" for rank in range(self._world.size)]
        return [json.loads(self._store.get(k)) if self._store.check([k]) else {} for k in keys]

    def _end_unless_one_gets_on(self, pause: float) -> None:
        before = self._listen()
        for _ in range(3):  # meanwhile the others report their stacks, if they can
            time.sleep(pause)
            self._say()
        now = self._listen()
        ranks = [new if new != old else None for old, new in zip(before, now, strict=True)]
        if any(said and said["age"] < self._timeout for said in ranks):
            return
        if next(rank for rank, said in enumerate(ranks) if said) == self._world.rank:
            print(f"error: {_report(ranks, self._timeout)}", file=sys.stderr, flush=True)
        time.sleep(3 * pause)  # the report comes first: the launcher kills the other ranks
        os._exit(EXIT_CODE)


def _where(thread: int) -> dict[str, Any]:
    """Returns the stack of a thread, and whether it waits for other ranks."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame else traceback.StackSummary()
    waits = any(line.filename.startswith(_WAITING_IN) for line in stack)
    return {"waits": waits, "stack": "".join(stack.format())}


def _report(ranks: Sequence[Mapping[str, Any] | None], timeout: float) -> str:
    lines = [f"no step for {timeout:g} seconds (--rank_timeout); the run ends"]
    for rank, said in enumerate(ranks):
        if said is None:
            lines.append(f"rank {rank} does not answer: it was stopped or lost")
        elif not said.get("waits"):
            stack = said.get("stack", "")
            lines.append(f"rank {rank} hangs after step {said['step']}; its stack:\n{stack}")
    if len(lines) == 1:
        lines.append("all ranks wait for a transfer; where each stands:")
        lines += [f"rank {r}:\n{said['stack']}" for r, said in enumerate(ranks) if said]
    return "\n".join(lines)
