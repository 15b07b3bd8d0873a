"""Fixtures for all tests."""

import dlrm.scripts.environment  # noqa: F401  # first, as in the commands

# isort: split
import os
from pathlib import Path

import pytest

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
