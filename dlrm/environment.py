"""Keeps freed memory for the next step; commands and `dlrm.fit` import this, which applies it.

glibc would hand large blocks back to the kernel, and the next step fault them in again. A setting
that the user made takes precedence; `DLRM_TUNE=0` changes nothing.
"""

import ctypes
import os

from dlrm.variables import tuned

# From glibc's malloc.h: no block is mapped separately, and the heap's free end is not returned.
_MALLOC_OPTIONS = {"MALLOC_MMAP_MAX_": (-4, 0), "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1)}

if tuned() and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):  # only glibc has it
    for name, (option, number) in _MALLOC_OPTIONS.items():
        if name not in os.environ:
            mallopt(option, number)
