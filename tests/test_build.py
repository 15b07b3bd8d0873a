"""A build recompiles only what a change affects, and the wheel holds what is in the sources.

The sources here are small; setup.py, the compilers and ninja are the real ones.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

no_compiler = not any(map(shutil.which, ("g++", "c++", "clang++")))
pytestmark = [pytest.mark.long, pytest.mark.skipif(no_compiler, reason="no C++ compiler")]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")

SOURCES = {  # GCC treats headers of equal content and time as one file
    "csrc/tensors.h": "struct Tensors;\n",
    "csrc/library.cpp": '#include "tensors.h"\nint library() { return 1; }\n',
    "csrc/cpu/simd.h": "struct Simd;\n",
    "csrc/cpu/kernels.h": '#include "simd.h"\n',
    "csrc/cpu/gather.cpp": '#include "../tensors.h"\n#include "kernels.h"\n',
    "csrc/cpu/update.cpp": '#include "../tensors.h"\n',
    "csrc/cuda/runtime.h": "struct Runtime;\n",
    "csrc/cuda/gather.cu": '#include "../tensors.h"\n#include "runtime.h"\n',
    "csrc/cuda/update.cu": '#include "../tensors.h"\n',
    "csrc/host/fields.h": "struct Fields;\n",
    "csrc/host/host.cpp": '#include "fields.h"\n',
    "csrc/host/served.cpp": "",
    "dlrm/__init__.py": "",
    "dlrm/version.py": '__version__ = "0.0.1"\n',
    "README.md": "",
}
HOST = {"csrc/host/host.cpp"}
SERVED = {"csrc/host/served.cpp"}
MODULE = f"_host{sysconfig.get_config_var('EXT_SUFFIX')}"  # of this Python
CPU = {"csrc/library.cpp", "csrc/cpu/gather.cpp", "csrc/cpu/update.cpp"}
CUDA = {"csrc/cuda/gather.cu", "csrc/cuda/update.cu"}


@pytest.fixture
def project(tmp_path, root):
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in"):
        shutil.copy(root / name, tmp_path)
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def setup(project, *command, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *command],
        cwd=project,
        env=environment | {"DLRM_CUDA": "0", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def build(project, **variables):
    """Returns the compiled sources and the linked libraries."""
    done = setup(project, "build_ext", "--inplace", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    commands = re.findall(r"^\[\d+/\d+\] (.*)$", done.stdout, re.MULTILINE)
    compiled = {found[1] for text in commands if (found := re.search(r" -c (\S+) -o ", text))}
    linked = {found[1] for text in commands if (found := re.search(r" -o \S+/(\S+\.so)$", text))}
    assert len(commands) == len(compiled) + len(linked)
    return compiled, linked


def test_a_header_rebuilds_what_includes_it_and_no_more(project):
    assert build(project) == (HOST | SERVED | CPU, {MODULE, "_served.so", "_ops_cpu.so"})
    assert build(project) == (set(), set())
    for header, compiled, library in (
        ("csrc/tensors.h", CPU, "_ops_cpu.so"),
        ("csrc/cpu/simd.h", {"csrc/cpu/gather.cpp"}, "_ops_cpu.so"),  # included by another header
        ("csrc/host/fields.h", HOST, MODULE),
    ):
        os.utime(project / header)
        assert build(project) == (compiled, {library}), header
    (project / "csrc/cpu/simd.h").unlink()
    (project / "csrc/cpu/kernels.h").write_text("struct Kernels;\n")
    assert build(project)[0] == {"csrc/cpu/gather.cpp"}


def test_other_commands_and_sources_rebuild(project):
    build(project)
    compiler = next(filter(shutil.which, ("g++", "c++", "clang++")))
    assert build(project, CXX=f"{compiler} -DOTHER='a \"$b\"'")[0] == HOST | SERVED | CPU
    assert build(project)[0] == HOST | SERVED | CPU
    (project / "csrc/cpu/new.cpp").write_text("int added() { return 1; }\n")
    assert build(project) == ({"csrc/cpu/new.cpp"}, {"_ops_cpu.so"})
    (project / "csrc/cpu/new.cpp").unlink()
    assert build(project) == (set(), {"_ops_cpu.so"})


@needs_nvcc
def test_a_header_rebuilds_the_cuda_sources_that_include_it_and_no_more(project):
    cuda = {"DLRM_CUDA": "1", "DLRM_CUDA_ARCHS": "90"}
    libraries = {MODULE, "_served.so", "_ops_cpu.so", "_ops_cuda.so"}
    assert build(project, **cuda) == (HOST | SERVED | CPU | CUDA, libraries)
    os.utime(project / "csrc/cuda/runtime.h")
    assert build(project, **cuda) == ({"csrc/cuda/gather.cu"}, {"_ops_cuda.so"})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"CUDA_HOME": "{none}"},
            "DLRM_CUDA=1, but there is no nvcc: install CUDA's compiler, or set CUDA_HOME",
        ),
        (
            {"CUDA_HOME": "{cuda}", "DLRM_CUDA_ARCHS": "90;70"},
            "DLRM_CUDA_ARCHS=90;70: {cuda}/bin/nvcc compiles for 75, 90, 100, and not for 70; "
            "leave it out, or set CUDA_HOME to a CUDA toolkit that does",
        ),
        (
            {"CUDA_HOME": "{cuda}", "DLRM_CUDA_ARCHS": "H100"},
            "DLRM_CUDA_ARCHS=H100: expected architectures as in 80;90",
        ),
    ],
)
def test_what_nvcc_cannot_do_is_said_before_anything_is_compiled(project, variables, message):
    paths = {"cuda": project / "cuda", "none": project / "none"}
    nvcc = paths["cuda"] / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho compute_75; echo compute_100; echo compute_90\n")
    nvcc.chmod(0o755)
    given = {name: value.format(**paths) for name, value in variables.items()}
    done = setup(project, "build_ext", "--inplace", **{"DLRM_CUDA": "1", **given})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == message.format(**paths)
    assert " -c " not in done.stdout


def test_a_library_is_replaced_whole_and_an_error_leaves_the_old_one(project):
    build(project)
    library = project / "dlrm" / "_ops_cpu.so"
    with library.open("rb") as mapped:
        old = mapped.read()
        (project / "csrc/library.cpp").write_text("int other_library() { return 2; }\n")
        build(project)
        assert library.read_bytes() != old
        mapped.seek(0)
        assert mapped.read() == old
    assert sorted(path.name for path in library.parent.iterdir()) == [
        *("__init__.py", MODULE, "_ops_cpu.so", "_served.so", "version.py")
    ]
    good = library.read_bytes()
    (project / "csrc/library.cpp").write_text("int library() { return nothing; }\n")
    failed = setup(project, "build_ext", "--inplace")
    assert failed.returncode == 1
    assert "dlrm: this failed (1): " in failed.stderr
    assert "nothing" in failed.stdout
    assert library.read_bytes() == good


def test_without_native_code_nothing_is_compiled(project):
    done = setup(project, "build_ext", "--inplace", DLRM_NATIVE="0")
    assert done.returncode == 0
    assert "installed WITHOUT its native ops and log parser, because DLRM_NATIVE=0" in done.stdout
    done = setup(project, "build_ext", "--inplace", PATH=str(project))
    assert done.returncode == 0
    assert "because no C++ compiler was found" in done.stdout
    assert not list(project.rglob("*.so"))


def test_a_wheel_has_no_modules_of_earlier_builds_and_names_its_python(project):
    (project / "dlrm/old.py").write_text("")
    assert setup(project, "bdist_wheel").returncode == 0
    (project / "dlrm/old.py").unlink()
    assert setup(project, "bdist_wheel").returncode == 0
    (wheel,) = (project / "dist").iterdir()
    assert re.fullmatch(r"dlrm-0\.0\.1-cp3\d+-cp3\d+-linux_\w+\.whl", wheel.name)
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("dlrm/")}
    modules = ("__init__.py", "version.py", MODULE, "_ops_cpu.so", "_served.so")
    assert names == {f"dlrm/{name}" for name in modules}


def contents(project):
    """Builds a wheel; returns the names of its files."""
    assert setup(project, "bdist_wheel").returncode == 0
    (wheel,) = (project / "dist").glob("*.whl")
    return {name for name in zipfile.ZipFile(wheel).namelist() if "/licenses/" not in name}


def test_a_source_distribution_builds_the_same_wheel(project):
    assert setup(project, "sdist").returncode == 0
    (archive,) = (project / "dist").iterdir()
    with tarfile.open(archive) as opened:
        names = {str(Path(*Path(name).parts[1:])) for name in opened.getnames()}
    assert set(SOURCES) <= names
    with tarfile.open(archive) as opened:
        opened.extractall(project / "unpacked", filter="data")
    (unpacked,) = (project / "unpacked").iterdir()
    assert contents(project) == contents(unpacked)


def test_the_macros_of_torch_are_those_of_its_oldest_headers(root):
    """A newer macro compiles with the torch installed here but fails with the oldest supported."""
    in_2_11 = {
        *("STABLE_TORCH_LIBRARY", "STABLE_TORCH_LIBRARY_IMPL", "STD_TORCH_CHECK", "TORCH_BOX"),
        "TORCH_ERROR_CODE_CHECK",
    }
    sources = [path for path in (root / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert set(re.findall(r"\b(?:STABLE_|STD_)?TORCH_[A-Z_]+", text)) <= in_2_11
