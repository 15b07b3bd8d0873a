"""Hostile clients beside ordinary ones: a real server answers every valid request correctly.

All load goes to a local server and is bounded in number and time. Requests that crash the server's
own binary (Triton 2.51) are not sent: chunked bodies, and JSON data with a larger shape.
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
from triton_testing import ask as send, raw

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
    """Rows of the test split without labels, and their logits."""

    lines: list[bytes]
    logits: np.ndarray


@pytest.fixture(scope="module")
def rows(trained):
    encoded = [line.encode() for line in trained.rows]
    return Rows(encoded, dlrm.load(trained.checkpoint).logits(trained.rows))


@pytest.fixture
def server(export, serve, trained, tmp_path):
    with serve(export(trained, tmp_path / "repository"), tmp_path / "log") as running:
        yield running


def post(connection, header, body=b"", path=INFER, length=None):
    """Sends a JSON or raw header and binary data; returns the status and the answer."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    connection.request("POST", path, text + body, {"Inference-Header-Content-Length": str(size)})
    response = connection.getresponse()
    return response.status, response.read()


def tensor(name, shape, kind, data):
    """Returns the header's entry for a binary input."""
    size = {"binary_data_size": len(data)}
    return {"name": name, "shape": shape, "datatype": kind, "parameters": size}


def ask(client, rows, first, count):
    """Sends rows and checks the answer; returns the latency in seconds."""
    sent = raw(rows.lines[first : first + count])
    began = time.perf_counter()
    found = send(client, sent).as_numpy("output__0")[:, 0]
    seconds = time.perf_counter() - began
    np.testing.assert_allclose(found, rows.logits[first : first + count], rtol=1e-4, atol=1e-5)
    return seconds


def ask_for(address, rows, seconds):
    """Runs 8 clients at 20 requests a second each; returns latencies and failures."""
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
    """Returns a header and its data: false shapes or wide rows."""
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
            ([1, 2 * MIB], b"\0" * (2 * MIB)),
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
    """Sends hostile requests; counts those answered."""
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
    """Returns the proportional set size of a process and its descendants, in bytes."""
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
    assert after < 1.3 * before


KINDS = ["UINT8", "INT8", "INT64", "INT32", "FP32", "FP16", "BOOL", "BYTES", "XYZ", ""]
NAMES = ["raw__0", "raw__0", "input__0", "input__1", "output__0", "", "raw__0\0", "x" * 1000]
SIZES = [0, 1, 2, 3, 4, 7, 100, 4096, 4097, 2**31, 2**32 + 1, 2**62, 2**63, 2**64 - 1]
PATHS = [
    "/v2/models/none/infer",
    "/v2/models/model/versions/999/infer",
    "/v2/models/model/versions/x/infer",
    "/v2/models//infer",
    "/v2/repository/models/model/unload",
    "/v2/systemsharedmemory/region/own/register",
    "/v2/logging",
]
PARAMETERS = [
    {"binary_data_size": 2**40},
    {"binary_data_size": -1},
    {"binary_data_size": "1"},
    {"shared_memory_region": "none", "shared_memory_byte_size": 8},
    {"classification": 3},
    {},
]


def fields(draw, rows):
    """Returns a raw row with random bytes inserted."""
    line = bytearray(draw.choice(rows.lines))
    for _ in range(draw.randrange(4)):
        line.insert(draw.randrange(len(line) + 1), draw.choice([0, 9, 10, 13, 45, 255, 48, 102]))
    return bytes(line)


