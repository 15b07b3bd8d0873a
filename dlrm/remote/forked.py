"""Stores for a process that was forked from one that has used obstore.

obstore's threads do not exist in the child, so its calls would wait forever. They are made by a new
process, one at a time.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from dlrm.remote.objects import open_store
from dlrm.remote.uri import Uri


class ForkedStore:
    """A bucket, through a process of its own; see `Store`."""

    def __init__(self, root: Uri) -> None:
        self.root, self._lock = root, threading.Lock()
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns a function that calls the method of `Store` with a name."""
        return partial(self._ask, name)

    def _ask(self, *call: Any) -> Any:
        with self._lock:
            try:
                self._pipe.send((self.root, *call))
                result, error = self._pipe.recv()
            except EOFError:
                raise OSError(f"{self.root}: the process that reads it has ended") from None
        if error is not None:
            raise error
        return result


def serve(descriptor: int) -> None:
    """Answers the calls of a `ForkedStore` until its process ends."""
    pipe = Connection(descriptor)
    while True:
        try:
            root, name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            value = getattr(open_store(root), name)(*arguments)
            pipe.send((bytes(value) if name == "read" else value, None))
        except (OSError, ValueError) as error:
            pipe.send((None, type(error)(str(error))))
