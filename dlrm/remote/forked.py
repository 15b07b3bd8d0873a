"""Stores for a process that was forked from one that has used obstore.

obstore's threads do not exist in the child, so its calls would wait forever. They are made by a new
process, one at a time.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from dlrm.remote.store import open_store
from dlrm.remote.uri import Uri

_PROGRAM = "from dlrm.remote.forked import serve; serve()"


class ForkedStore:
    """A bucket, through a process of its own; see `Store`."""

    def __init__(self, root: Uri) -> None:
        self.root, self._lock = root, threading.Lock()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns a function that calls the method of `Store` with a name."""
        return partial(self._ask, name)

    def _ask(self, name: str, *arguments: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            pickle.dump((self.root, name, arguments), stdin)
            stdin.flush()
            try:
                result, error = pickle.load(stdout)
            except EOFError:
                raise OSError(f"{self.root}: the process that reads it has ended") from None
        if error is not None:
            raise error
        return result


def serve() -> None:
    """Answers the calls of a `ForkedStore` until its process ends."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    while True:
        try:
            root, name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: tuple[Any, Any] = (None, None)
        try:
            value = getattr(open_store(root), name)(*arguments)
            answer = (bytes(value) if name == "read" else value, None)
        except (OSError, ValueError) as error:
            answer = (None, type(error)(str(error)))
        pickle.dump(answer, output)
        output.flush()
