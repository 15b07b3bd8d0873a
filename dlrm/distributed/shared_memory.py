"""Transfers between the ranks of one machine, through memory that they share instead of sockets.

A rank copies what it sends into its own memory and sets a counter; the others wait for the counter
and read. So nothing runs in the background, and no system call copies data. The counters are in
csrc/cpu/shared_counters.cpp.
"""

import ctypes
import functools
import math
import mmap
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

_LIBRARY = Path(__file__).resolve().parents[1] / "_ops_cpu.so"
_PENDING = 32  # posts that may wait for their readers
_ALIGNMENT = 64
_LARGEST = (1 << 32) - 1  # number in a counter, after which they begin anew
_PATIENCE = 200_000_000  # nanoseconds to wait before looking whether the other process lives


class SharedMemory:
    """Channels between all ranks of a machine.

    Posts of one channel are made in the same order on every rank.

    Attributes:
        vectors: carries looked-up vectors and their gradients.
        gradients: carries the gradients of dense weights.
        decisions: carries what ranks report to each other.
    """

    def __init__(self, rank: int, size: int, seconds: float):
        self._channels = [Channel(rank, size, seconds) for _ in range(3)]
        self.vectors, self.gradients, self.decisions = self._channels

    def address(self) -> tuple[str, int, str | None, list[tuple[int, str]]]:
        """Returns what others need to open this memory: the machine, the process, its files."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        own = os.getpid()
        files = [(channel.file, _name_of(own, channel.file)) for channel in self._channels]
        return boot, own, _start_of(own), files

    def open(self, addresses: Sequence[tuple[str, int, str | None, list[tuple[int, str]]]]) -> None:
        """Opens the memory of all ranks.

        Raises:
            OSError: that of a rank cannot be opened, is on another machine, or is that of another
                process, as where containers number their processes alike.
        """
        if len({boot for boot, *_ in addresses}) > 1:
            raise OSError("the ranks are on several machines")
        for _, pid, _, files in addresses:
            if [_name_of(pid, file) for file, _ in files] != [name for _, name in files]:
                raise OSError("the ranks do not see each other's processes")
        for number, channel in enumerate(self._channels):
            channel.open([(pid, start, files[number][0]) for _, pid, start, files in addresses])


def share_memory(
    rank: int, size: int, group: dist.ProcessGroup | None = None, seconds: float = 18_000.0
) -> SharedMemory | None:
    """Returns memory that all ranks share, or None where they cannot; every rank calls it.

    Ranks on several machines, in containers that do not see each other's processes, without the
    compiled operators or outside Linux have none.

    Args:
        rank: this process, in [0, size).
        size: number of processes.
        group: the process group that joins them.
        seconds: limit of a transfer.
    """
    memory, mine = None, None
    if _functions() is not None:
        with suppress(OSError):  # a limit of files or memory
            memory = SharedMemory(rank, size, seconds)
            mine = memory.address()
    addresses: list[Any] = [None] * size
    dist.all_gather_object(addresses, mine, group=group)
    opened: list[Any] = [False] * size
    with suppress(OSError):  # all ranks do without, below
        if memory is not None and None not in addresses:
            memory.open(addresses)
            opened[rank] = True
    dist.all_gather_object(opened, opened[rank], group=group)
    return memory if all(opened) else None


class Channel:
    """Posts of the ranks, numbered alike on all of them.

    Each rank has a file of counters and places, and files of data that are used again once all
    ranks have read them.

    Args:
        rank: this process.
        size: number of ranks.
        seconds: limit of a wait.
    """

    def __init__(self, rank: int, size: int, seconds: float):
        self.rank, self.size, self.seconds = rank, size, seconds
        self.file = os.memfd_create(f"dlrm-{uuid.uuid4().hex}")
        os.ftruncate(self.file, _Control.num_bytes(size))
        self._own = _Control(self.file, size)
        self._number = 0  # of the last post
        self._files: list[_Data] = []
        self._unread: dict[int, int] = {}  # own posts that others may read: the index of the file
        self._opened: dict[tuple[int, int], _Data] = {}  # files of ranks, by rank and index

    def open(self, addresses: Sequence[tuple[int, str | None, int]]) -> None:
        """Opens the files of counters of all ranks, of which each has a process and its start."""
        self._processes = [(pid, start) for pid, start, _ in addresses]
        self._controls = []
        for rank, (pid, _, file) in enumerate(addresses):
            with _opened(pid, file) as other:
                own = rank == self.rank
                self._controls.append(self._own if own else _Control(other, self.size))
        self._others = [control for control in self._controls if control is not self._own]

    def post(self, parts: Sequence[Tensor]) -> int:
        """Posts `parts[r]` for each rank r, or one part for all; returns the number of the post."""
        begins = [0]
        for part in parts:
            begins.append(begins[-1] + -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT)
        index = self._free_file(begins.pop())
        for part, begin in zip(parts, begins, strict=True):
            if part.numel():
                self._files[index].part(begin, part.dtype, part.shape).copy_(part)
        self._number += 1
        self._unread[self._number] = index
        slot = self._number % _PENDING
        self._own.places[slot] = [index, *(begins if len(begins) > 1 else begins * self.size)]
        self._own.files[index] = self._files[index].file
        self._own.set(slot, self._number)
        return self._number

    def read(self, rank: int, number: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Waits for a post of a rank; returns its part for this one, valid until `done`.

        Args:
            rank: the rank.
            number: the number of the post.
            dtype, shape: those of the part.

        Raises:
            ConnectionError, TimeoutError: the rank has ended, or did not post within the limit.
        """
        control, slot = self._controls[rank], number % _PENDING
        if not control.wait(slot, number, _PATIENCE):
            self._wait_long(rank, number)
        places = control.places[slot]
        index, begin = int(places[0]), int(places[1 + self.rank])
        data = self._opened.get((rank, index))
        if data is None or data.size < begin + math.prod(shape) * dtype.itemsize:
            pid, start = self._processes[rank]
            try:
                with _opened(pid, int(control.files[index])) as file:
                    data = self._opened[rank, index] = _Data(file)
            except OSError as error:
                raise error if _start_of(pid) == start else _ended(rank, pid) from error
        return data.part(begin, dtype, shape)

    def done(self, rank: int, number: int) -> None:
        """Tells a rank that this one has read a post."""
        self._own.set(_read_by_this(rank, number), number)

    def sum(self, tensor: Tensor) -> "Sum":
        """Posts a contiguous tensor; `wait` of the result sets it to the sum over the ranks."""
        return Sum(self, self.post([tensor]), tensor)

    def _wait_long(self, rank: int, number: int) -> None:
        control, (pid, start) = self._controls[rank], self._processes[rank]
        limit, slot = time.monotonic() + self.seconds, number % _PENDING
        while not control.wait(slot, number, _PATIENCE):
            if _start_of(pid) != start and not control.wait(slot, number, 0):
                raise _ended(rank, pid)
            if time.monotonic() > limit:
                raise TimeoutError(f"rank {rank} (process {pid}): no data in {self.seconds:g} s")

    def _free_file(self, size: int) -> int:
        """Returns the index of an own file with so many bytes that no rank may read."""
        for number in [*self._unread]:
            counter = _read_by_this(self.rank, number)
            read = number & _LARGEST
            if all(other.counters[counter] == read for other in self._others):
                del self._unread[number]
        oldest = min(self._unread, default=self._number)
        assert self._number - oldest < _PENDING - 1, "a post was not read before many others"
        free = {*range(len(self._files))}.difference(self._unread.values())
        roomy = [index for index in free if self._files[index].size >= size]
        if roomy:
            return min(roomy)
        index = max(free, default=len(self._files))
        file = self._files[index].file if free else os.memfd_create("dlrm")
        try:
            os.ftruncate(file, max(size, mmap.PAGESIZE))
        except OSError as error:
            raise OSError(f"{size:,} bytes of memory for the other ranks: {error}") from error
        self._files[index : index + 1] = [_Data(file)]
        return index


