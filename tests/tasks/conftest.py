"""Runs tests of tasks on one thread: they are too small for more."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread): ...
