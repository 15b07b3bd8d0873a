"""Fixtures that run the commands of `dlrm.deployment` and a real server."""

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

STARTS_WITHIN = 180  # seconds; 4 to 8 on an idle machine


class Running(NamedTuple):
    """A server: its repository, its addresses and the process that started it."""

    repository: Path
    http: str
    grpc: str
    process: subprocess.Popen


@pytest.fixture(scope="session")
def export():
    """Exports in this process; returns the repository's path."""
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="needs dlrm[serve]")
    from dlrm.deployment import export as module

    def run(trained, repository, *flags):
        words = [f"--checkpoint={trained.checkpoint}", f"--save-dir={repository}", *flags]
        module.run(module.parse(words))
        return Path(repository)

    return run


@pytest.fixture(scope="session")
def serve():
    """Runs a server on free ports of 127.0.0.1 within a block."""

    @contextmanager
    def run(repository: Path, log: Path, *flags: str) -> Iterator[Running]:
        http, grpc, metrics = _free_ports(3)
        ports = (f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}")
        command = [sys.executable, "-m", "dlrm.deployment.server", "--model-repository", repository]
        with (
            open(log, "w") as file,
            subprocess.Popen([*command, *ports, *flags], stdout=file, stderr=file) as process,
        ):
            try:
                _wait_until_ready(process, http, log)
                yield Running(repository, f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", process)
            finally:
                process.send_signal(signal.SIGTERM)

    return run


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for own in sockets:
        own.bind(("127.0.0.1", 0))
    ports = [own.getsockname()[1] for own in sockets]
    for own in sockets:
        own.close()
    return ports


def _wait_until_ready(process: subprocess.Popen, port: int, log: Path) -> None:
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")
