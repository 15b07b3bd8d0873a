"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the commands do, before torch is loaded

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real rows, which the repository does not contain."""
    path = Path(os.environ.get("DLRM_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no real rows: {path} is not there (DLRM_SHARED_DATA names the folder)")
    return path
