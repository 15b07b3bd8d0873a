"""Native libraries of another machine, or of a later C library, are named in a line each."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from dlrm import ops

MODULE = f"_host{sysconfig.get_config_var('EXT_SUFFIX')}"  # of this Python
GARBAGE = b"\x7fELF of another machine"
USE = """
import sys, torch
from dlrm import ops
from dlrm.data.sources.log_lines import LogFormat, parse_lines
try:
    parse_lines(b"1", LogFormat())
except ValueError as error:
    refused = str(error)
dense, embeddings = torch.load(sys.argv[1])
torch.save([ops.native_available(), refused, ops.dot_interaction(dense, embeddings)], sys.argv[2])
"""


@pytest.fixture
def package(tmp_path, root):
    """Returns a folder with a copy of the package whose libraries cannot be loaded."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(root / "dlrm", tmp_path / "dlrm", ignore=ignored)
    for name in ("_ops_cpu.so", "_served.so", MODULE):
        Path(tmp_path, "dlrm", name).write_bytes(GARBAGE)
    return tmp_path


def test_libraries_that_cannot_be_loaded_are_named(package):
    dense, embeddings = torch.randn(3, 8), torch.randn(3, 4, 8)
    given, found = package / "given.pt", package / "found.pt"
    torch.save([dense, embeddings], given)
    done = subprocess.run(
        [sys.executable, "-c", USE, given, found],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=True,
    )
    parser, served, operators = sorted(done.stderr.splitlines())
    assert "plain-torch references run instead of the native ops" in operators
    assert "dlrm/_ops_cpu.so" in operators
    for line, name in ((parser, MODULE), (served, "_served.so")):
        assert "Python works in place of a compiled library of dlrm" in line
        assert f"dlrm/{name}" in line
    native, refused, products = torch.load(found, weights_only=False)
    assert not native
    torch.testing.assert_close(products, ops.dot_interaction(dense, embeddings))
    assert "expected the compiled dlrm._host, which reads logs, CSV and JSON lines" in refused
    assert MODULE in refused


def test_the_module_is_loaded_from_an_archive(root, tmp_path):
    """Spark's `--py-files` puts the package on executors so."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "dlrm", tmp_path / "content" / "dlrm", ignore=ignored)
    archive = shutil.make_archive(str(tmp_path / "dlrm"), "zip", tmp_path / "content")
    code = "from dlrm.data.sources import native; print(native.__file__, native.host.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": archive},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{archive}/dlrm/data/sources/native.py dlrm._host\n"
