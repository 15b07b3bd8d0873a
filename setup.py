"""Builds the native ops and the native log parser, where there is a C++ compiler.

`dlrm/_ops_cpu.so` is built against torch's stable C++ ABI: one file serves every torch from 2.11 on
and every Python. `dlrm/_host.so` is for preprocessing and serving, without torch, and has a plain C
interface: it serves every Python, too. Without a compiler, or with `DLRM_NATIVE=0` in the
environment, the package is installed without both, and its plain-torch references and its numpy
parser run. A compile error fails the installation.

`dlrm/_ops_cuda.so` is built where there is an nvcc (in `CUDA_HOME` or on the path) and the torch
installed is one for CUDA; `DLRM_CUDA=1` builds it for any torch, `DLRM_CUDA=0` for none.
`DLRM_CUDA_ARCHS="80;90"` names the architectures to compile for.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",  # lets sqrt be vectorised
    "-fno-trapping-math",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the oldest torch that can load the library
    "-Wall",
    "-Wno-unknown-warning-option",  # clang, of those below that only GCC knows
    "-Wno-psabi",  # vectors are passed between inlined functions only
    "-Wno-unused-function",  # not every kernel uses all of simd.h
    "-Wno-maybe-uninitialized",  # GCC's own intrinsics
    "-Wno-uninitialized",
]
CUDA_FLAGS = [
    "-std=c++20",
    "-O3",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    "-DUSE_CUDA",  # declares the CUDA part of the ABI
    "-lineinfo",  # profilers show lines of the source
    "-Xfatbin=-compress-all",  # half as large
]
HOST_FLAGS = [
    *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall"),
    *("-static-libstdc++", "-static-libgcc"),  # a server may have older ones
]


def cpp_compiler() -> list[str] | None:
    """The command of the C++ compiler, `CXX` first, or None where there is none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    found = next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)
    return [found] if found else None


def torch_folder() -> Path:
    """Where torch lies. It is not imported: that takes seconds, and its headers are all we need."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "dlrm's native ops are built against torch, which is not installed here. Install torch "
            "first and use `pip install --no-build-isolation`, or set DLRM_NATIVE=0 to do without."
        )
    return Path(spec.origin).parent


def reason_to_skip() -> str | None:
    if os.environ.get("DLRM_NATIVE") == "0":
        return "DLRM_NATIVE=0"
    if cpp_compiler() is None:
        return "no C++ compiler was found (g++, c++, clang++ or CXX)"
    return None


def nvcc() -> str | None:
    """CUDA's compiler, that of `CUDA_HOME` first, or None where there is none."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which(str(Path(home, "bin", "nvcc")) if home else "nvcc")


