"""Sends rows to a Triton server; reports AUC, latency and throughput.

    dlrm client --input DATASET
    dlrm client --input day_23 --batch-size 64
    dlrm client --inference_data DATASET/test --dataset_config DATASET/model_size.json

The input is a dataset, whose numericals and ids are sent, or a log, whose lines are sent unchanged.
Tensors are sent in binary form; a batch larger than the server accepts is sent in several requests.
The third command has the flags of NVIDIA's client, whose protocol is http. `python
triton/client.py` works alike.
"""

import importlib
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrm.deployment.config import ClientConfig
from dlrm.files import errors_named, write_array
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.serving.network.platforms import OUTPUT, require
from dlrm.serving.server.names import RAW

if TYPE_CHECKING:  # the help is quick without it
    import numpy as np

Request = dict[str, "np.ndarray"]  # input -> tensor


class Batch(NamedTuple):
    """Rows as requests that the server accepts, and their labels, if known."""

    requests: list[Request]
    labels: "np.ndarray | None"


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Flags", ClientConfig)])
    errors = (ValueError, OSError, ImportError)
    return run_command(line, _run, __doc__, arguments, usage=2, errors=errors)


def _run(values: Values) -> None:
    options = values.config(ClientConfig)
    if not options.source.exists():
        raise FileNotFoundError(f"{options.source}: no such file or directory (--input)")
    require(f"tritonclient.{options.by}")
    from tritonclient.utils import InferenceServerException

    try:
        figures, scores, labels = _measured(options)
    except InferenceServerException as error:
        raise ValueError(str(error)) from error
    print(
        "{rows:,} rows in {batches} batches, p50 {p50_ms:.2f} ms  p95 {p95_ms:.2f} ms  "
        "p99 {p99_ms:.2f} ms, {rows_per_second:,.0f} rows/s".format(**figures)
    )
    if options.output:
        path = options.output.with_suffix(options.output.suffix or ".npy")
        with errors_named(path):
            write_array(path, scores)
    if options.report:
        with errors_named(options.report):
            options.report.write_text(json.dumps(figures, indent=1) + "\n")
    if labels is not None:
        from dlrm.metrics.ranked import RankedRows

        print(f"AUC {RankedRows(scores, labels).metrics()['auc']:.6f}")


def _measured(options: ClientConfig) -> tuple[dict[str, float], "np.ndarray", "np.ndarray | None"]:
    """Sends rows; returns measurements, of which latencies are per batch, scores and labels.

    Raises:
        InferenceServerException: the server refuses a request; no further ones are sent.
    """
    import numpy as np

    server = Server(options)
    batches = (_of_dataset if options.source.is_dir() else _of_log)(options, server.max_rows)
    if options.test_batches is not None:
        batches = iter([*islice(batches, options.test_batches)])
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


class Server:
    """A model on a server.

    Attributes:
        max_rows: maximum rows of a request.
    """

    def __init__(self, options: ClientConfig) -> None:
        from dlrm.serving.server.reader import max_rows

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
        except (OSError, self._api.InferenceServerException):
            return False

    def scores(self, request: Request) -> "np.ndarray":
        """Returns the scores of a request, float32 `[rows]`."""
        import numpy as np
        from tritonclient.utils import triton_to_np_dtype

        inputs = []
        for name, array in request.items():
            if name not in self._types:
                raise ValueError(f"{self._name}: expected inputs {list(self._types)}, not {name}")
            tensor = self._api.InferInput(name, list(array.shape), self._types[name])
            dtype = triton_to_np_dtype(self._types[name])
            tensor.set_data_from_numpy(np.ascontiguousarray(array, dtype))
            inputs.append(tensor)
        return self._client.infer(self._name, inputs, **self._own).as_numpy(OUTPUT)[:, 0]


def _of_dataset(options: ClientConfig, most: int) -> Iterator[Batch]:
    from dlrm.data import layout
    from dlrm.data.clicks.feature_spec import FeatureSpec
    from dlrm.data.clicks.readers import SplitDataset  # torch takes seconds to import
    from dlrm.data.verification import Verifier
    from dlrm.serving.server.reader import named
    from dlrm.serving.sources import inputs_of

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
    import numpy as np

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


if __name__ == "__main__":
    sys.exit(main())
