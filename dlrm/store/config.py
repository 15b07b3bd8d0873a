"""Memory limit of tables, and location of the rows beyond it."""

import re
from dataclasses import dataclass

from dlrm.settings import setting

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


@dataclass(frozen=True)
class TableStoreConfig:
    """Storage of tables beyond memory; field names are those of the flags.

    Raises:
        ValueError: a value is impossible, or one of the two is missing; the message names it.
    """

    table_memory: str | None = setting(
        None,
        "Memory of each process for its tables and their optimizer's state, such as 8GB; the "
        "remaining rows are in --table_store. The results are the same, bit for bit",
        resumable=True,
    )
    table_store: str | None = setting(
        None,
        "Directory, on a fast local disk, for the file with all rows; CPU only. Checkpoints refer "
        "to it",
        resumable=True,
    )

    def __post_init__(self) -> None:
        if self.table_memory is not None:
            bytes_of(self.table_memory)
        if (self.table_memory is None) != (self.table_store is None):
            given, missing = "table_memory", "table_store, a directory on a fast local disk"
            if self.table_memory is None:
                given, missing = "table_store", "table_memory, such as 8GB"
            raise ValueError(f"--{given} {getattr(self, given)} needs --{missing}")


def bytes_of(size: str) -> int:
    """Returns a number of bytes written as 8GB (10**9) or 8GiB (2**30).

    Raises:
        ValueError: the text is not a size.
    """
    match = _SIZE.fullmatch(str(size).strip())
    if not match or not float(match[1]) or (match[3] and not match[2]):
        raise ValueError(f"--table_memory {size}: expected a size such as 8GB or 512MiB")
    power = list(_UNITS).index(match[2].upper())
    return int(float(match[1]) * (1024**power if match[3] else 1000**power))


def shown(size: int, round_up: bool = True) -> str:
    """Returns a size as `bytes_of` reads it, rounded up or down to a unit."""
    for unit in ("G", "M", "K"):
        if size >= 10 * _UNITS[unit]:
            return f"{(-(-size // _UNITS[unit]) if round_up else size // _UNITS[unit])}{unit}B"
    return f"{size}B"
