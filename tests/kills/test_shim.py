"""The shim sees what Python, numpy and safetensors write, and kills at the given call."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from killing import Forks
from safetensors.torch import save_file

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def forks():
    with Forks("test_shim") as started:
        yield started


def python_writes(folder):
    (folder / "a").write_text("0123456789")
    (folder / "a").replace(folder / "b")
    os.link(folder / "b", folder / "c")
    (folder / "b").unlink()
    (folder / "d").mkdir()
    shutil.copyfile(folder / "c", folder / "d" / "e")
    with open(folder / "d" / "e", "r+b", buffering=0) as file:
        os.fsync(file.fileno())
        file.truncate(3)
    shutil.rmtree(folder / "d")  # through directory descriptors
    os.chdir(folder)
    os.mkdir("f")
    Path("/proc/self/comm").read_text()
    Path("/dev/null").write_text("elsewhere")


def numpy_writes(folder):
    np.save(folder / "a.npy", np.arange(4))
    with open(folder / "b", "wb", buffering=0) as file:
        file.write(np.arange(4).data.cast("B"))


def safetensors_writes(folder):
    save_file({"a": torch.ones(300)}, folder / "a.safetensors")


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (python_writes, "owrlumowwstuum"),
        (numpy_writes, "owwow"),  # one of them through libc's stdio
        (safetensors_writes, "otwr"),
    ],
)
def test_every_call_is_seen(forks, tmp_path, function, calls):
    outcome = forks.run(function, tmp_path, below=tmp_path)
    assert not outcome.error, outcome.error
    assert outcome.calls == calls


def test_half_of_what_safetensors_write_is_left(forks, tmp_path):
    """safetensors writes a temporary file; Rust renames it without libc."""
    assert forks.run(safetensors_writes, tmp_path, below=tmp_path, at=3, half=True).killed
    (unfinished,) = tmp_path.iterdir()
    content = unfinished.read_bytes()
    unfinished.unlink()
    assert forks.run(safetensors_writes, tmp_path, below=tmp_path, at=4).killed
    (written,) = tmp_path.iterdir()
    whole = written.read_bytes()
    half = len(whole) // 2
    assert content == whole[:half] + bytes(len(whole) - half)  # the size was set first


def test_another_folder_is_not_counted(forks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run2").mkdir()
    assert forks.run(numpy_writes, tmp_path / "run2", below=tmp_path / "run").calls == ""


def test_a_process_dies_before_its_call_or_with_half_of_a_write(forks, tmp_path):
    file = tmp_path / "a"
    for at, half, expected in ((1, False, None), (2, False, ""), (2, True, "01234")):
        assert forks.run(python_writes, tmp_path, below=tmp_path, at=at, half=half).killed
        assert (file.read_text() if file.exists() else None) == expected
        file.unlink(missing_ok=True)
    assert forks.run(python_writes, tmp_path, below=tmp_path, at=4).killed
    assert os.listdir(tmp_path) == ["b"]