class Sum:
    """A pending sum; see `Channel.sum`."""

    def __init__(self, channel: Channel, number: int, tensor: Tensor):
        self._channel, self._number, self._tensor = channel, number, tensor

    def wait(self) -> None:
        """Adds the parts of all ranks, in the order of the ranks."""
        channel, total, before = self._channel, self._tensor, None
        for rank in range(channel.size):
            if rank == channel.rank:
                total = total if before is None else total.add_(before)
                continue
            part = channel.read(rank, self._number, total.dtype, total.shape)
            if rank > channel.rank:
                total.add_(part)
            else:
                before = part if before is None else before + part
        for rank in range(channel.size):
            if rank != channel.rank:
                channel.done(rank, self._number)


class _Data:
    """A mapped file.

    Attributes:
        file: its descriptor.
        size: its bytes.
    """

    def __init__(self, file: int):
        self.file = file
        self._bytes = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        self.size = len(self._bytes)

    def part(self, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        return self._bytes[begin : begin + size].view(dtype).view(shape)


def _read_by_this(rank: int, number: int) -> int:
    """Returns the index of the counter by which a rank says that it has read a post of `rank`."""
    return _PENDING * (1 + rank) + number % _PENDING


def _ended(rank: int, pid: int) -> ConnectionError:
    return ConnectionError(f"rank {rank} (process {pid}) has ended")


def _name_of(pid: int, file: int) -> str:
    """Returns the unique name of a file in memory by its descriptor in a process."""
    return os.readlink(f"/proc/{pid}/fd/{file}")


@contextmanager
def _opened(pid: int, file: int) -> Iterator[int]:
    """Opens a file of a process by its descriptor there; it may be mapped for longer."""
    opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)


