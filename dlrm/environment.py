"""Process settings of commands and `dlrm.fit` before torch loads; importing this applies them.

A setting that the user made takes precedence; `DLRM_TUNE=0` changes nothing.

* Huge pages: looking rows up and updating them takes two thirds of the time, since the processor
  finds their addresses sooner (1.6 and 1.5 times as fast on 26 tables of a million rows of 16).
* Freed memory is kept for the next step. glibc would hand large blocks back to the kernel, and the
  next step fault them in again: 82 to 1013 page faults a step (Kaggle model, batch 2048), and now
  tens at most.
* Waiting threads spin for tens of microseconds and then sleep. With 3,000 spins the demo's model
  trains as fast as with 10,000 on an idle machine (119,000 and 106,000 samples/s, 2 cores), and at
  twice the rate (39,000 against 18,000) if other programs use the cores. A program that
  imports torch before it calls `dlrm.fit` has torch's own setting.
* Threads are as many as the cores that the control group allows. torch counts those of the
  machine, and threads that wait for their turn hold up the others.
"""

import ctypes
import os

from dlrm.host_cores import available_cores

DEFAULTS = {"THP_MEM_ALLOC_ENABLE": "1", "GOMP_SPINCOUNT": "3000"}

# From glibc's malloc.h: no block is mapped separately, and the heap's free end is not returned.
_MALLOC_OPTIONS = {"MALLOC_MMAP_MAX_": (-4, 0), "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1)}


def tuned() -> bool:
    """Returns whether this module sets anything."""
    return os.environ.get("DLRM_TUNE") != "0"


def malloc_settings() -> dict[str, str]:
    """Returns the environment variables by which glibc keeps freed memory as this module does."""
    return {name: str(number) for name, (_, number) in _MALLOC_OPTIONS.items()}


def _set_defaults() -> None:
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    cores, limit = available_cores()
    if limit.startswith("control group"):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(cores))))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    for name, (option, number) in _MALLOC_OPTIONS.items():
        if mallopt is not None and name not in os.environ:
            mallopt(option, number)


if tuned():
    _set_defaults()
