"""Fixtures of the files of earlier versions."""

import pytest
from archives import ARCHIVES, unpack


@pytest.fixture(scope="session", params=ARCHIVES, ids=lambda path: path.name.split(".tar")[0])
def written(request, tmp_path_factory):
    """Returns the files of an earlier version, `archives.Written`."""
    return unpack(request.param, tmp_path_factory.mktemp("written"))


@pytest.fixture(autouse=True)
def _one_thread(one_thread): ...
