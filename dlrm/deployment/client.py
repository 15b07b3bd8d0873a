"""Sends rows to a Triton server; reports AUC, latency and throughput.

    dlrm client --input DATASET
    dlrm client --input day_23 --batch-size 64
    dlrm client --inference_data DATASET/test --dataset_config DATASET/model_size.json

The input is a dataset, whose numericals and ids are sent, or a log, whose lines are sent unchanged.
Tensors are sent in binary form; a batch larger than the server accepts is sent in several requests.
The third command has the flags of NVIDIA's client, whose protocol is http. `python
triton/client.py` works alike.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.serving.network.platforms import require
from dlrm.settings import setting


@dataclass(frozen=True)
class ClientConfig:
    """The server, the rows to send, and what is reported; field names are those of the flags."""

    triton_server_url: str | None = setting(
        None,
        "address of the server; default: localhost:8001, or localhost:8000 with http",
        short_name="u",
    )
    protocol: str | None = setting(
        None,
        "protocol; default: grpc, or http with --inference-data",
        choices=("grpc", "http"),
    )
    triton_model_name: str = setting("model", "name of the model")
    triton_model_version: str = setting("", "version to use; default: the server's choice")
    verbose: bool = setting(False, "let the client library print its traffic", short_name="v")
    http_headers: tuple[str, ...] = setting(
        (), "NAME:VALUE, header of every request", short_name="H", repeated=True
    )
    input: Path | None = setting(
        None, "dataset, or log with lines of a label and fields", uri="read"
    )
    split: str = setting("test", "split of the dataset to send")
    inference_data: Path | None = setting(
        None, "directory of a split in the dataset, such as test/"
    )
    dataset_config: Path | None = setting(None, "model_size.json or feature_spec.yaml beside that")
    no_label: bool = setting(False, "the lines of the log have no label")
    batch_size: int = setting(1024, "rows per batch", least=1)
    max_batches: int | None = setting(
        None, "number of batches to send, read in advance; default: all"
    )
    test_batches: int | None = setting(None, "the same as --max-batches")
    drop_last_batch: bool = setting(
        False, "leave out the last batch of a dataset if it is not full"
    )
    fp16: bool = setting(False, "not used: the server states the type that it takes")
    output: Path | None = setting(None, ".npy file to write the scores to", uri="replace")
    report: Path | None = setting(None, ".json file to write the measurements to", uri="replace")

    @property
    def source(self) -> Path:
        """Returns the dataset or log to send, which a parsed command line has."""
        assert self.input is not None
        return self.input


LINE = ConfigFlags([("Flags", ClientConfig)])


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    errors = (ValueError, OSError, ImportError)
    return run_command(LINE, _run, __doc__, arguments, usage=2, errors=errors)


def _run(values: Values) -> None:
    require("tritonclient.grpc", "tritonclient.http")
    from dlrm.deployment.sender import run  # torch takes seconds to import

    run(_config(values))


def parse(arguments: list[str]) -> ClientConfig:
    """Reads a command line."""
    return _config(LINE.parse(arguments))


def _config(values: Values) -> ClientConfig:
    """Returns the options, with the input and the protocol of NVIDIA's flags.

    Raises:
        ValueError: they contradict each other, or there is no input.
    """
    options = values.config(ClientConfig)
    data, described = options.inference_data, options.dataset_config
    if (options.input is None) == (data is None):
        raise ValueError("expected either --input or --inference_data")
    source, split = options.input, options.split
    if data is not None:
        source, split = data.absolute().parent, data.name
        split = "validation" if split == "val" else split
    assert source is not None
    if described is not None and described.absolute().parent != source.absolute():
        raise ValueError(f"--dataset_config {described}: expected a file of {source}")
    return replace(
        options,
        input=source,
        split=split,
        protocol=options.protocol or ("grpc" if data is None else "http"),
        max_batches=options.test_batches if options.max_batches is None else options.max_batches,
    )


if __name__ == "__main__":
    sys.exit(main())
