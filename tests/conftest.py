"""Fixtures for all tests."""

import dlrm.environment  # noqa: F401  # first, as in the commands

# isort: split
import contextlib
import gc
import os
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType

import listed_model
import pytest
import seeding
import torch
import trained_model
from hypothesis import HealthCheck, settings
from ranks import Ranks

from dlrm.remote.uri import Uri

pytest_plugins = ["expected_skips"]
ROOT = Path(__file__).parent.parent

# No test fails for being slow: the machine may be busy.
# Every run draws the same cases; `--hypothesis-profile=explore` draws others.
untimed = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **untimed)
settings.register_profile("explore", **untimed)
settings.load_profile("same")


# Each file runs in one process, so the longest files start first and none finishes alone. Those of
# triton/ with gRPC channels of their own come last, as the process should not be forked afterward.
LONGEST = (
    *("ops/test_row_update.py", "scripts/test_dist_main.py", "triton/test_export.py"),
    *("scripts/systems/test_systems.py", "scripts/test_main.py", "preproc/test_scripts.py"),
    *("tasks/test_parallel.py", "preproc/test_inputs.py"),
    *("kills/test_checkpoint_kills.py", "ops/test_cuda.py", "tasks/test_fake_device.py"),
    *("test_real_input.py", "preproc/test_spark_query.py", "preproc/logs/test_pipeline.py"),
    *("preproc/test_resume.py", "preproc/tables/test_table_oracle.py", "ops/test_library.py"),
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Searches for no garbage while it collects, nor later among what it collected."""
    gc.disable()
    result = yield
    gc.freeze()  # 700,000 objects
    gc.enable()
    return result


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of the longest files first, and marks those that start Spark or emulate."""
    for item in items:
        for marker, fixtures in (("spark", {"spark", "java"}), ("emulated", {"emulator"})):
            if fixtures.intersection(getattr(item, "fixturenames", ())):
                item.add_marker(marker)
    place = {ROOT / "tests" / name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


torch.manual_seed(seeding.SEED)  # also of GPUs, once they are first used


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Lets each test draw the same, whichever tests run before it."""
    seeding.seed()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object],
) -> Generator[None, object, object]:
    """Lets a fixture of several tests draw the same for whichever of them is first."""
    if fixturedef.scope == "function":
        return (yield)
    states = seeding.state()
    seeding.seed()
    try:
        return (yield)
    finally:  # where a test asks for it halfway, its later draws do not depend on this
        seeding.restore(states)


@pytest.fixture(scope="session")
def root() -> Path:
    """Returns the repository root."""
    return ROOT


@pytest.fixture(scope="session")
def java() -> None:
    """Skips without a Java that the scripts accept."""
    script = ROOT / "preproc" / "check_java.sh"
    found = subprocess.run([script], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.removeprefix("error: ").partition(". Install it")[0])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Returns the device of a test; tests of the ops have their own `device`."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Sums the gradients of a row in a fixed order, which a GPU does only on request."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # some torch ops have no such order
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Runs on one thread; most networks of tests are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _full_float32() -> None:
    """Disables TF32, which a command run on a GPU leaves enabled for later tests."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="session", autouse=True)
def _no_curves() -> Iterator[None]:
    """Hides matplotlib: drawing its curves takes three quarters of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        yield


_MATPLOTLIB: list[ModuleType] = []


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the runs of a test draw their curves."""
    monkeypatch.delitem(sys.modules, "matplotlib")
    if _MATPLOTLIB:  # its submodules are still loaded and must match it
        monkeypatch.setitem(sys.modules, "matplotlib", _MATPLOTLIB[0])
    else:
        _MATPLOTLIB.append(pytest.importorskip("matplotlib"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Returns the folder of real rows, which are not in the repository."""
    path = Path(os.environ.get("DLRM_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no real rows: {path} is not there (DLRM_SHARED_DATA names the folder)")
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> trained_model.Trained:
    """Returns a log, its dataset, and a checkpoint of a model trained on it."""
    return trained_model.make(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def listed(tmp_path_factory: pytest.TempPathFactory) -> listed_model.Listed:
    """Returns a table with lists, its dataset, and a checkpoint of a model trained on it."""
    return listed_model.make(tmp_path_factory.mktemp("listed"))


@pytest.fixture(scope="session")
def other_trained(tmp_path_factory: pytest.TempPathFactory) -> trained_model.Trained:
    """Returns the same as `trained` for another log."""
    return trained_model.make(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def other_ids(trained: trained_model.Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a dataset of the same log and table sizes whose ids mean other values."""
    lines = trained.dataset.with_name("day_0").read_text().splitlines()
    directory = tmp_path_factory.mktemp("ids") / "dataset"
    directory.mkdir()
    return trained_model.write_dataset(directory, lines, other_ids=True)


@pytest.fixture(scope="session")
def ranks():
    """Returns a function from a size to that many gloo processes; see `ranks.Ranks`."""
    with contextlib.ExitStack() as stack:
        started: dict[int, Ranks] = {}

        def of_size(size: int) -> Ranks:
            if size not in started or not started[size].alive():
                started[size] = stack.enter_context(Ranks(size))
            return started[size]

        yield of_size


@pytest.fixture(scope="session")
def storage(root, tmp_path_factory):
    """A server with the interface of S3."""
    sys.path.insert(0, str(root / "benchmarks"))
    from s3_server import Endpoint

    sys.path.remove(str(root / "benchmarks"))
    with Endpoint(tmp_path_factory.mktemp("store")) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(storage):
    """The server `storage`, which fails as `set` says."""
    before = storage.facts()["settings"]
    yield storage
    storage.set(**before)


@pytest.fixture
def store_uri(endpoint, monkeypatch, tmp_path):
    """The URI of a new bucket of `endpoint`; its credentials are in the environment."""
    for name, value in endpoint.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = f"b{uuid.uuid4().hex}"
    endpoint.make(name)
    return Uri("s3", name)
