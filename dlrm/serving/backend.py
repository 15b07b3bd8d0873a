"""Tensors in and out of Triton's python backend, with any numpy.

The backend of Triton 2.51 knows numpy arrays of numpy 1 only (those of numpy 2 arrive as 0 bytes),
so they pass as DLPack both ways. `triton/export.py` puts a copy of this file into the model
repository.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

_USED = b"used_dltensor"  # the name that the DLPack protocol has for a capsule that was taken over
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.argtypes = ctypes.py_object, ctypes.c_char_p


def inputs_of(request: Any) -> dict[str, np.ndarray]:
    """Returns the tensors of a request by name; those that were left out are not in it."""
    return {tensor.name(): np.from_dlpack(tensor) for tensor in request.inputs()}


def response(pb_utils: Any, answer: Mapping[str, np.ndarray] | ValueError) -> Any:
    """Makes a response.

    Args:
        pb_utils: the module `triton_python_backend_utils`, which only the server has.
        answer: arrays by output, or what is wrong with the request.
    """
    if isinstance(answer, ValueError):
        error = pb_utils.TritonError(str(answer), pb_utils.TritonError.INVALID_ARG)
        return pb_utils.InferenceResponse(error=error)
    return pb_utils.InferenceResponse(
        [_tensor(pb_utils, name, array) for name, array in answer.items()]
    )


def _tensor(pb_utils: Any, name: str, array: np.ndarray) -> Any:
    lent = _Lent(np.ascontiguousarray(array))
    tensor = pb_utils.Tensor.from_dlpack(name, lent)
    # The backend gives the capsule another name than the protocol's, and numpy would print an error
    # for each request.
    _set_name(lent.capsule, _USED)
    return tensor


class _Lent:
    """An array as DLPack, whose capsule is kept."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.capsule: Any = None

    def __dlpack__(self, **options: Any) -> Any:
        self.capsule = self._array.__dlpack__(**options)
        return self.capsule

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()
