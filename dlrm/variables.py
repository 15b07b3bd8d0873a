"""Environment variables for libraries that this process loads later; `import dlrm` sets them.

A setting that the user made takes precedence; `DLRM_TUNE=0` changes nothing.

* `THP_MEM_ALLOC_ENABLE`, of torch: huge pages. Rows are looked up 1.6 times and updated 1.5 times
  as fast (26 tables of a million rows of 16).
* `GOMP_SPINCOUNT`, of GNU's OpenMP: waiting threads soon sleep. The demo's model trains as fast on
  an idle machine, and at twice the rate if other programs use the cores.
* `OMP_NUM_THREADS`: as many threads as the cores that the control group allows. torch counts those
  of the machine, and threads that wait for their turn hold up the others.
"""

import os
import sys

from dlrm.machine import available_cores

DEFAULTS = {"THP_MEM_ALLOC_ENABLE": "1", "GOMP_SPINCOUNT": "3000"}


def tuned() -> bool:
    """Returns whether this package sets anything."""
    return os.environ.get("DLRM_TUNE") != "0"


def set_variables() -> None:
    """Sets the variables that the user has not set."""
    if not tuned():
        return
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    cores, limit = available_cores()
    if limit.startswith("control group"):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(cores))))


def return_memory() -> None:
    """Makes Arrow return memory, here and in processes started from now on.

    Its default pool, mimalloc, keeps freed memory: 50 MB more per process.
    """
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
        if (arrow := sys.modules.get("pyarrow")) is not None:
            arrow.set_memory_pool(arrow.system_memory_pool())
