"""The doctor reports what works and what is absent, and never fails because of it."""

import importlib.metadata
import os
import re
import warnings

import forked
import pytest
import torch

import dlrm
from dlrm import machine, ops
from dlrm.ops import library
from dlrm.scripts import doctor

pytestmark = pytest.mark.long
# Run before the doctor, in its process.
NO_LIBRARY = """
from dlrm.ops import library
library._problem = "_ops_cpu.so was not built"
library.native_available = lambda: False
"""
DIVERGENT = """
from dlrm.tasks.recommendation import Recommendation
loss = Recommendation.loss
Recommendation.loss = lambda task, batch: loss(task, batch) * float("nan")
"""
DOCTOR = "\nimport runpy\nrunpy.run_module('dlrm.scripts.doctor', run_name='__main__')\n"


def hide(*packages):
    return f"""
import importlib.metadata, sys
version = importlib.metadata.version
sys.modules |= dict.fromkeys({packages!r})
def hidden(name):
    if name in {packages!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = hidden
"""


def run_doctor(folder, *arguments, prepare="", **variables):
    """Runs the doctor where torch and the operators have been imported, in a third of the time."""
    script = folder / "prepared.py"
    script.write_text(prepare + DOCTOR)
    done = forked.run(script, *arguments, env={**os.environ, **variables}, curves=True)
    assert "Traceback" not in done.stderr + done.stdout
    return done


def states(done):
    """The states of the parts, by name."""
    return {
        name: state for state, name in re.findall(r"^(\w+) +(\S+(?: \S+)?)  ", done.stdout, re.M)
    }


@pytest.mark.skipif(not ops.native_available(), reason="the native ops are not built")
def test_what_is_here_is_reported(tmp_path):
    done = run_doctor(tmp_path, "--env")
    found = states(done)
    assert done.returncode == 0
    assert found.items() >= dict.fromkeys(["training", "native operators", "torch"], "ok").items()
    assert found.keys() >= {"dlrm", "python", "CUDA devices", "threads", "memory", "disk", "java"}
    assert f"ok      dlrm              {dlrm.__version__} in " in done.stdout
    assert "Training works here.\n\nPyTorch version: " in done.stdout


def test_training_works_without_library_java_and_matplotlib(tmp_path):
    prepare = NO_LIBRARY + hide("matplotlib")
    done = run_doctor(tmp_path, prepare=prepare, PATH=str(tmp_path), JAVA_HOME="")
    found = states(done)
    assert done.returncode == 0
    assert [found[name] for name in ("training", "native operators")] == ["ok", "slow"]
    assert found["java"] == found["matplotlib"] == "absent"
    fixes = ("-m pip install 'matplotlib>=3.8'\n", "install -y openjdk", "venv    # needs g++\n")
    for text in ("_ops_cpu.so was not built", "not installed: no curves.png", *fixes):
        assert text in done.stdout


def test_without_torch_nothing_works_and_the_command_to_install_it_is_printed(tmp_path):
    done = run_doctor(tmp_path, prepare=hide("torch"))
    assert done.returncode == 1
    assert states(done)["torch"] == "broken"
    assert "-m pip install 'torch>=2.11'\n" in done.stdout
    assert re.search(r"^broken +training ", done.stdout, re.MULTILINE)
    assert done.stdout.endswith('Training does NOT work here: fix what is marked "broken" first.\n')


def test_a_loss_that_is_not_a_number_is_no_training(tmp_path):
    done = run_doctor(tmp_path, prepare=DIVERGENT)
    assert done.returncode == 1
    assert states(done)["training"] == "broken"
    assert "-> nan" in done.stdout


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ('openjdk version "17.0.15" 2025-04-15', ("17.0.15", None)),
        ('openjdk version "25-ea"', ("25-ea", None)),
        ('java version "1.8.0_292"', "is Java 1.8.0_292; Spark needs 17 or newer"),
        ("Error: could not find libjava.so", "cannot read the version of"),
    ],
)
def test_java_is_asked_for_its_version(tmp_path, monkeypatch, says, expected):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    found = doctor.java_version()
    assert found == expected or (found[0] is None and expected in found[1])


@pytest.mark.parametrize(
    ("version", "state"), [("3.5.9", "absent"), ("4.0.0rc1", "ok"), ("5.0.1", "absent")]
)
def test_a_package_of_another_version_is_not_taken_for_the_needed_one(monkeypatch, version, state):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    ((found, _, text),) = (one for one in doctor.packages() if one[1] == "pyspark")
    assert found == state
    assert (f"{version} is installed: no preproc" in text) == (state == "absent")


def test_more_threads_than_cores_are_slow(monkeypatch):
    monkeypatch.setattr(machine, "_core_quotas", lambda: [0.5])
    state, _, text = next(doctor.room())
    assert "control group's limit" in text
    if "uses 1;" not in text:
        assert state == "slow"
        assert text.endswith("fix: export OMP_NUM_THREADS=1")


def test_a_gpu_and_what_keeps_a_run_from_it_are_said(monkeypatch):
    def found():
        return {name: (state, text) for state, name, text in doctor.operators()}

    def set_to(module, name, value):
        monkeypatch.setattr(module, name, value)

    set_to(torch.cuda, "is_available", lambda: warnings.warn("The driver is too old\nUpdate it"))
    assert found()["CUDA devices"][0] == "absent"
    assert found()["CUDA devices"][1].endswith("finds none; The driver is too old")
    set_to(torch.cuda, "is_available", lambda: True)
    set_to(torch.cuda, "device_count", lambda: 1)
    set_to(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    set_to(torch.cuda, "mem_get_info", lambda index: (130 << 30, 140 << 30))
    assert ("ok", "cuda:0 NVIDIA H200", "130.0 GiB free of 140.0") in doctor.room()
    for problem, state in ((None, "ok"), ("there is none", "slow")):
        set_to(library, "_cuda_problem", problem)
        assert found()["CUDA operators"][0] == state
        assert ("DLRM_CUDA=1" in found()["CUDA operators"][1]) == (problem is not None)


def test_requirements_are_those_of_the_package(root):
    text = (root / "pyproject.toml").read_text()
    for requirement in doctor.REQUIREMENTS:
        assert f'"{requirement}"' in text
