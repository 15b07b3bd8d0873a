"""A server with the interface of S3 in this process, which tests watch."""

import asyncio
import re
import sys
import threading
import uuid
from pathlib import Path

import pytest

from dlrm.remote.uri import Uri

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import s3_server  # noqa: E402

sys.path.pop(0)


class Watched(s3_server.Buckets):
    """Buckets whose requests functions see, and refuse by a true result."""

    def __init__(self, folder):
        super().__init__(folder, s3_server.Settings())
        self.watchers = []

    def answer(self, request, body):
        method, path = request.method, f"/{request.bucket}/{request.key}"
        if "delete" in request.query:
            method, path = "DELETE", path + re.search(r"<Key>(.*?)</Key>", body.read_text())[1]
        refusals = [watch(method, path) for watch in self.watchers]
        if any(refusals):
            return s3_server.refusal(503, "ServiceUnavailable")
        return super().answer(request, body)


@pytest.fixture(scope="session")
def watched(tmp_path_factory):
    """The server, after its address."""
    buckets, loop = Watched(tmp_path_factory.mktemp("buckets")), asyncio.new_event_loop()
    made = loop.create_server(lambda: s3_server.Connection(buckets), "127.0.0.1", 0)
    address = loop.run_until_complete(made).sockets[0].getsockname()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    yield f"http://{address[0]}:{address[1]}", buckets
    loop.call_soon_threadsafe(loop.stop)


@pytest.fixture
def watchers(watched):
    """Functions that see the method and the path of each request; a true result refuses it."""
    functions = watched[1].watchers
    yield functions
    functions.clear()


@pytest.fixture
def bucket(watched, monkeypatch, tmp_path):
    """The URI of a new bucket; its server and credentials are in the environment."""
    url, buckets = watched
    environment = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    name = f"b{uuid.uuid4().hex}"
    buckets.answer(s3_server.Request("PUT", name, "", {}, {}), None)
    return Uri("s3", name)
