"""Reads what the exporter writes, and sends requests to a server."""

import shutil

import forked
import numpy as np

TYPES = {"float32": "FP32", "float16": "FP16", "int64": "INT64", "int32": "INT32", "uint8": "UINT8"}


def config_of(directory):
    """Parses `config.pbtxt` by Triton's schema."""
    from google.protobuf import json_format, text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    config = text_format.Parse((directory / "config.pbtxt").read_text(), ModelConfig())
    return json_format.MessageToDict(config, preserving_proto_field_name=True)


def export_steps(export, trained, repository):
    """Exports an ensemble, `steps_raw`, of the model's transform and of its model.

    The bundled server has no ONNX backend, so our Python backend is the ensemble's scoring step.
    """
    export(trained, repository, "--triton-model-name=steps", "--onnx")
    shutil.rmtree(repository / "steps")
    export(trained, repository, "--triton-model-name=steps", "--no-raw")


def raw(lines):
    """Returns the input of lines of text."""
    padded = np.array([line if isinstance(line, bytes) else line.encode() for line in lines])
    return {"raw__0": padded.view(np.uint8).reshape(len(padded), -1)}


def ask(client, arrays, model="model"):
    """Sends arrays by gRPC; returns the answer."""
    import tritonclient.grpc as grpc

    inputs = []
    for name, array in arrays.items():
        kind = TYPES[array.dtype.name]
        inputs.append(grpc.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    return client.infer(model, inputs)


def run_client(*flags):
    """Runs the client."""
    return forked.run("dlrm.deployment.client", *flags, curves=True)
