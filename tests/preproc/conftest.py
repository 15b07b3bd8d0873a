import os

import pytest


@pytest.fixture(scope="session")
def spark(java, storage, tmp_path_factory):
    """One Spark for all tests, as it takes seconds to start; its workers know the storage."""
    pytest.importorskip("pyspark")
    from dlrm.preproc.errors import EngineError
    from dlrm.preproc.spark.session import SparkConfig, session_engine, spark_session

    folder = tmp_path_factory.mktemp("spark")
    os.environ["SPARK_LOCAL_DIRS"] = str(folder)
    try:
        settings = tuple(f"spark.executorEnv.{k}={v}" for k, v in storage.environment.items())
        context = spark_session(SparkConfig("local[2]", 2, settings), 2, folder / "spark.log")
        started = session_engine(context.__enter__(), None, lambda line: None)
    except EngineError as error:
        pytest.skip(f"no Spark here: {error}")
    yield started
    context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def local():
    """Two processes for all tests."""
    from dlrm.preproc.duckdb_engine import local_engine

    with local_engine(2) as engine:
        yield engine


@pytest.fixture(scope="session", params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def engine(request):
    """Each engine."""
    return request.getfixturevalue(request.param)
