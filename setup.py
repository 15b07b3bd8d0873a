"""Builds the native ops and log parser, where there is a C++ compiler.

`dlrm/_ops_cpu.so` is built against torch's stable C++ ABI: one file serves every torch from 2.11 on
and every Python. `dlrm._host` is for preprocessing and serving, without torch: a module of pybind11
for the Python that builds it. `dlrm/_served.so` has a plain C interface for a served model, whose
server may have any Python. Without a compiler, or with `DLRM_NATIVE=0` in the
environment, the package is installed without them: its plain-torch references and its numpy parser
run. A compile error fails the installation.

Ninja compiles what has changed, in `build/native`: sources, the headers that they include, and the
commands themselves.

`dlrm/_ops_cuda.so` is built where there is an nvcc (in `CUDA_HOME` or on the path) and the torch
installed is one for CUDA; `DLRM_CUDA=1` builds it for any torch, `DLRM_CUDA=0` for none.
`DLRM_CUDA_ARCHS="80;90"` names the architectures to compile for. Flags in `DLRM_CXXFLAGS` follow
those here, for the C++ compiler and when it links.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",  # lets sqrt be vectorized
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
HOST_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-pthread"]
BUILD = "build/native"


def cpp_compiler() -> list[str] | None:
    """The command of the C++ compiler, `CXX` first, or None where there is none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    found = next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)
    return [found] if found else None


def torch_folder() -> Path:
    """Returns torch's folder without importing torch, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "dlrm's native ops are built against torch, which is not installed here. Install torch "
            "first and use `pip install --no-build-isolation`, or set DLRM_NATIVE=0 to do without."
        )
    return Path(spec.origin).parent


def ninja() -> list[str]:
    """Returns the command of ninja, that of its Python package first."""
    if importlib.util.find_spec("ninja") is not None:
        return [sys.executable, "-m", "ninja"]
    if shutil.which("ninja"):
        return ["ninja"]
    raise SystemExit(
        "dlrm's native code is built by ninja, which is not installed here. Use `pip install "
        "ninja` first, or set DLRM_NATIVE=0 to do without."
    )


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
    compiler = nvcc()
    assert compiler is not None
    chosen = os.environ.get("DLRM_CUDA_ARCHS", "").replace(",", ";")
    if chosen:
        architectures = [text.strip().replace(".", "") for text in chosen.split(";")]
        if not all(re.fullmatch(r"\d{2,3}[af]?", text) for text in architectures):
            raise SystemExit(f"DLRM_CUDA_ARCHS={chosen}: expected architectures as in 80;90")
        known = known_architectures(compiler)
        if known and (unknown := [a for a in architectures if a.rstrip("af") not in known]):
            raise SystemExit(
                f"DLRM_CUDA_ARCHS={chosen}: {compiler} compiles for {', '.join(known)}, and not "
                f"for {unknown[0]}; leave it out, or set CUDA_HOME to a CUDA toolkit that does"
            )
        return architectures
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"release (\d+)\.(\d+)", said.stdout)
    version = (int(found[1]), int(found[2])) if found else (13, 0)
    first = ["70"] if version < (13, 0) else []
    last = ["100", "120"] if version >= (12, 8) else []
    return [*first, "75", "80", "86", "89", "90", *last]


def known_architectures(compiler: str) -> list[str]:
    """Those that this nvcc compiles for, such as "90"; none where it does not say."""
    said = subprocess.run(
        [compiler, "--list-gpu-arch"], capture_output=True, text=True, check=False
    )
    return sorted(set(re.findall(r"compute_(\d+)", said.stdout)), key=int)


def host_commands() -> tuple[list[str], list[str]]:
    compiler = cpp_compiler()
    assert compiler is not None
    if importlib.util.find_spec("pybind11") is None:
        raise SystemExit(
            "dlrm's native code is built with pybind11, which is not installed here. Use `pip "
            "install pybind11` first, or set DLRM_NATIVE=0 to do without."
        )
    import pybind11

    folders = [pybind11.get_include(), sysconfig.get_path("include")]
    includes = [word for folder in folders for word in ("-isystem", folder)]
    return [*compiler, *HOST_FLAGS, *includes], [*compiler, "-shared"]


def served_commands() -> tuple[list[str], list[str]]:
    compiler = cpp_compiler()
    assert compiler is not None
    static = ["-static-libstdc++", "-static-libgcc"]  # a server may have older ones
    return [*compiler, *HOST_FLAGS], [*compiler, "-shared", *static]


def cpu_commands() -> tuple[list[str], list[str]]:
    compiler, torch = cpp_compiler(), torch_folder()
    assert compiler is not None
    link = ["-shared", f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"]
    return [*compiler, *COMPILE_FLAGS, "-isystem", str(torch / "include")], [*compiler, *link]


def cuda_commands() -> tuple[list[str], list[str]]:
    """Headers of a torch without CUDA will do: the ABI is one. CUDA's runtime is linked in."""
    compiler, torch = nvcc(), torch_folder()
    assert compiler is not None
    architectures = cuda_architectures()
    code = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in architectures]
    newest = architectures[-1]
    code.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")  # for later GPUs
    named = f'-DDLRM_CUDA_ARCHS=\\"{";".join(architectures)}\\"'
    link = ["-shared", f"-L{torch / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch"]
    compile = [compiler, *CUDA_FLAGS, named, *code, "-isystem", str(torch / "include")]
    return compile, [compiler, *link]


