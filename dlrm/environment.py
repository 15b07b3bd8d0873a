"""Freed memory is kept for the next step; commands and `dlrm.fit` import this, which applies it.

glibc would hand large blocks back to the kernel, and the next step fault them in again: 82 to 1013
page faults a step (Kaggle model, batch 2048), and now tens at most. A setting that the user made
takes precedence; `DLRM_TUNE=0` changes nothing. The environment variables of the process are
`import dlrm`'s, see `dlrm/variables.py`.
"""

import ctypes
import os

from dlrm.variables import tuned

# From glibc's malloc.h: no block is mapped separately, and the heap's free end is not returned.
_MALLOC_OPTIONS = {"MALLOC_MMAP_MAX_": (-4, 0), "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1)}


def _keep_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    for name, (option, number) in _MALLOC_OPTIONS.items():
        if mallopt is not None and name not in os.environ:
            mallopt(option, number)


if tuned():
    _keep_freed_memory()