def random_tensor(draw, rows):
    """Returns an input, often invalid, and its data."""
    kind, name = draw.choice(KINDS), draw.choice(NAMES)
    choice = draw.randrange(6)
    if choice == 0:  # a possibly valid raw row
        data = fields(draw, rows)
        return tensor("raw__0", [1, len(data)], "UINT8", data), data
    if choice == 1:  # random bytes of the stated shape
        shape = [draw.randrange(1, 6), draw.randrange(1, 300)]
        data = draw.randbytes(shape[0] * shape[1])
        return tensor(draw.choice(["raw__0", name]), shape, "UINT8", data), data
    if choice == 2:  # numericals or ids, mostly bad ones
        count = draw.randrange(1, 4)
        values = [draw.choice([0.0, 1.0, np.nan, np.inf, 3e38]) for _ in range(3 * count)]
        data = struct.pack(f"{3 * count}f", *values)
        if draw.random() < 0.5:
            return tensor("input__0", [count, 3], "FP32", data), data
        ids = [draw.choice([0, 1, -1, 50, 2**63 - 1]) for _ in range(4 * count)]
        data = struct.pack(f"{4 * count}q", *ids)
        return tensor("input__1", [count, 4], "INT64", data), data
    if choice == 3:  # a false shape, of any rank
        data = draw.randbytes(draw.choice([1, 2, 4, 8, 12, 52]))
        shape = [draw.choice(SIZES[1:]) for _ in range(draw.randrange(1, 4))]
        return tensor(name, shape, kind, data), data
    if choice == 4:  # JSON of small shapes: the server allocates what the shape says
        data = [draw.choice([0, 1, -5, 2**70, 1.5, "a", None, [1], {}]) for _ in range(3)]
        shape = draw.choice([[1, 3], [3], [3, 1], [1, 4]])
        return {"name": name, "shape": shape, "datatype": kind, "data": data}, b""
    data = draw.randbytes(5)
    one = {**tensor(name, [1, 5], kind, data), "parameters": draw.choice(PARAMETERS)}
    if draw.random() < 0.3:
        one.pop(draw.choice(sorted(one)))
    return one, data


def random_request(draw, rows):
    """Draws `post` arguments."""
    pairs = [random_tensor(draw, rows) for _ in range(draw.choice([0, 1, 1, 1, 2, 2, 3]))]
    header = {"inputs": [one for one, _ in pairs]}
    if draw.random() < 0.2:
        outputs = [
            {"name": draw.choice(["output__0", "none"]), "parameters": {"binary_data": True}}
        ]
        header.update(draw.choice([{"outputs": outputs}, {"id": "x" * 500}, {"outputs": 1}]))
        header["parameters"] = draw.choice([{"priority": 1, "timeout": 1}, {"a": [1]}, 5, {}])
    arguments = {"body": b"".join(data for _, data in pairs)}
    choice = draw.random()
    if choice < 0.05:
        text = json.dumps(header).encode()
        arguments["length"] = draw.choice([0, 1, len(text) - 1, len(text) + 1, 2**40, -1])
    elif choice < 0.1:
        arguments["path"] = draw.choice(PATHS)
    elif choice < 0.15:
        text = json.dumps(header).encode()
        header = draw.choice([text[: draw.randrange(len(text))], b"[" * 50, draw.randbytes(30)])
    elif choice < 0.16:
        header, arguments["body"] = lying_and_wide(draw)
    return {"header": header, **arguments}


def test_random_requests_harm_nobody_else(server, rows):
    seed = random.randrange(2**32)
    print(f"\nseed {seed}")
    draw, statuses = random.Random(seed), {}
    client = grpc.InferenceServerClient(server.grpc)
    connection = http.client.HTTPConnection(server.http, timeout=5)
    for number in range(REQUESTS):
        request = random_request(draw, rows)
        try:
            status, _ = post(connection, **request)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            status = type(error).__name__
        statuses[status] = statuses.get(status, 0) + 1
        assert server.process.poll() is None, f"request {number} ended the server: {request}"
        if number % 10 == 0:
            count = draw.randrange(1, 50)
            ask(client, rows, draw.randrange(len(rows.lines) - count), count)
    print(f"{REQUESTS} hostile requests, answered {statuses}; {REQUESTS // 10} valid ones, right")
    assert client.is_server_ready()
