"""The scripts of `triton/`, which are run by path, and a real server."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "triton"


@pytest.fixture(scope="session")
def export():
    """Exports in this process: returns the lines that are printed."""
    for package in ("tritonclient.grpc", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="needs dlrm[serve]")
    sys.path.insert(0, str(SCRIPTS))
    import export as module

    def run(trained, repository, *flags):
        words = [f"--checkpoint={trained.checkpoint}", f"--save-dir={repository}", *flags]
        module.run(module.parse(words))
        return Path(repository)

    yield run
    sys.path.remove(str(SCRIPTS))
