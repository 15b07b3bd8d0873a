"""Sends rows to a Triton server, a batch after the other, and measures how fast it answers."""

import importlib
import json
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from dlrm.data import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import SplitDataset
from dlrm.data.verification import Verifier
from dlrm.deployment.config import ClientConfig
from dlrm.files import errors_named, write_array
from dlrm.metrics.clicks import click_metrics
from dlrm.serving.network.platforms import OUTPUT
from dlrm.serving.server.names import RAW
from dlrm.serving.server.reader import Request, max_rows, named
from dlrm.serving.sources import inputs_of


class Batch(NamedTuple):
    """Rows as requests that the server accepts, and their labels, if known."""

    requests: list[Request]
    labels: np.ndarray | None


def run(options: ClientConfig) -> None:
    """Runs the command.

    Raises:
        ValueError, OSError: errors that the user can fix, or that the server reports.
    """
    source = options.source
    if not source.exists():
        raise FileNotFoundError(f"{source}: no such file or directory (--input)")
    try:
        server = Server(options)
        batches = (_of_dataset if source.is_dir() else _of_log)(options, server.max_rows)
        if options.test_batches is not None:
            batches = iter([*islice(batches, options.test_batches)])
        figures, scores, labels = _measured(server, batches)
    except InferenceServerException as error:
        raise ValueError(str(error)) from error
    print(
        "{rows:,} rows in {batches} batches, p50 {p50_ms:.2f} ms  p95 {p95_ms:.2f} ms  "
        "p99 {p99_ms:.2f} ms, {rows_per_second:,.0f} rows/s".format(**figures)
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
            options.report.write_text(json.dumps(figures, indent=1) + "\n")


class Server:
    """A model on a server.

    Attributes:
        max_rows: maximum rows of a request.
    """

    def __init__(self, options: ClientConfig) -> None:
        self._api: Any = importlib.import_module(f"tritonclient.{options.by}")
        by_grpc = options.by == "grpc"
        url = options.triton_server_url or f"localhost:{8001 if by_grpc else 8000}"
        self._name = options.triton_model_name
        self._own = {
            "headers": dict(header.split(":", 1) for header in options.http_headers),
            "model_version": options.triton_model_version,
        }
        self._client = self._api.InferenceServerClient(url, verbose=options.verbose)
        if not self._is_live():
            raise ConnectionError(
                f"no server answers at {url}; dlrm serve starts one, and -u names another"
            )
        as_json = {**self._own, **({"as_json": True} if by_grpc else {})}
        metadata = self._client.get_model_metadata(self._name, **as_json)
        config = self._client.get_model_config(self._name, **as_json)
        self._types = {tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]}
        self.max_rows = max_rows(config.get("config", config))

    def _is_live(self) -> bool:
        try:
            return self._client.is_server_live()
        except (OSError, InferenceServerException):
            return False

    def scores(self, request: Request) -> np.ndarray:
        """Returns the scores of a request, float32 `[rows]`."""
        inputs = []
        for name, array in request.items():
            if name not in self._types:
                raise ValueError(f"{self._name}: expected inputs {list(self._types)}, not {name}")
            tensor = self._api.InferInput(name, list(array.shape), self._types[name])
            dtype = triton_to_np_dtype(self._types[name])
            tensor.set_data_from_numpy(np.ascontiguousarray(array, dtype))
            inputs.append(tensor)
        return self._client.infer(self._name, inputs, **self._own).as_numpy(OUTPUT)[:, 0]


def _measured(
    server: Server, batches: Iterable[Batch]
) -> tuple[dict[str, float], np.ndarray, np.ndarray | None]:
    """Sends batches; returns measurements, of which latencies are per batch, scores and labels.

    Raises:
        InferenceServerException: the server refuses a request; no further ones are sent.
    """
    scores, seconds, labels, started = [], [], [], time.perf_counter()
    for batch in batches:
        began = time.perf_counter()
        scores += [server.scores(request) for request in batch.requests]
        seconds.append(time.perf_counter() - began)
        labels += [] if batch.labels is None else [batch.labels]
    if not seconds:
        raise ValueError("expected rows to send, got none (--input)")
    joined, wall = np.concatenate(scores), time.perf_counter() - started
    figures: dict[str, float] = {"batches": len(seconds), "rows": len(joined)}
    for share in (50, 95, 99):
        figures[f"p{share}_ms"] = 1e3 * float(np.percentile(seconds, share))
    figures["rows_per_second"] = len(joined) / wall
    return figures, joined, np.concatenate(labels) if labels else None


def _of_dataset(options: ClientConfig, most: int) -> Iterator[Batch]:
    spec, split = FeatureSpec.load(options.source), options.sent_split
    if split not in spec.splits:
        raise ValueError(f"--split {split}: expected one of {spec.splits}")
    verifier = Verifier(spec.directory, layout.KIND, "first")
    dataset = SplitDataset(spec, split, options.batch_size, verifier=verifier)
    whole = dataset.num_samples // options.batch_size
    for index in range(whole if options.drop_last_batch else len(dataset)):
        batch = dataset.batch(index)
        inputs, labels = inputs_of(batch), batch.labels.numpy()
        begins = range(0, len(labels), most)
        yield Batch([named(inputs.part(begin, begin + most)) for begin in begins], labels)


def _of_log(options: ClientConfig, most: int) -> Iterator[Batch]:
    with open(options.source, "rb") as file:
        lines = (line.rstrip(b"\r\n") for line in file)
        first_line = 1
        while rows := [*islice(lines, options.batch_size)]:
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
            text = padded.view(np.uint8).reshape(len(rows), width)
            begins = range(0, len(rows), most)
            yield Batch([{RAW: text[begin : begin + most]} for begin in begins], labels)
            first_line += len(rows)
