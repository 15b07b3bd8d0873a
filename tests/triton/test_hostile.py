"""Hostile clients beside ordinary ones: every valid request of a real server is answered right.

All load goes to a server of this machine, bounded in number and time. What the server's own binary
(Triton 2.51) does not survive is not sent: chunked bodies, and JSON data with a shape beyond it.
"""

import http.client
import importlib.util
import json
import multiprocessing
import random
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import dlrm

pytestmark = pytest.mark.slow
if importlib.util.find_spec("pytriton") is None:
    pytest.skip("nvidia-pytriton is not installed", allow_module_level=True)
grpc = pytest.importorskip("tritonclient.grpc", reason="needs dlrm[serve]")

CLIENTS, HOSTILE_CLIENTS = 8, 2
QUIET_SECONDS, HOSTILE_SECONDS = 30, 60
REQUESTS = 10_000
INFER = "/v2/models/model/infer"
MIB = 1 << 20


class Rows(NamedTuple):
    """Rows of the test split without label, and their logits."""

    lines: list[bytes]
    logits: np.ndarray


@pytest.fixture(scope="module")
def rows(trained):
    lines = [line.split("\t", 1)[1] for line in trained.lines]
    return Rows([line.encode() for line in lines], dlrm.load(trained.checkpoint).logits(lines))


@pytest.fixture
def server(export, serve, trained, tmp_path):
    with serve(export(trained, tmp_path / "repository"), tmp_path / "log") as running:
        yield running


def post(connection, header, body=b"", path=INFER, length=None):
    """Sends a header of JSON, or of any bytes, and binary data; returns status and answer."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    connection.request("POST", path, text + body, {"Inference-Header-Content-Length": str(size)})
    response = connection.getresponse()
    return response.status, response.read()


def tensor(name, shape, kind, data):
    """An input of binary data, as the header has it."""
    size = {"binary_data_size": len(data)}
    return {"name": name, "shape": shape, "datatype": kind, "parameters": size}


def ask(client, rows, first, count):
    """Sends rows and compares the answer; returns the seconds that it took."""
    padded = np.array(rows.lines[first : first + count])
    data = padded.view(np.uint8).reshape(len(padded), -1)
    sent = grpc.InferInput("raw__0", list(data.shape), "UINT8")
    sent.set_data_from_numpy(data)
    began = time.perf_counter()
    found = client.infer("model", [sent]).as_numpy("output__0")[:, 0]
    seconds = time.perf_counter() - began
    np.testing.assert_allclose(found, rows.logits[first : first + count], rtol=1e-4, atol=1e-5)
    return seconds


def ask_for(address, rows, seconds):
    """Asks as 8 clients do, 20 times a second each; returns latencies and failures."""
    latencies, failures, end = [], [], time.monotonic() + seconds

    def work(number):
        client, draw = grpc.InferenceServerClient(address), random.Random(number)
        while time.monotonic() < end:
            count = draw.randrange(1, 9)
            began = time.monotonic()
            try:
                first = draw.randrange(len(rows.lines) - count)
                latencies.append(ask(client, rows, first, count))
            except Exception as error:
                failures.append(error)
            time.sleep(max(began + 0.05 - time.monotonic(), 0))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies, failures


def lying_and_wide(draw):
    """A header and its binary data: shapes that lie, or rows that are wide."""
    shape, data = draw.choice(
        [
            ([2**62, 2], b"1\t"),
            ([2**32, 2], b"\t\t"),
            ([2**62, 4], b"1\t2\t"),
            ([1, 20_000], b"1" * 20_000),
            ([1, 20_000], b"\t" * 20_000),
            ([2, 10_000], (b"1\t2\t3\t" + b"a" * 9_994) * 2),
            ([1, MIB], b"9" * MIB),
            ([1, MIB], b"1\t2".ljust(MIB, b"\0")),
            ([1, MIB], b"\t" * MIB),
            ([1, MIB + 1], b"1" * (MIB + 1)),
            ([3, 2 * MIB], b"\0" * (6 * MIB)),
        ]
    )
    if draw.random() < 0.8:
        return {"inputs": [tensor("raw__0", shape, "UINT8", data)]}, data
    inputs = [
        tensor("input__0", [2**62, 3], "FP32", bytes(12)),
        tensor("input__1", [2**62, 4], "INT64", bytes(32)),
    ]
    return {"inputs": inputs}, bytes(44)


def attack(address, seed, seconds, answered):
    """Sends one request after another; counts them."""
    draw, end = random.Random(seed), time.monotonic() + seconds
    connection = http.client.HTTPConnection(address, timeout=30)
    while time.monotonic() < end:
        try:
            post(connection, *lying_and_wide(draw))
            with answered.get_lock():
                answered.value += 1
        except (OSError, http.client.HTTPException):
            connection.close()


def memory(process):
    """Bytes of a process and all that it has started, shared ones divided among them."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    total = 0
    for pid in found:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


def test_hostile_clients_harm_nobody_else(server, rows):
    seed = random.randrange(2**32)
    print(f"\nseed {seed}")
    ask_for(server.grpc, rows, 2)
    quiet, failures = ask_for(server.grpc, rows, QUIET_SECONDS)
    before = memory(server.process)
    assert not failures
    context = multiprocessing.get_context("spawn")
    answered = context.Value("q", 0)
    attackers = [
        context.Process(target=attack, args=(server.http, seed + i, HOSTILE_SECONDS, answered))
        for i in range(HOSTILE_CLIENTS)
    ]
    for attacker in attackers:
        attacker.start()
    beside, failures = ask_for(server.grpc, rows, HOSTILE_SECONDS)
    for attacker in attackers:
        attacker.join()
    after = memory(server.process)
    p50s, p99s = (
        [np.percentile(seconds, share) * 1e3 for seconds in (quiet, beside)] for share in (50, 99)
    )
    print(
        f"quiet: {len(quiet)} requests, p50 {p50s[0]:.2f} ms, p99 {p99s[0]:.2f} ms; beside "
        f"{answered.value} hostile ones: {len(beside)}, p50 {p50s[1]:.2f} ms, p99 {p99s[1]:.2f} "
        f"ms, {p99s[1] / p99s[0]:.2f} times; memory {before / MIB:.0f} MiB, then "
        f"{after / MIB:.0f}, {after / before - 1:+.1%}; failed or wrong: {len(failures)}"
    )
    assert not failures, failures[0]
    assert answered.value > 100
    assert after < 1.5 * before
