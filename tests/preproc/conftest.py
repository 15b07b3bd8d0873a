import os
import sys
import uuid

import pytest

from dlrm.remote.uri import Uri


@pytest.fixture(scope="session")
def endpoint(root, tmp_path_factory):
    """A server with the interface of S3."""
    sys.path.insert(0, str(root / "benchmarks"))
    from s3_server import Endpoint

    sys.path.remove(str(root / "benchmarks"))
    with Endpoint(tmp_path_factory.mktemp("store")) as endpoint:
        yield endpoint


@pytest.fixture
def store_uri(endpoint, monkeypatch, tmp_path):
    """The URI of a new bucket of `endpoint`; its credentials are in the environment."""
    for name, value in endpoint.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = f"b{uuid.uuid4().hex}"
    endpoint.make(name)
    return Uri("s3", name)


@pytest.fixture(scope="session")
def spark(java, endpoint, tmp_path_factory):
    """One Spark for all tests, as it takes seconds to start; its workers know the endpoint."""
    pytest.importorskip("pyspark")
    from dlrm.preproc.execution.engines import EngineError
    from dlrm.preproc.execution.spark_engine import spark_engine

    folder = tmp_path_factory.mktemp("spark")
    os.environ["SPARK_LOCAL_DIRS"] = str(folder)
    try:
        settings = {f"spark.executorEnv.{k}": v for k, v in endpoint.environment.items()}
        context = spark_engine("local[2]", 2, folder / "spark.log", settings)
        started = context.__enter__()
    except EngineError as error:
        pytest.skip(f"no Spark here: {error}")
    yield started
    context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def local():
    """Two processes for all tests."""
    from dlrm.preproc.execution.engines import local_engine

    with local_engine(2) as engine:
        yield engine


@pytest.fixture(scope="session", params=["local", "spark"])
def engine(request):
    """Each engine."""
    return request.getfixturevalue(request.param)
