"""A Triton model repository: the files of a model, and its `config.pbtxt`.

REPO/NAME/config.pbtxt            written from Triton's own schema
REPO/NAME/warmup/                 of models of lists, the lengths of the rows to warm up with
REPO/NAME/1/model.pt              TorchScript
REPO/NAME/1/model.onnx/           ONNX, weights beside it
REPO/NAME/1/model.py              python backend: scores `model.onnx/` by ONNX Runtime
REPO/NAME/1/dlrm/                 and what it imports, with the native libraries
REPO/NAME/1/transform/            the fitted transform, for raw rows
REPO/NAME/1/model.json            tables, types and the kind of output
REPO/NAME/1/report.json           its agreement with the checkpoint
"""

import ast
import shutil
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from dlrm.serving.network.platforms import PLATFORMS, Platform

if TYPE_CHECKING:  # the command, whose module imports this one to act
    from dlrm.deployment.export import ExportConfig

CONFIG = "config.pbtxt"
_HERE = Path(__file__).resolve().parent
_PACKAGE = Path(__file__).resolve().parents[1]
_SCRIPT = "model.py"  # of the python backend, in this directory and in a version


class Serving(NamedTuple):
    """Describes the serving of a model.

    Attributes:
        options: flags of the exporter.
        raw: whether to accept raw rows as well.
        lists, weighted: whether rows have several ids per table, and each id a weight.
    """

    options: "ExportConfig"
    raw: bool
    lists: bool
    weighted: bool

    @property
    def platform(self) -> Platform:
        """Returns the platform that runs the network."""
        return PLATFORMS[self.options.platform]


def triton_config(name: str, num_numerical: int, num_tables: int, serving: Serving) -> ModelConfig:
    """Returns the configuration of the model that takes ids."""
    config = _config(name, serving)
    platform = serving.platform
    setattr(config, *platform.triton)
    either = platform.takes_raw and serving.raw  # ids, or raw rows
    for tensor, dtype, dims in _tensors(num_numerical, num_tables, serving):
        config.input.add(name=tensor, data_type=dtype, dims=dims, optional=either)
    if either:
        _add_raw(config, serving, optional=True)
    _add_output(config, serving)
    _add_execution(config, serving, cpu=platform.takes_raw or serving.options.triton_no_cuda)
    for size in sorted({1, serving.options.triton_max_batch_size}):
        _add_warmup(config, size, serving)
    return config


def _tensors(
    num_numerical: int, num_tables: int, serving: Serving
) -> Iterator[tuple[str, str, list[int]]]:
    """Yields name, type and shape of a model's inputs other than raw rows.

    With lists the shapes include the rows, as Triton must not batch requests: it would require the
    same first dimension for all tensors of a request, which ids of lists do not have.
    """
    rows = [-1] * serving.lists
    yield "input__0", "TYPE_FP16" if serving.options.fp16 else "TYPE_FP32", [*rows, num_numerical]
    yield "input__1", f"TYPE_{serving.options.ids.upper()}", [-1] if serving.lists else [num_tables]
    if serving.lists:
        yield "input__2", "TYPE_INT32", [-1, num_tables]
    if serving.weighted:
        yield "input__3", "TYPE_FP32", [-1]


def _add_output(config: ModelConfig, serving: Serving) -> None:
    dims = [-1, 1] if serving.lists else [1]
    config.output.add(name="output__0", data_type="TYPE_FP32", dims=dims)


def _add_warmup(config: ModelConfig, rows: int, serving: Serving) -> None:
    """Has the server warm up on zeros, or for lists on id 0 of each table and lengths in a file."""
    size = 1 if serving.lists else rows
    warmup = config.model_warmup.add(name=f"{rows} rows", batch_size=size)
    *tensors, last = config.input
    tables = config.input[2].dims[-1] if serving.lists else 0
    for tensor in tensors if last.name == "raw__0" else config.input:
        value, dims = warmup.inputs[tensor.name], list(tensor.dims)
        value.data_type = tensor.data_type
        if serving.lists:
            dims[0] = rows if len(dims) > 1 else rows * tables
        if tensor.name == "input__2":
            value.input_data_file = f"lengths of {rows}"
        else:
            value.zero_data = True
        value.dims.extend(dims)


def transform_config(
    name: str, num_numerical: int, num_tables: int, serving: Serving
) -> ModelConfig:
    """Returns the configuration of the step from raw rows to ids."""
    config = _config(f"{name}_transform", serving)
    config.backend = "python"
    _add_raw(config, serving, optional=False)
    for tensor, dtype, dims in _tensors(num_numerical, num_tables, serving):
        config.output.add(name=tensor, data_type=dtype, dims=dims)
    _add_execution(config, serving, cpu=True)
    return config