class BuildNative(build_ext):
    """Lets ninja build all libraries at once."""

    def build_extensions(self) -> None:
        rules = [self.ninja_rules(ext) for ext in self.extensions]
        Path(BUILD).mkdir(parents=True, exist_ok=True)
        Path(BUILD, "build.ninja").write_text("\n".join([f"builddir = {BUILD}", *rules]))
        run([*ninja(), "-v", "-f", f"{BUILD}/build.ninja"])
        for ext in self.extensions:
            self.copy_file(self.built(ext), self.get_ext_fullpath(ext.name))

    def ninja_rules(self, ext: Extension) -> str:
        added = [] if ext.name == CUDA else shlex.split(os.environ.get("DLRM_CXXFLAGS", ""))
        commands = ([*words, *added] for words in COMMANDS[ext.name]())
        compile, link = (shlex.join(words).replace("$", "$$") for words in commands)
        objects = {source: f"{BUILD}/{ext.name}/{source}.o" for source in ext.sources}
        edges = [f"build {objects[name]}: compile_{ext.name} {name}" for name in ext.sources]
        return f"""
rule compile_{ext.name}
  command = {compile} -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link_{ext.name}
  command = {link} $in -o $out
{chr(10).join(edges)}
build {self.built(ext)}: link_{ext.name} {" ".join(objects.values())}
"""

    def built(self, ext: Extension) -> str:
        return f"{BUILD}/{self.get_ext_filename(ext.name)}"

    def copy_file(self, infile: str, outfile: str, *_: object, **__: object) -> None:
        """Copies beside and renames: a process that has the old file mapped keeps it whole."""
        unfinished = Path(outfile).with_suffix(".unfinished")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(infile, unfinished)
        unfinished.replace(outfile)

    def get_ext_filename(self, fullname: str) -> str:
        """Returns a name with the version of Python for the one library that depends on it."""
        if HOST.endswith(fullname):  # also asked for without its package
            return super().get_ext_filename(fullname)
        return fullname.replace(".", "/") + ".so"


class Wheel(bdist_wheel):
    """Packs what is in the sources now."""

    def run(self) -> None:
        # Modules that earlier builds left there would be packed, too.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()


def run(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    result = subprocess.run(command, check=False)
    if result.returncode != 0:
        raise SystemExit(f"dlrm: this failed ({result.returncode}): {shlex.join(command)}")


def extensions() -> list[Extension]:
    found = [
        Extension(HOST, ["csrc/host/host.cpp"]),
        Extension(SERVED, ["csrc/host/served.cpp"]),
        Extension(CPU, sources),
    ]
    without_cuda = reason_to_skip_cuda()
    if without_cuda:
        print(f"dlrm is installed without CUDA kernels, because {without_cuda}.", flush=True)
    else:
        found.append(Extension(CUDA, sorted(map(str, Path("csrc/cuda").glob("*.cu")))))
    return found


HOST, SERVED, CPU, CUDA = "dlrm._host", "dlrm._served", "dlrm._ops_cpu", "dlrm._ops_cuda"
# Each returns the commands to compile and to link.
COMMANDS = {HOST: host_commands, SERVED: served_commands, CPU: cpu_commands, CUDA: cuda_commands}
sources = ["csrc/library.cpp", *sorted(map(str, Path("csrc/cpu").glob("*.cpp")))]
reason = reason_to_skip()
if reason:
    print(
        f"WARNING: dlrm is installed WITHOUT its native ops and log parser, because {reason}. "
        "Plain torch and numpy run instead: the same values, several times slower. Logs, CSV and "
        "JSON lines are not read.",
        flush=True,
    )
setup(
    ext_modules=[] if reason else extensions(),
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
