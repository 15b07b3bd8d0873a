"""Kills processes at the nth call that changes files (shim.c).

Each function runs in a fork of a process that has already imported everything, so a campaign of
hundreds of kills takes seconds. The forking process must have no threads.
"""

import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import select
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

LIMIT = 100  # seconds for all forks together
GRACE = 60  # seconds for the other forks after one was killed
_SHIM = Path(__file__).with_name("shim.c")


class Call(NamedTuple):
    """A function to run in a fork.

    Attributes:
        function: pickled by its name in a module.
        arguments: its arguments.
        below: directory whose changes are counted; None counts nothing.
        at: number of the call to be killed at, from 1; 0 only counts.
        half: if that call is a write, writes half of its bytes first.
    """

    function: Callable[..., Any]
    arguments: tuple = ()
    below: Path | None = None
    at: int = 0
    half: bool = False


class Outcome(NamedTuple):
    """Outcome of a fork.

    Attributes:
        killed: whether SIGKILL ended it.
        value: what the function returned.
        error: the traceback of what it raised, or "".
        calls: a letter for each call that changed files, as shim.c names them.
    """

    killed: bool
    value: Any
    error: str
    calls: str


class Forks:
    """A process with the shim that runs calls in forks. Use it in a `with` block.

    Args:
        modules: names to import before forking.
    """

    def __init__(self, *modules: str):
        self._modules = modules

    def __enter__(self) -> "Forks":
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler for the shim that kills processes")
        self._folder = tempfile.TemporaryDirectory()
        shim = Path(self._folder.name, "shim.so")
        words = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", shim, _SHIM, "-lpthread"]
        subprocess.run([compiler, *words], check=True)
        spawning = multiprocessing.get_context("spawn")
        self._pipe, there = spawning.Pipe()
        arguments = (there, str(shim), self._modules)
        self._process = spawning.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        there.close()
        if "PermissionError" in (refused := self.run(os.getpid, below=Path("/")).error):
            self.__exit__()
            pytest.skip(f"no seccomp here, so that calls cannot be counted: {refused}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
        self._folder.cleanup()

    def together(self, calls: Sequence[Call]) -> list[Outcome]:
        """Runs calls at the same time. Once one is killed, the others have `GRACE` seconds."""
        self._pipe.send(calls)
        return self._pipe.recv()

    def run(self, function: Callable[..., Any], *arguments: Any, **kill: Any) -> Outcome:
        """Runs one call; keywords are those of `Call`."""
        return self.together([Call(function, arguments, **kill)])[0]

    def result(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the value of a call without a kill."""
        outcome = self.run(function, *arguments)
        assert not outcome.error, outcome.error
        return outcome.value


def kill_points(calls: str, every: int, seed: int, first: int = 1) -> list[tuple[int, bool]]:
    """Returns and prints the places to kill, (call, half): all, or one in `every`.

    Leaves out calls of fsync: a kill there leaves the same files as one at the next call.

    Args:
        calls: `Outcome.calls` of the uninterrupted run.
        every: takes one in so many places.
        seed: of the choice.
        first: the first call to kill at.
    """
    numbered = list(enumerate(calls, 1))[first - 1 :]
    points = [(n, False) for n, kind in numbered if kind != "s"]
    points = sorted(points + [(n, True) for n, kind in numbered if kind == "w"])
    if every > 1:
        points = sorted(random.Random(seed).sample(points, -(-len(points) // every)))
    print(f"calls {first} to {len(calls)}: {len(points)} kills, one place in {every}, seed {seed}")
    return points


def report(what: str, kills: int, faults: Sequence[tuple[Any, str]], began: float) -> None:
    """Prints the result of a campaign; raises AssertionError if a kill lost something."""
    seconds = time.monotonic() - began
    print(f"{what}: {kills} kills, {kills - len(faults)} whole ({seconds:.0f} s)")
    shown = "\n".join(f"killed at {points}: {fault}" for points, fault in faults)
    assert not faults, f"{what}: {len(faults)} of {kills} kills cost something:\n{shown}"


def contents(folder: Path) -> dict[str, bytes | None]:
    """Returns the bytes of each file and None for each directory, by relative path."""
    names = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*")}
    return {name: None if path.is_dir() else path.read_bytes() for name, path in names.items()}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names the entries that differ between folders."""
    missing = object()
    names = sorted(found.keys() | expected.keys())
    return [name for name in names if found.get(name, missing) != expected.get(name, missing)]


def _serve(pipe, shim: str, modules: Sequence[str]) -> None:
    loaded = ctypes.CDLL(shim)
    loaded.shim_calls.restype = ctypes.c_char_p
    for name in ("filelock", *modules):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        try:
            calls = pipe.recv()
        except EOFError:
            return
        pipe.send(_together(calls, loaded))


def _together(calls: Sequence[Call], shim: ctypes.CDLL) -> list[Outcome]:
    forks = [_fork(call, shim) for call in calls]
    end, parts = time.monotonic() + LIMIT, {descriptor: b"" for _, descriptor in forks}
    pids = {descriptor: pid for pid, descriptor in forks}
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(forks):
        left = [descriptor for descriptor in parts if descriptor not in outcomes]
        ready, _, _ = select.select(left, [], [], max(end - time.monotonic(), 0))
        if not ready:
            for descriptor in left:
                os.kill(pids[descriptor], signal.SIGKILL)
            end += LIMIT
        for descriptor in ready:
            if block := os.read(descriptor, 1 << 20):
                parts[descriptor] += block
                continue
            os.close(descriptor)
            _, status = os.waitpid(pids[descriptor], 0)
            outcomes[descriptor] = _outcome(status, parts[descriptor])
            if outcomes[descriptor].killed:
                end = min(end, time.monotonic() + GRACE)
    return [outcomes[descriptor] for _, descriptor in forks]


def _outcome(status: int, content: bytes) -> Outcome:
    if content:
        return Outcome(False, *pickle.loads(content))
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return Outcome(killed, None, "" if killed else f"ended with status {status}", "")


def _fork(call: Call, shim: ctypes.CDLL) -> tuple[int, int]:
    """Starts a call; returns its process and the descriptor of its result."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.close(reader)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        content = pickle.dumps(_called(call, shim))
        with open(writer, "wb") as file:
            file.write(content)
    finally:
        os._exit(0)


def _called(call: Call, shim: ctypes.CDLL) -> tuple[Any, str, str]:
    try:
        if call.below is not None:
            directory = os.fsencode(call.below.resolve())
            if refused := shim.shim_arm(directory, ctypes.c_long(call.at), int(call.half)):
                raise PermissionError(refused, os.strerror(refused))
        value, error = call.function(*call.arguments), ""
    except BaseException:
        value, error = None, traceback.format_exc()
    return value, error, shim.shim_calls().decode()
