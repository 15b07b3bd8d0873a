"""The right to write below a URI, which one process at a time has.

It is an object, `URI/writer.json`, written on condition that there is none, and renewed on
condition that it is the one that this process wrote last. The right of a process that has ended is
taken over at once on its own machine, and on others once it has not been renewed for a minute.
"""

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dlrm.command_line import say_aside
from dlrm.documents import one_line, parse_json
from dlrm.remote.store import NEW, Entry, Store
from dlrm.remote.uri import Uri

WRITER = "writer.json"
RENEWED_SECONDS, STALE_SECONDS = 20.0, 60.0
_TRIES = 3  # against others that write it at the same time


class Lease:
    """The right of this process to write below a URI, until `release`.

    Attributes:
        lost: who has taken it over, in a few words, if somebody has.

    Raises:
        BlockingIOError: another process has it; the message has host, process and time.
        OSError: the store cannot be read or written.
    """

    def __init__(self, uri: Uri, store: Store) -> None:
        uri.check_writable()
        self.uri, self.lost = uri, ""
        self._store, self._key = store, uri.below(WRITER).key
        self._version, self._renewals, self._renewed = "", 0, time.monotonic()
        self._facts = {
            "id": secrets.token_hex(8),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "processes": _processes(),
            "started": _started(os.getpid()),
            "since": datetime.now(timezone.utc).isoformat(" ", "seconds"),
        }
        self._turn = threading.Lock()  # of its two threads
        if not store.protects:
            note = f"note: {uri}: two runs that write there at once are not kept apart, since "
            note += f"{uri.scheme}:// has no conditional writes"
            say_aside(note)
        self._take()
        self._ended = threading.Event()
        threading.Thread(target=self._keep, daemon=True, name="dlrm-lease").start()

    def check(self) -> None:
        """Raises OSError unless this process still has the right, which it renews if it is old."""
        if time.monotonic() > self._renewed + STALE_SECONDS - RENEWED_SECONDS:
            self._renew()
        if self.lost:
            raise BlockingIOError(
                f"{self.uri}: {self.lost} has taken over the place, as this process could not "
                f"reach it for {STALE_SECONDS:.0f} s"
            )

    def release(self) -> None:
        """Gives the right back."""
        self._ended.set()
        with suppress(OSError), self._turn:
            found = self._read()
            if found is not None and found[1].get("id") == self._facts["id"]:
                self._store.remove([self._key])

    def _take(self) -> None:
        for _ in range(_TRIES):
            found = self._read()
            if found is not None and found[1].get("id") != self._facts["id"]:
                entry, facts = found
                silent = max(0, self._clock() - entry.modified)
                if _is_alive(facts, silent):
                    raise BlockingIOError(
                        f"{self.uri}: another run writes there: {_named(facts)}, which was active "
                        f"{silent:.0f} s ago; once it has ended, wait {STALE_SECONDS:.0f} s at most"
                    )
            try:
                self._write(NEW if found is None else found[0].version)
                return
            except FileExistsError:  # another was faster
                continue
            except FileNotFoundError:  # it was removed, or else there is no bucket
                if found is None:
                    raise
        raise BlockingIOError(f"{self.uri}: other runs want to write there at the same time")

    def _keep(self) -> None:
        while not self._ended.wait(RENEWED_SECONDS) and not self.lost:
            with suppress(OSError):  # tries again
                self._renew()

    def _renew(self) -> None:
        with self._turn:
            if self._ended.is_set():
                return
            try:
                self._write(self._version)
            except (FileExistsError, FileNotFoundError):
                found = self._read()
                if found is None:
                    self._write(NEW)
                elif found[1].get("id") == self._facts["id"]:  # the answer to a write was lost
                    self._version, self._renewed = found[0].version, time.monotonic()
                else:
                    self.lost = _named(found[1])

    def _write(self, only_if: str) -> None:
        self._renewals += 1  # so that each content, and its ETag, is another
        content = json.dumps({**self._facts, "renewals": self._renewals}, indent=2) + "\n"
        began = time.monotonic()
        condition = only_if if self._store.protects else None
        self._version = self._store.write(self._key, content.encode(), condition)
        self._renewed = began

    def _clock(self) -> float:
        """Returns the time by the store's clock, from which this machine's may differ."""
        key = self.uri.below(f".{self._facts['id']}").key
        self._store.write(key, b"")
        try:
            return self._store.entry(key).modified
        finally:
            with suppress(OSError):
                self._store.remove([key])

    def _read(self) -> tuple[Entry, dict[str, Any]] | None:
        for _ in range(_TRIES):
            try:
                entry = self._store.entry(self._key)
            except FileNotFoundError as error:
                if "no such bucket" in str(error):
                    raise
                return None
            with suppress(OSError):  # replaced meanwhile
                content = bytes(self._store.read(entry))
                try:
                    return entry, parse_json(content, str(self.uri.below(WRITER)))
                except ValueError:
                    return entry, {}
        raise OSError(f"{self.uri.below(WRITER)}: cannot be read")


def _is_alive(facts: dict[str, Any], silent: float) -> bool:
    """Returns whether a process that has been silent for some seconds may still have its right."""
    if facts.get("processes") == _processes():  # it can be looked up here
        return _started(facts.get("pid")) == facts.get("started")
    return silent < STALE_SECONDS


def _named(facts: dict[str, Any]) -> str:
    pid, host, since = (one_line(facts.get(name)) for name in ("pid", "host", "since"))
    return f"process {pid} of {host}, since {since}"


def _processes() -> str:
    """Returns what identifies the processes among which this one has its number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # unknown, so like no other


def _started(pid: Any) -> str | None:
    """Returns when a process has started, in ticks; None if there is none."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, ValueError, TypeError, IndexError):
        return None