def ensemble_config(name: str, serving: Serving) -> ModelConfig:
    """Returns the configuration of the two steps together."""
    config = _config(f"{name}_raw", serving)
    config.platform = "ensemble"
    _add_raw(config, serving, optional=False)
    _add_output(config, serving)
    between = {name: name for name, _, _ in _tensors(0, 0, serving)}
    raw, output = {"raw__0": "raw__0"}, {"output__0": "output__0"}
    for model, inputs, outputs in ((f"{name}_transform", raw, between), (name, between, output)):
        config.ensemble_scheduling.step.add(
            model_name=model, model_version=-1, input_map=inputs, output_map=outputs
        )
    return config


def _config(name: str, serving: Serving) -> ModelConfig:
    options = serving.options
    rows = 0 if serving.lists else options.triton_max_batch_size
    config = ModelConfig(name=name, max_batch_size=rows)
    config.version_policy.latest.num_versions = options.triton_keep_versions
    for key in ("platform", "output_kind", "threads"):
        config.parameters[key].string_value = str(getattr(options, key))
    if serving.lists:
        config.parameters["max_rows"].string_value = str(options.triton_max_batch_size)
    return config


def _add_raw(config: ModelConfig, serving: Serving, optional: bool) -> None:
    """Adds the text of a row, with fields separated by tabs, padded with zeros to the longest."""
    # Requests of other lengths are batched together.
    ragged = config.platform != "ensemble" and not serving.lists
    config.input.add(
        name="raw__0",
        data_type="TYPE_UINT8",
        dims=[-1] * (1 + serving.lists),
        optional=optional,
        allow_ragged_batch=ragged,
    )


def _add_execution(config: ModelConfig, serving: Serving, cpu: bool) -> None:
    options = serving.options
    if not (options.triton_no_dyn_batching or serving.lists):
        delay = round(options.triton_dyn_batching_delay * 1000)
        config.dynamic_batching.max_queue_delay_microseconds = delay
    kind = ModelInstanceGroup.KIND_CPU if cpu else ModelInstanceGroup.KIND_AUTO
    config.instance_group.add(count=options.triton_engine_count, kind=kind)


def write_config(directory: Path, config: ModelConfig) -> None:
    """Writes `config.pbtxt`, and the data for warming up."""
    text = text_format.MessageToString(config)
    (directory / CONFIG).write_text(text, encoding="utf-8")
    for warmup in config.model_warmup:
        for value in warmup.inputs.values():
            if value.input_data_file:
                path = directory / "warmup" / value.input_data_file
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(np.ones(tuple(value.dims), np.int32).tobytes())


def read_triton_config(directory: Path) -> ModelConfig:
    """Reads `config.pbtxt`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, so {directory} is no served model")
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
    except text_format.ParseError as error:
        raise ValueError(f"{path}: not a model configuration ({error})") from error


def write_backend(directory: Path) -> None:
    """Puts `model.py` into a version, with the modules of dlrm that it imports.

    Native libraries are included if they were built: one for any Python, and one for this Python.
    """
    shutil.copyfile(_HERE / _SCRIPT, directory / _SCRIPT)
    libraries = {*_PACKAGE.glob("_host*.so"), *_PACKAGE.glob("_served.so")}
    for source in sorted(_sources(_imported(_HERE / _SCRIPT)) | libraries):
        target = directory / source.relative_to(_PACKAGE.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def keep_bytecode_out(directory: Path) -> None:
    """Keeps Python from writing bytecode beside the modules of a version.

    A polling server would take it for a change and load the version a second time. Where it makes
    a directory of bytecode there is an empty file of that name, which Python accepts silently.
    The server's Python reads no environment variable that would prevent it.
    """
    for folder in {path.parent for path in directory.rglob("*.py")}:
        (folder / "__pycache__").touch()


def _sources(modules: Iterable[str]) -> set[Path]:
    """Returns the files of modules of dlrm, and of all modules of dlrm that they import."""
    found: set[Path] = set()
    waiting = list(modules)
    while waiting:
        parts = waiting.pop().split(".")
        paths = [_PACKAGE.parent.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
        for path in (p for p in paths for p in (p / "__init__.py", p.with_suffix(".py"))):
            if path.is_file() and path not in found:
                found.add(path)
                waiting += _imported(path)
    return found


@cache
def _imported(path: Path) -> tuple[str, ...]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(node) for block in ast.walk(tree) if _is_typing(block) for node in ast.walk(block)
    }
    names = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(name for name in names if name.split(".")[0] == "dlrm")


def _is_typing(node: ast.AST) -> bool:
    """Returns whether a block is for type checkers only."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
