"""Adapters that report a run to TensorBoard and MLflow; each is imported on demand.

A thread receives the entries, so that no step waits for a disk or a server. If a tracker fails, the
run reports it once and continues without it.
"""

import queue
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from dlrm.command_line import missing_extra

Outcome = Literal["finished", "failed", "killed"]
_PATIENCE = 10.0  # seconds to wait at the end of a run, and for a server's first answer
_MLFLOW_EXPERIMENT = "dlrm"
_MLFLOW_PARAM = 500  # characters of a flag's value, accepted by servers of all versions


class Tracker(Protocol):
    """Receives the reports of a run."""

    def flags(self, values: Mapping[str, Any]) -> None:
        """Takes the flags of the run."""
        ...

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Takes values of a step."""
        ...

    def file(self, path: Path) -> None:
        """Takes a file of the run: curves, or the card of the model."""
        ...

    def close(self, outcome: Outcome = "finished") -> None:
        """Ends the run with its outcome."""
        ...


class TensorBoard:
    """Writes a directory that TensorBoard shows.

    Args:
        directory: directory of the events; created.

    Raises:
        ImportError: tensorboardX is missing.
        OSError: the directory cannot be written.
    """

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
        if path.suffix == ".png":
            from tensorboardX.proto.summary_pb2 import Summary

            image = Summary.Image(encoded_image_string=path.read_bytes())
            summary = Summary(value=[Summary.Value(tag=path.stem, image=image)])
            self._writer.file_writer.add_summary(summary, 0)
        else:
            self._writer.add_text(path.name, path.read_text(encoding="utf-8"))

    def close(self, outcome: Outcome = "finished") -> None:
        self._writer.close()


class MLflow:
    """Reports to an MLflow server, or to a store that MLflow opens itself.

    Args:
        uri: URI of the tracking server or store.

    Raises:
        ImportError: mlflow is missing.
        OSError: no server answers.
    """

    def __init__(self, uri: str, name: str) -> None:
        from mlflow import MlflowClient

        if uri.startswith(("http://", "https://")):  # MLflow itself would try for minutes
            with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_PATIENCE):
                pass
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(_MLFLOW_EXPERIMENT)
        number = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(_MLFLOW_EXPERIMENT)
        )
        self._run = self._client.create_run(number, run_name=name).info.run_id

    def flags(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._client.log_param(self._run, name, str(value)[:_MLFLOW_PARAM])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def file(self, path: Path) -> None:
        self._client.log_artifact(self._run, str(path))

    def close(self, outcome: Outcome = "finished") -> None:
        self._client.set_terminated(self._run, outcome.upper())


class Background:
    """A tracker in a thread of its own; an error ends the tracker and nothing else.

    Args:
        connect: makes the tracker, in the thread.
        say: called with that line, once.
    """

    def __init__(
        self, name: str, connect: Callable[[], Tracker], say: Callable[[str], object]
    ) -> None:
        self._name, self._say = name, say
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._run, args=(connect,), daemon=True)
        self._thread.start()

    def flags(self, values: Mapping[str, Any]) -> None:
        self._put("flags", dict(values))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._put("scalars", step, dict(values))

    def file(self, path: Path) -> None:
        self._put("file", path)

    def close(self, outcome: Outcome = "finished") -> None:
        """Waits up to `_PATIENCE` seconds for pending reports."""
        self._put("close", outcome)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._fail(f"it has not taken everything within {_PATIENCE:g} s")

    def _put(self, method: str, *arguments: Any) -> None:
        if not self._failed:
            self._calls.put((method, arguments))

    def _run(self, connect: Callable[[], Tracker]) -> None:
        try:
            tracker = connect()
            method = ""
            while method != "close":
                method, arguments = self._calls.get()
                getattr(tracker, method)(*arguments)
        except ImportError as error:
            self._fail(missing_extra(error, self._name))
        except Exception as error:  # the training continues whatever a tracker raises
            self._fail(str(error).partition("\n")[0])

    def _fail(self, reason: str) -> None:
        if self._failed:
            return
        self._failed = True
        self._say(f"note: {self._name}: {reason}; the run continues without it")


def open_trackers(
    tensorboard: str | None, mlflow: str | None, run: str, say: Callable[[str], object]
) -> list[Background]:
    """Returns the requested trackers.

    Args:
        tensorboard: directory of events, or None.
        mlflow: URI of a server or a store, or None.
        say: called with a line if a tracker fails.
    """
    found = []
    if tensorboard:
        found.append(Background("tensorboard", lambda: TensorBoard(tensorboard), say))
    if mlflow:
        found.append(Background("mlflow", lambda: MLflow(mlflow, run), say))
    return found
