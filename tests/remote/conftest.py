"""Servers with the interface of S3, on this machine."""

import io
import re
import uuid

import pytest

from dlrm.remote.uri import Uri


@pytest.fixture(scope="session")
def s3_server():
    """moto's server, which keeps objects in memory, while it runs."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3_endpoint(s3_server):
    """The address of the server."""
    host, port = s3_server.get_host_and_port()
    return f"http://{host}:{port}"


@pytest.fixture
def watchers(s3_server, monkeypatch):
    """Functions that see the method and the path of each request; a true result refuses it."""
    answer, functions = s3_server._server.app, []

    def watched(environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if environ["QUERY_STRING"] == "delete":
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = io.BytesIO(body)
            method, path = "DELETE", f"{path}/{re.search(b'<Key>(.*?)</Key>', body)[1].decode()}"
        refusals = [watch(method, path) for watch in functions]
        if any(refusals):
            start_response("503 Service Unavailable", [])
            return [b""]
        return answer(environ, start_response)

    monkeypatch.setattr(s3_server._server, "app", watched)
    return functions


@pytest.fixture
def bucket(s3_endpoint, monkeypatch, tmp_path):
    """The URI of a new bucket; its server and credentials are in the environment."""
    import boto3

    environment = {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    name = f"b{uuid.uuid4().hex}"
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=name)
    return Uri("s3", name)
