"""Arrays over any number of files: memory maps that keep no file open.

`numpy.memmap` keeps a descriptor for each map, and a process can usually open 1,024. Python's
`mmap` can do without since 3.13 (`trackfd=False`), so these functions call the C library.
"""

import ctypes
import math
import mmap
import os
import weakref
from tokenize import TokenError
from typing import Any

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def map_file(
    path: str | os.PathLike,
    dtype: Any,
    shape: tuple[int, ...] | None = None,
    offset: int = 0,
    private: bool = False,
) -> np.ndarray:
    """Returns an array over a file, which is mapped until the array and its views are gone.

    Args:
        dtype: type of its values.
        shape: shape of the array; None for all values in one dimension.
        offset: the byte at which it begins.
        private: whether the array may be written to, which leaves the file as it is; otherwise it
            is read-only.

    Raises:
        OSError: the file cannot be opened or mapped; the message names it.
        ValueError: the file is too short or, without a shape, has a part of a value.
    """
    dtype = np.dtype(dtype)
    with open(path, "rb", buffering=0) as file:
        available = os.fstat(file.fileno()).st_size - offset
        if shape is None:
            shape = (available // dtype.itemsize,)
            if available % dtype.itemsize:
                raise ValueError(
                    f"{path}: expected a multiple of {dtype.itemsize} bytes, got {available}"
                )
        size = math.prod(shape) * dtype.itemsize
        if size > available:
            raise ValueError(f"{path}: expected {offset + size} bytes, got {offset + available}")
        if not size:  # nothing can be mapped
            return np.empty(shape, dtype)
        try:
            content = np.asarray(_Map(file.fileno(), offset, size, private))
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    return content.view(dtype).reshape(shape)


def map_npy(path: str | os.PathLike) -> np.ndarray:
    """Returns a read-only array over a file of `numpy.save`; see `map_file`.

    Raises:
        OSError: the file cannot be opened or mapped; the message names it.
        ValueError: it has no valid header, or is too short; the message names it.
    """
    with open(path, "rb") as file:
        try:
            if (version := np.lib.format.read_magic(file)) != (1, 0):  # others: headers over 64 KiB
                raise ValueError(f"expected version 1.0, got {version}")
            shape, in_columns, dtype = np.lib.format.read_array_header_1_0(file)
            if dtype.hasobject or min(shape, default=0) < 0:
                raise ValueError(f"got {dtype} of shape {list(shape)}")
        except (ValueError, TokenError, SyntaxError) as error:
            raise ValueError(f"{path}: not an array of numbers ({error})") from error
        begin = file.tell()
    array = map_file(path, dtype, shape[::-1] if in_columns else shape, begin)
    return array.T if in_columns else array


class _Map:
    """Mapped bytes of a file, which NumPy takes as an array that keeps this object.

    Raises:
        OSError: the kernel cannot map them, as with more than `vm.max_map_count` maps.
    """

    def __init__(self, descriptor: int, offset: int, size: int, private: bool) -> None:
        before = offset % mmap.ALLOCATIONGRANULARITY
        write, share = (mmap.PROT_WRITE, mmap.MAP_PRIVATE) if private else (0, mmap.MAP_SHARED)
        length, begin = before + size, offset - before
        place = _libc.mmap(None, length, mmap.PROT_READ | write, share, descriptor, begin)
        if place == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (place + before, not private),
        }
        # Not when the process ends: threads may still read.
        weakref.finalize(self, _libc.munmap, place, length).atexit = False