def reason_to_skip_cuda() -> str | None:
    wanted = os.environ.get("DLRM_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"DLRM_CUDA={wanted}: expected 0, 1 or nothing")
    if wanted == "0":
        return "DLRM_CUDA=0"
    if nvcc() is None:
        if wanted == "1":
            raise SystemExit(
                "DLRM_CUDA=1, but there is no nvcc: install CUDA's compiler, or set CUDA_HOME"
            )
        return "there is no nvcc"
    if wanted == "" and not (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "the torch installed is built without CUDA (DLRM_CUDA=1 builds them all the same)"
    return None


def cuda_architectures() -> list[str]:
    """Those of `DLRM_CUDA_ARCHS`, or all that this nvcc and our kernels know."""
    chosen = os.environ.get("DLRM_CUDA_ARCHS", "").replace(",", ";")
    if chosen:
        architectures = [text.strip().replace(".", "") for text in chosen.split(";")]
        if not all(re.fullmatch(r"\d{2,3}[af]?", text) for text in architectures):
            raise SystemExit(f"DLRM_CUDA_ARCHS={chosen}: expected architectures as in 80;90")
        return architectures
    compiler = nvcc()
    assert compiler is not None
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"release (\d+)\.(\d+)", said.stdout)
    version = (int(found[1]), int(found[2])) if found else (13, 0)
    first = ["70"] if version < (13, 0) else []
    last = ["100", "120"] if version >= (12, 8) else []
    return [*first, "75", "80", "86", "89", "90", *last]


class BuildNative(build_ext):
    """Compiles the sources at once, in as many processes as there are cores, and links them."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name == HOST:
            self.build_host(ext)
        elif ext.name == CUDA:
            self.build_cuda(ext)
        else:
            self.build_ops(ext)

    def build_host(self, ext: Extension) -> None:
        compiler = cpp_compiler()
        assert compiler is not None
        self.link([*compiler, *HOST_FLAGS, "-shared", *ext.sources], ext)

    def build_ops(self, ext: Extension) -> None:
        compiler, torch = cpp_compiler(), torch_folder()
        assert compiler is not None
        include = ["-isystem", str(torch / "include")]
        objects = self.compile([*compiler, *COMPILE_FLAGS, *include], ext.sources, "csrc")
        link = ["-shared", f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"]
        self.link([*compiler, *objects, *link], ext)

    def build_cuda(self, ext: Extension) -> None:
        """Headers of a torch without CUDA will do: the ABI is one. CUDA's runtime is linked in."""
        compiler, torch = nvcc(), torch_folder()
        assert compiler is not None
        architectures = cuda_architectures()
        code = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in architectures]
        newest = architectures[-1]
        code.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")  # for later GPUs
        named = f'-DDLRM_CUDA_ARCHS=\\"{";".join(architectures)}\\"'
        include = ["-isystem", str(torch / "include")]
        command = [compiler, *CUDA_FLAGS, named, *code, *include]
        objects = self.compile(command, ext.sources, "csrc-cuda-" + "-".join(architectures))
        link = ["-shared", f"-L{torch / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch"]
        self.link([compiler, *objects, *link], ext)

    def compile(self, command: list[str], sources: list[str], folder: str) -> list[str]:
        """Compiles what is newer than its object; returns the objects."""
        objects = Path(self.build_temp) / folder
        objects.mkdir(parents=True, exist_ok=True)
        included = {"csrc", str(Path(sources[-1]).parent)}  # the CPU's ops and CUDA's share no more
        headers = (path for folder in included for path in Path(folder).glob("*.h"))
        newest_header = max(path.stat().st_mtime for path in [*headers, Path(__file__)])

        def compile_source(source: str) -> str:
            target = (objects / source.replace("/", "_")).with_suffix(".o")
            newest = max(newest_header, os.stat(source).st_mtime)
            if not target.exists() or target.stat().st_mtime < newest:
                run([*command, "-c", source, "-o", str(target)])
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(compile_source, sources))

    def link(self, command: list[str], ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        # Beside and renamed: a process that has the old file mapped keeps it whole.
        unfinished = output.with_suffix(".unfinished")
        run([*command, "-o", str(unfinished)])
        unfinished.replace(output)

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # no Python version: none of them knows one


class Wheel(bdist_wheel):
    """Tags the wheel for this platform and every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class Package(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(self.ext_modules)


def run(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    result = subprocess.run(command, check=False)
    if result.returncode != 0:
        raise SystemExit(f"dlrm: this failed ({result.returncode}): {shlex.join(command)}")


def extensions() -> list[Extension]:
    found = [Extension(HOST, ["csrc/host/host.cpp"]), Extension("dlrm._ops_cpu", sources)]
    without_cuda = reason_to_skip_cuda()
    if without_cuda:
        print(f"dlrm is installed without CUDA kernels, because {without_cuda}.", flush=True)
    else:
        found.append(Extension(CUDA, sorted(map(str, Path("csrc/cuda").glob("*.cu")))))
    return found


HOST = "dlrm._host"
CUDA = "dlrm._ops_cuda"
sources = ["csrc/library.cpp", *sorted(map(str, Path("csrc/cpu").glob("*.cpp")))]
reason = reason_to_skip()
if reason:
    print(
        f"WARNING: dlrm is installed WITHOUT its native ops and log parser, because {reason}. "
        "Plain torch and numpy run instead: the same values, several times slower.",
        flush=True,
    )
setup(
    distclass=Package,
    ext_modules=[] if reason else extensions(),
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
