"""Tensors in files that the operating system pages, for tables larger than memory."""

import errno
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def mapped_zeros(directory: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns zeros in a new file of a directory, mapped so that operators change the file itself.

    The file has no name: it goes with the tensor, also when the process is killed. The whole space
    is reserved at once, since a page that finds no room later ends the process.

    Raises:
        OSError: the directory cannot be made, or has too little room; the message has the numbers.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(*shape, dtype=dtype)
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        created = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # closed below
    except OSError as error:
        raise OSError(error.errno, f"--table_files {directory}: {error.strerror}") from None
    with created as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            free = shutil.disk_usage(directory).free
            raise OSError(
                error.errno,
                f"--table_files {directory}: a table or its optimizer's state needs {size:,} "
                f"bytes, and {free:,} are free",
            ) from None
        memory = mmap.mmap(file.fileno(), size)
    memory.madvise(mmap.MADV_RANDOM)  # a look-up needs its own page, not those after it
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
