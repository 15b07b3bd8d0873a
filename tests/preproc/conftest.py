import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def java():
    """Skips without a Java that the scripts accept."""
    found = subprocess.run(
        [ROOT / "preproc" / "check_java.sh"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(found.stderr.removeprefix("error: ").partition(". Install it")[0])


@pytest.fixture(scope="session")
def spark(java, tmp_path_factory):
    """One Spark for all tests, as it takes seconds to start."""
    pytest.importorskip("pyspark")
    from dlrm.preproc.execution.engines import EngineError
    from dlrm.preproc.execution.spark_engine import spark_engine

    folder = tmp_path_factory.mktemp("spark")
    os.environ["SPARK_LOCAL_DIRS"] = str(folder)
    try:
        context = spark_engine("local[2]", 2, folder / "spark.log")
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