class _Control:
    """Counters, and places of posts, of one rank.

    Attributes:
        counters: uint32, `[(1 + ranks) * _PENDING]`: numbers of the posts, then of those of each
            rank that this one has read.
        places: of each pending post the index of its file and where the part of each rank begins.
        files: descriptors of the files of data.
    """

    def __init__(self, file: int, size: int):
        data = mmap.mmap(file, self.num_bytes(size))
        numbers = _PENDING * (1 + size)
        self.counters = np.frombuffer(data, np.uint32, numbers)
        rest = np.frombuffer(data, np.int64, numbers + _PENDING, offset=numbers * 4)
        self.places = rest[:numbers].reshape(_PENDING, 1 + size)
        self.files = rest[numbers:]
        self._address = self.counters.ctypes.data
        functions = _functions()
        assert functions is not None
        self._set, self._await = functions

    @staticmethod
    def num_bytes(size: int) -> int:
        numbers = _PENDING * (1 + size)
        return numbers * 4 + (numbers + _PENDING) * 8

    def set(self, index: int, value: int) -> None:
        self._set(self._address + 4 * index, value)

    def wait(self, index: int, value: int, nanoseconds: int) -> bool:
        return bool(self._await(self._address + 4 * index, value, nanoseconds))


@functools.cache
def _functions() -> tuple[Any, Any] | None:
    """Returns the functions that set and await counters; None where there are none."""
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        set_counter, await_counter = library.dlrm_set_counter, library.dlrm_await_counter
        os.close(os.memfd_create("dlrm"))
    except (OSError, AttributeError):  # not built, built earlier, or no Linux
        return None
    set_counter.argtypes = ctypes.c_void_p, ctypes.c_uint32
    set_counter.restype = None
    await_counter.argtypes = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64
    return set_counter, await_counter


def _start_of(pid: int) -> str | None:
    """Returns when a process has started; None if it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else rest[18]
