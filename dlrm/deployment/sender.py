"""Sends rows to a Triton server, a batch after the other, and measures how fast it answers."""

import itertools
import json
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from dlrm.data import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import SplitDataset
from dlrm.data.verification import Verifier
from dlrm.files import errors_named, write_array
from dlrm.metrics.clicks import click_metrics
from dlrm.metrics.latency import Latency
from dlrm.serving.rows.inputs import Inputs
from dlrm.serving.server.names import RAW
from dlrm.serving.server.reader import max_rows, named
from dlrm.serving.sources import inputs_of

if TYPE_CHECKING:  # the command, which imports this module to act
    from dlrm.deployment.client import ClientConfig

OUTPUT = "output__0"


class Batch(NamedTuple):
    """Rows in a model's form, or raw ones, and their labels, if known."""

    rows: Inputs | np.ndarray
    labels: np.ndarray | None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.rows.numerical if isinstance(self.rows, Inputs) else self.rows)

    def part(self, begin: int, end: int) -> dict[str, np.ndarray]:
        """Returns some of the rows in the form of a request."""
        if isinstance(self.rows, Inputs):
            return named(self.rows.part(begin, end))
        return {RAW: self.rows[begin:end]}


class Figures(NamedTuple):
    """Measurements; times are per batch."""

    batches: int
    rows: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    rows_per_second: float


def run(options: "ClientConfig") -> Figures:
    """Runs the command; returns the measurements.

    Raises:
        ValueError, OSError: errors that the user can fix, or that the server reports.
    """
    if not options.source.exists():
        raise FileNotFoundError(f"{options.source}: no such file or directory (--input)")
    try:
        figures, scores, labels = measure(Server(options), _batches(options))
    except InferenceServerException as error:
        raise ValueError(str(error)) from error
    print(
        f"{figures.rows:,} rows in {figures.batches} batches, p50 {figures.p50_ms:.2f} ms  "
        f"p95 {figures.p95_ms:.2f} ms  p99 {figures.p99_ms:.2f} ms, "
        f"{figures.rows_per_second:,.0f} rows/s"
    )
    if labels is not None:
        metrics = click_metrics(torch.from_numpy(scores), torch.from_numpy(labels))
        print(f"AUC {metrics['auc']:.6f}")
    if options.output:
        path = options.output.with_suffix(options.output.suffix or ".npy")
        with errors_named(path):
            write_array(path, scores)
    if options.report:
        with errors_named(options.report):
            options.report.write_text(json.dumps(figures._asdict(), indent=1) + "\n")
    return figures


def _is_live(client: Any) -> bool:
    try:
        return client.is_server_live()
    except (OSError, InferenceServerException):
        return False


class Server:
    """A model on a server."""

    def __init__(self, options: "ClientConfig") -> None:
        self._api: Any = tritonclient.grpc if options.protocol == "grpc" else tritonclient.http
        port = 8001 if options.protocol == "grpc" else 8000
        url = options.triton_server_url or f"localhost:{port}"
        self._name, self._version = options.triton_model_name, options.triton_model_version
        self._headers = dict(header.split(":", 1) for header in options.http_headers)
        self._client = self._api.InferenceServerClient(url, verbose=options.verbose)
        own = {"headers": self._headers, "model_version": self._version}
        if not _is_live(self._client):
            raise ConnectionError(
                f"no server answers at {url}; dlrm serve starts one, and -u names another"
            )
        as_json = {"as_json": True} if options.protocol == "grpc" else {}
        metadata = self._client.get_model_metadata(self._name, **own, **as_json)
        config = self._client.get_model_config(self._name, **own, **as_json)
        config = config.get("config", config)
        self._types = {tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]}
        self._max_rows = max_rows(config)

    def score(self, batch: Batch) -> np.ndarray:
        """Returns the scores of a batch, in as many requests as the server needs."""
        begins = range(0, batch.num_rows, self._max_rows)
        parts = [batch.part(begin, begin + self._max_rows) for begin in begins]
        return np.concatenate([self._ask(part) for part in parts])

    def _ask(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        inputs = []
        for name, array in arrays.items():
            if name not in self._types:
                raise ValueError(f"{self._name}: expected inputs {list(self._types)}, not {name}")
            tensor = self._api.InferInput(name, list(array.shape), self._types[name])
            dtype = triton_to_np_dtype(self._types[name])
            tensor.set_data_from_numpy(np.ascontiguousarray(array, dtype))
            inputs.append(tensor)
        answer = self._client.infer(
            self._name, inputs, model_version=self._version, headers=self._headers
        )
        return answer.as_numpy(OUTPUT)[:, 0]


def measure(
    server: Server, batches: Iterable[Batch]
) -> tuple[Figures, np.ndarray, np.ndarray | None]:
    """Sends batches; returns measurements, scores and labels.

    Raises:
        InferenceServerException: the server refuses a request; no further ones are sent.
    """
    scores, seconds, started = [], [], time.perf_counter()
    labels: list[np.ndarray] = []
    for batch in batches:
        began = time.perf_counter()
        scores.append(server.score(batch))
        seconds.append(time.perf_counter() - began)
        labels += [] if batch.labels is None else [batch.labels]
    if not scores:
        raise ValueError("expected rows to send, got none (--input)")
    rows, wall, latency = sum(map(len, scores)), time.perf_counter() - started, Latency.of(seconds)
    p50, p95, p99 = (1e3 * value for value in (latency.p50, latency.p95, latency.p99))
    figures = Figures(len(scores), rows, p50, p95, p99, rows / wall)
    return figures, np.concatenate(scores), np.concatenate(labels) if labels else None


def _batches(options: "ClientConfig") -> Iterator[Batch]:
    make = _of_dataset if options.source.is_dir() else _of_log
    if options.max_batches is None:
        return make(options)
    return iter(list(itertools.islice(make(options), options.max_batches)))


def _of_dataset(options: "ClientConfig") -> Iterator[Batch]:
    spec = FeatureSpec.load(options.source)
    if options.split not in spec.splits:
        raise ValueError(f"--split {options.split}: expected one of {spec.splits}")
    verifier = Verifier(spec.directory, layout.KIND, "first")
    dataset = SplitDataset(spec, options.split, options.batch_size, verifier=verifier)
    whole = len(dataset)
    if options.drop_last_batch:
        whole = dataset.num_samples // options.batch_size
    for index in range(whole):
        batch = dataset.batch(index)
        yield Batch(inputs_of(batch), batch.labels.numpy())


def _of_log(options: "ClientConfig") -> Iterator[Batch]:
    with open(options.source, "rb") as file:
        lines = (line.rstrip(b"\r\n") for line in file)
        first_line = 1
        while rows := list(itertools.islice(lines, options.batch_size)):
            labels = None
            if not options.no_label:
                pairs = [row.partition(b"\t") for row in rows]
                for line, (label, _, _) in enumerate(pairs, first_line):
                    if label not in (b"0", b"1"):
                        raise ValueError(
                            f"{options.source}, line {line}: expected the label 0 or 1 first, got "
                            f"{label.decode(errors='replace')!r} (--no-label)"
                        )
                labels = np.array([label == b"1" for label, _, _ in pairs], np.float32)
                rows = [fields for _, _, fields in pairs]
            padded = np.array(rows, bytes)  # to the longest, with zeros
            width = max(padded.dtype.itemsize, 1)
            yield Batch(padded.view(np.uint8).reshape(len(rows), width), labels)
            first_line += len(rows)
