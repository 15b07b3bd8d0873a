"""`config.pbtxt` of the models of a repository, as Triton's model_config.proto defines it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.deployment.config import ExportConfig
from dlrm.serving.network.platforms import OUTPUT, PLATFORMS
from dlrm.serving.rows.inputs import Inputs
from dlrm.serving.server.names import INPUTS, LENGTHS, RAW

Fields = dict[str, Any]  # of a message of protobuf; a list repeats its field
_ENUMS = ("data_type", "kind")  # fields whose values have no quotes


def model_configs(options: ExportConfig, rows: Inputs, raw: bool) -> dict[str, Fields]:
    """Returns directory in the repository -> configuration; parts follow what uses them.

    Args:
        rows: some rows, with the types that clients send.
        raw: whether raw rows are accepted, by the model itself or by an ensemble.
    """
    platform, name = PLATFORMS[options.platform], options.triton_model_name
    lists, most = rows.lengths is not None, options.triton_max_batch_size
    parameters = {key: getattr(options, key) for key in ("platform", "output_kind", "threads")}
    parameters |= {"max_rows": most} if lists else {}
    common = {
        "max_batch_size": 0 if lists else most,
        "version_policy": {"latest": {"num_versions": options.triton_keep_versions}},
        "parameters": _map({key: {"string_value": str(of)} for key, of in parameters.items()}),
    }
    execution: Fields = {}
    if not (options.triton_no_dyn_batching or lists):
        delay = round(options.triton_dyn_batching_delay * 1000)
        execution["dynamic_batching"] = {"max_queue_delay_microseconds": delay}
    count = options.triton_engine_count
    script = {"instance_group": {"count": count, "kind": "KIND_CPU"}, **execution}
    on_cpu = platform.takes_raw or options.triton_no_cuda
    network = {"instance_group": {"count": count, "kind": f"KIND_{'CPU' if on_cpu else 'AUTO'}"}}
    output = {"name": OUTPUT, "data_type": "TYPE_FP32", "dims": [-1, 1] if lists else [1]}
    models: dict[str, Fields] = {}
    if raw and not platform.takes_raw:
        models[f"{name}_raw"] = {**_ensemble(name, rows), "output": output}
        ids, lines = _ids(rows), _lines(rows)
        models[f"{name}_transform"] = {"backend": "python", "input": lines, "output": ids, **script}
    models[name] = {
        **dict([platform.triton]),
        "input": model_inputs(options, rows, raw),
        "output": output,
        **network,
        **execution,
        "model_warmup": [_warmup(rows, size) for size in sorted({1, most})],
    }
    return {own: {"name": own, **common, **fields} for own, fields in models.items()}


def model_inputs(options: ExportConfig, rows: Inputs, raw: bool) -> list[Fields]:
    """Returns the inputs of the model itself: ids, or raw rows, if its script takes them.

    Args:
        rows, raw: see `model_configs`.
    """
    if not (raw and PLATFORMS[options.platform].takes_raw):
        return _ids(rows)
    return [{**tensor, "optional": True} for tensor in (*_ids(rows), _lines(rows))]


def _ids(rows: Inputs) -> list[Fields]:
    # With lists the shapes include the rows, as Triton must not batch requests: it would require
    # the same first dimension for all tensors of a request, which ids of lists do not have.
    first = [] if rows.lengths is None else [-1]
    return [
        {"name": name, "data_type": _type(array), "dims": [*first, *array.shape[1:]]}
        for name, array in zip(INPUTS, rows.arrays, strict=False)
    ]


def _type(array: np.ndarray) -> str:
    return f"TYPE_{'FP' if array.dtype.kind == 'f' else 'INT'}{8 * array.itemsize}"


def _lines(rows: Inputs) -> Fields:
    """Returns the input of lines of text, padded with zeros to the longest."""
    tensor = {"name": RAW, "data_type": "TYPE_UINT8"}
    if rows.lengths is not None:
        return {**tensor, "dims": [-1, -1]}
    return {**tensor, "dims": [-1], "allow_ragged_batch": True}  # with requests of other lengths


def _ensemble(name: str, rows: Inputs) -> Fields:
    """Returns the step from lines to ids, and that from ids to scores."""
    between = _map({tensor["name"]: tensor["name"] for tensor in _ids(rows)})
    steps = (
        (f"{name}_transform", _map({RAW: RAW}), between),
        (name, between, _map({OUTPUT: OUTPUT})),
    )
    return {
        "platform": "ensemble",
        "input": {**_lines(rows), "allow_ragged_batch": False},
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": model,
                    "model_version": -1,
                    "input_map": inputs,
                    "output_map": outputs,
                }
                for model, inputs, outputs in steps
            ]
        },
    }


def _warmup(rows: Inputs, size: int) -> Fields:
    """Has the server warm up on zeros, or for lists on id 0 of each table and lengths in a file."""
    lists, values = rows.lengths is not None, {}
    for tensor, array in zip(_ids(rows), rows.arrays, strict=True):
        dims = [size, *array.shape[1:]] if array.ndim > 1 else [size * rows.num_tables]
        is_file = tensor["name"] == LENGTHS
        values[tensor["name"]] = {
            "data_type": tensor["data_type"],
            "dims": dims if lists else dims[1:],
            **({"input_data_file": f"lengths of {size}"} if is_file else {"zero_data": True}),
        }
    batch = 1 if lists else size
    return {"name": f"{size} rows", "batch_size": batch, "inputs": _map(values)}


def _map(values: Mapping[str, Any]) -> list[Fields]:
    return [{"key": key, "value": value} for key, value in values.items()]


def write_config(directory: Path, config: Fields) -> None:
    """Writes `config.pbtxt`, and the data for warming up."""
    (directory / "config.pbtxt").write_text(_text_format(config), encoding="utf-8")
    for warmup in config.get("model_warmup", ()):
        for value in (entry["value"] for entry in warmup["inputs"]):
            if "input_data_file" in value:
                path = directory / "warmup" / value["input_data_file"]
                path.parent.mkdir(exist_ok=True)
                np.ones(value["dims"], np.int32).tofile(path)


def _text_format(fields: Fields, indent: str = "") -> str:
    """Returns a message in protobuf's text format, which needs no definition of the message."""
    lines = []
    for name, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, dict):
                lines.append(f"{indent}{name} {{\n{_text_format(value, indent + '  ')}{indent}}}\n")
            else:
                text = value if name in _ENUMS else json.dumps(value, ensure_ascii=False)
                lines.append(f"{indent}{name}: {text}\n")
    return "".join(lines)
