"""Adapters that report a run to TensorBoard and MLflow; each is imported on demand.

An adapter takes the flags of the run, values of steps, its files, and its outcome: "finished",
"failed" or "killed".
"""

import queue
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlrm.command_line import missing_extra

_PATIENCE = 10.0  # seconds to wait at the end of a run, and for a server's first answer
_MLFLOW_PARAM = 500  # characters of a flag's value, accepted by servers of all versions


class TensorBoard:
    """Writes a directory that TensorBoard shows; needs tensorboardX."""

    def __init__(self, directory: str) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(directory, flush_secs=10)

    def flags(self, values: Mapping[str, Any]) -> None:
        text = "\n".join(f"    --{name}={value}" for name, value in values.items())
        self._writer.add_text("flags", text)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def file(self, path: Path) -> None:
        if path.suffix != ".png":
            self._writer.add_text(path.name, path.read_text(encoding="utf-8"))
            return
        from tensorboardX.proto.summary_pb2 import Summary

        image = Summary.Image(encoded_image_string=path.read_bytes())
        summary = Summary(value=[Summary.Value(tag=path.stem, image=image)])
        self._writer.file_writer.add_summary(summary, 0)

    def close(self, outcome: str = "finished") -> None:
        self._writer.close()


class MLflow:
    """Reports to an MLflow server, or to a store that MLflow opens itself; needs mlflow."""

    def __init__(self, uri: str, name: str) -> None:
        from mlflow import MlflowClient

        if uri.startswith(("http://", "https://")):  # MLflow itself would try for minutes
            with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_PATIENCE):
                pass
        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name("dlrm")
        number = found.experiment_id if found else self._client.create_experiment("dlrm")
        self._run = self._client.create_run(number, run_name=name).info.run_id

    def flags(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._client.log_param(self._run, name, str(value)[:_MLFLOW_PARAM])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def file(self, path: Path) -> None:
        self._client.log_artifact(self._run, str(path))

    def close(self, outcome: str = "finished") -> None:
        self._client.set_terminated(self._run, outcome.upper())


class Tracker(threading.Thread):
    """An adapter in a thread of its own, so that no step waits for a disk or a server.

    An error ends the adapter and nothing else, and is reported once.

    Args:
        connect: makes the adapter, in the thread.
        say: called with a line if the adapter fails.
    """

    def __init__(self, name: str, connect: Callable[[], Any], say: Callable[[str], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._connect, self._say, self._failed = connect, say, False
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self.start()

    def send(self, method: str, *arguments: Any) -> None:
        """Has a method of the adapter called, after those before."""
        if not self._failed:
            self._calls.put((method, arguments))

    def close(self, outcome: str) -> None:
        """Ends the run with its outcome, after pending reports; waits up to `_PATIENCE`."""
        self.send("close", outcome)
        self.join(_PATIENCE)
        if self.is_alive():
            self._fail(f"it has not taken everything within {_PATIENCE:g} s")

    def run(self) -> None:
        """Calls the adapter until it is closed."""
        try:
            adapter, method = self._connect(), ""
            while method != "close":
                method, arguments = self._calls.get()
                getattr(adapter, method)(*arguments)
        except ImportError as error:
            self._fail(missing_extra(error, self.name))
        except Exception as error:  # the training continues whatever an adapter raises
            self._fail(str(error).partition("\n")[0])

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._say(f"note: {self.name}: {reason}; the run continues without it")


def open_trackers(
    tensorboard: str | None, mlflow: str | None, run: str, say: Callable[[str], object]
) -> list[Tracker]:
    """Returns the requested trackers: of a directory of events, and of the URI of a store."""
    found = []
    if tensorboard:
        found.append(Tracker("tensorboard", lambda: TensorBoard(tensorboard), say))
    if mlflow:
        found.append(Tracker("mlflow", lambda: MLflow(mlflow, run), say))
    return found
