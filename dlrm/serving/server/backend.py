"""Converts tensors to and from Triton's python backend, with any numpy.

The backend of Triton 2.51 supports arrays of numpy 1 only (those of numpy 2 arrive as 0 bytes), so
tensors are passed as DLPack both ways. The exporter copies this file into the model
repository.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dlrm.data.sources import native
from dlrm.serving.server.reader import Reader, Request, alone

_USED = b"used_dltensor"  # the DLPack protocol's name of a consumed capsule
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.argtypes = ctypes.py_object, ctypes.c_char_p


def read(requests: Sequence[Any], reader: Reader) -> list[Request | ValueError]:
    """Returns the tensors of each request by name, or its error.

    Omitted inputs are not included. Shapes are checked before data are read, since Triton's own
    check of them against the bytes sent overflows.
    """

    def tensors_of(request: Any) -> Request:
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        for name, tensor in tensors.items():
            reader.check_shape(name, tensor.shape())
        return {name: np.from_dlpack(tensor) for name, tensor in tensors.items()}

    return [alone(tensors_of, request) for request in requests]


def responses(pb_utils: Any, answers: Sequence[Mapping[str, np.ndarray] | ValueError]) -> list[Any]:
    """Makes the response to each request.

    Args:
        answers: arrays by output, or the error of the request.
    """

    def sent(answer: Mapping[str, np.ndarray]) -> Any:
        tensors = [_tensor(pb_utils, name, array) for name, array in answer.items()]
        return pb_utils.InferenceResponse(tensors)

    def refused(error: ValueError) -> Any:
        problem = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
        return pb_utils.InferenceResponse(error=problem)

    answered = (alone(sent, answer) for answer in answers)
    return [refused(one) if isinstance(one, ValueError) else one for one in answered]


def log_parser(pb_utils: Any, reader: Reader) -> None:
    """Logs once, in the server, that Python reads raw rows instead of the native parser."""
    if reader.transform and reader.transform.is_log and native.served is None:
        pb_utils.Logger.log_warn(
            "dlrm: Python reads raw rows, which takes about twenty times as long, since the native "
            f"parser cannot be used: {native.why_not_served}"
        )


def _tensor(pb_utils: Any, name: str, array: np.ndarray) -> Any:
    capsule = np.ascontiguousarray(array).__dlpack__()
    tensor = pb_utils.Tensor.from_dlpack(name, capsule)
    # The backend's capsule does not have the protocol's name, for which numpy would print an error
    # per request.
    _set_name(capsule, _USED)
    return tensor
