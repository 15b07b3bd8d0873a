"""The settings of the commands that export a model, serve it and send it rows.

The commands are modules of their own, since their help appears before torch is imported.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm.flags import UsageError
from dlrm.serving.network.platforms import PLATFORMS
from dlrm.settings import REQUIRED, check_settings, same_setting, setting

_PLATFORM = "Platform, one of"
_OF_CHECKPOINT: dict[str, Any] = {"help": "that of the checkpoint", "architecture": True}


@dataclass(frozen=True)
class ExportConfig:
    """The model, and how it is served; field names are those of the flags."""

    checkpoint: str = setting(REQUIRED, "checkpoint, or a run, whose best one is used", uri="read")
    save_dir: Path = setting(Path("./triton_models"), "the model repository", uri="add")
    dataset: Path | None = setting(
        None,
        "dataset whose rows to compare the exported model on; default: that of the training, "
        "or generated rows if it is gone and the checkpoint has its transform",
        uri="read",
    )
    dataset_type: str | None = setting(
        None, "type of the dataset; default: as in training", choices=("split", "binary")
    )
    allow_other_transform: bool = setting(
        False, "accept a dataset whose fitted transform is not the checkpoint's"
    )
    allow_links: bool = setting(False, "accept links in the dataset to files outside it")
    triton_model_name: str = setting("model", "directory in the repository")
    triton_model_version: int | None = setting(
        None, "version to write; default: 1, or the next one with --update", least=1
    )
    triton_max_batch_size: int = setting(4096, "maximum rows of a batch", least=1)
    triton_dyn_batching_delay: float = setting(
        0.0, "milliseconds that a request waits for others to be batched with", least=0, most=60_000
    )
    triton_no_dyn_batching: bool = setting(False, "do not batch requests")
    triton_engine_count: int = setting(1, "number of model instances", least=1)
    triton_no_cuda: bool = setting(False, "serve on the CPU even if there are GPUs")
    triton_keep_versions: int = setting(1, "number of latest versions to serve", least=1)
    threads: int = setting(0, "threads of a python instance; default: one per core", least=0)
    fp16: bool = setting(False, "clients send numerical features as FP16, as datasets store them")
    ids: str = setting("int64", "type of the ids that clients send", choices=("int64", "int32"))
    output_kind: str = setting("logit", "contents of output__0", choices=("logit", "probability"))
    no_raw: bool = setting(False, "accept ids only, no raw rows")
    embedding_precision: str = setting(
        "fp32", "precision of the embedding tables", choices=("fp32", "fp16")
    )
    update: bool = setting(False, "add a version to an existing model")
    python: bool = setting(False, "Python over ONNX Runtime (default)", topic=_PLATFORM)
    onnx: bool = setting(False, "ONNX, by onnxruntime_onnx", topic=_PLATFORM)
    ts_trace: bool = setting(False, "traced TorchScript, by pytorch_libtorch", topic=_PLATFORM)
    ts_script: bool = setting(False, "scripted TorchScript, by pytorch_libtorch", topic=_PLATFORM)

    def __post_init__(self) -> None:
        check_settings(self)
        name, chosen = self.triton_model_name, self._chosen
        if name != Path(name).name or name in ("", ".", ".."):
            raise ValueError(f"--triton-model-name {name!r}: expected the name of one directory")
        if len(chosen) > 1:
            raise UsageError(f"--{chosen[0]}, --{chosen[1]}: expected one platform, got both")

    @property
    def platform(self) -> str:
        """The key in `PLATFORMS` of the platform that runs the network."""
        return [*self._chosen, "python"][0]

    @property
    def _chosen(self) -> list[str]:
        return [name for name in PLATFORMS if getattr(self, name.replace("-", "_"))]


@dataclass(frozen=True)
class DeployConfig:
    """The checkpoint, and NVIDIA's flags; field names are those of the flags."""

    model_checkpoint: str = setting(REQUIRED, "checkpoint, or directory of checkpoints", uri="read")
    dataset: Path | None = same_setting(ExportConfig, "dataset")
    fp16: bool = same_setting(ExportConfig, "fp16")
    cpu: bool = setting(False, "the same as --triton-no-cuda")
    dump_perf_data: str | None = setting(None, "refused: client.py --input DATASET sends rows")
    num_numerical_features: str | None = setting(None, **_OF_CHECKPOINT)
    embedding_dim: str | None = setting(None, **_OF_CHECKPOINT)
    interaction_op: str | None = setting(None, **_OF_CHECKPOINT)
    bottom_mlp_sizes: tuple[str, ...] = setting((), repeated=True, **_OF_CHECKPOINT)
    top_mlp_sizes: tuple[str, ...] = setting((), repeated=True, **_OF_CHECKPOINT)
    embedding_type: str | None = setting(None, "unused")  # as it changes no exported model
    batch_size: str | None = setting(None, "unused")


@dataclass(frozen=True)
class ServerConfig:
    """The models, and the addresses; field names are those of the flags."""

    model_repository: Path = setting(REQUIRED, "directory that export.py wrote", uri="read")
    address: str = setting("127.0.0.1", "address to listen on")
    others: tuple[str, ...] = setting((), "further flags of tritonserver", positional=True)


@dataclass(frozen=True)
class ClientConfig:
    """The server, the rows to send, and what is reported; field names are those of the flags."""

    triton_server_url: str | None = setting(
        None, "address; default: localhost:8001, or localhost:8000 with http", short_name="u"
    )
    protocol: str | None = setting(
        None, "protocol; default: grpc, or http with --inference-data", choices=("grpc", "http")
    )
    triton_model_name: str = setting("model", "name of the model")
    triton_model_version: str = setting("", "version to use; default: the server's choice")
    verbose: bool = setting(False, "let the client library print its traffic", short_name="v")
    http_headers: tuple[str, ...] = setting(
        (), "NAME:VALUE, header of every request", short_name="H", repeated=True
    )
    input: Path | None = setting(None, "dataset, or log of labels and fields", uri="read")
    split: str = setting("test", "split of the dataset to send")
    inference_data: Path | None = setting(None, "split's directory in a dataset, such as test/")
    dataset_config: Path | None = setting(None, "model_size.json or feature_spec.yaml beside that")
    no_label: bool = setting(False, "the lines of the log have no label")
    batch_size: int = setting(1024, "rows per batch", least=1)
    test_batches: int | None = setting(None, "batches to send, read in advance; default: all")
    drop_last_batch: bool = setting(False, "leave out a last batch of a dataset that is not full")
    fp16: bool = setting(False, "not used: the server states the type that it takes")
    output: Path | None = setting(None, ".npy file to write the scores to", uri="replace")
    report: Path | None = setting(None, ".json file to write the measurements to", uri="replace")

    def __post_init__(self) -> None:
        data, described = self.inference_data, self.dataset_config
        if (self.input is None) == (data is None):
            raise ValueError("expected either --input or --inference_data")
        if described is not None and described.absolute().parent != self.source.absolute():
            raise ValueError(f"--dataset_config {described}: expected a file of {self.source}")

    @property
    def source(self) -> Path:
        """The dataset or log to send."""
        if self.input is not None:
            return self.input
        assert self.inference_data is not None
        return self.inference_data.absolute().parent

    @property
    def sent_split(self) -> str:
        """The split of the dataset to send; NVIDIA's name of "validation" is "val"."""
        name = self.inference_data.name if self.inference_data else self.split
        return "validation" if name == "val" and self.inference_data else name

    @property
    def by(self) -> str:
        """The protocol, "grpc" or "http"."""
        return self.protocol or ("http" if self.inference_data else "grpc")
