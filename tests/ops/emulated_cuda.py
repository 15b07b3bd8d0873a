"""The CUDA kernels compiled for the CPU (cuda_emulator/): their logic runs without a GPU."""

import contextlib
import ctypes
import fcntl
import hashlib
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "cuda_emulator"
FLAGS = [
    "-std=c++20",
    "-O0",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",  # kernels load floats as words
    "-ffp-contract=off",
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
    "-fsanitize=thread",  # calls the emulator at each memory access; its library is not linked
    "-U_FORTIFY_SOURCE",  # it mistakes fibers' jumps for errors
    "-DDLRM_EMULATE_CUDA",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    f"-I{FOLDER}",
    "-Wall",
    "-Wno-unknown-pragmas",
]
SECTOR = 32  # bytes
SHARED = 227 * 1024  # bytes of shared memory per block on the emulated device


def library() -> Path:
    """Builds the library unless these sources have been built before.

    Compiles them as one file, since torch's headers take most of the time.
    """
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))))
    sources = [*sorted((ROOT / "csrc" / "cuda").glob("*.cu")), *sorted(FOLDER.glob("*.cpp"))]
    headers = [*(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc" / "cuda").glob("*.h")]
    digest = hashlib.sha256("\n".join([torch.__version__, *FLAGS]).encode())
    for path in sorted([*sources, *headers, *FOLDER.glob("*.h")]):
        digest.update(path.read_bytes())
    built = Path(tempfile.gettempdir(), f"dlrm-emulated-{digest.hexdigest()[:16]}.so")
    with open(built.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test workers wait
        if not built.exists():
            torch_folder = Path(torch.__file__).parent
            all_sources = built.with_suffix(".cpp")
            all_sources.write_text("".join(f'#include "{source}"\n' for source in sources))
            include = ["-isystem", str(torch_folder / "include")]
            link = ["-shared", f"-L{torch_folder / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"]
            unfinished, compiled = built.with_suffix(".unfinished"), built.with_suffix(".o")
            run([compiler, *FLAGS, *include, "-c", str(all_sources), "-o", str(compiled)])
            run([compiler, str(compiled), *link, "-o", str(unfinished)])
            compiled.unlink()
            unfinished.replace(built)
    return built


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # no warnings either


@dataclass(frozen=True)
class Traffic:
    """Holds the launches of a kernel and the bytes of the sectors it accessed."""

    launches: int
    read: int
    written: int
    added_to: int  # by atomic operations


class Emulator:
    """Loads the library; `configure` sets the kind of device."""

    def __init__(self, path: Path):
        torch.ops.load_library(path)
        for name in OPS:  # each must exist, or nothing would be tested
            getattr(torch.ops.dlrm_emulated, name)
        library = ctypes.CDLL(str(path))
        self._configure, self._fault = library.configure_emulator, library.emulate_fault
        self._sectors = library.sectors_of_additions
        self._sectors.restype = ctypes.c_int64
        self._path, self._count, self._traffic = (
            path,
            library.count_accesses,
            library.kernel_traffic,
        )
        self._traffic.restype = ctypes.c_bool
        self._configure.argtypes = [ctypes.c_uint, ctypes.c_int, ctypes.c_int64]
        self._fault.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int64]

    def configure(self, seed: int = 0, capability: int = 90, shared: int = SHARED) -> None:
        """Draws the order of threads and blocks from `seed`, unless it is 0.

        Restarts launch numbers, so the next launches look like those of a replayed graph.
        """
        self._configure(seed, capability, shared)

    def fault(self, which: int) -> tuple[int, str]:
        """Runs a kernel of faults.cpp; returns its sum or -1, and the message."""
        message = ctypes.create_string_buffer(1000)
        return self._fault(which, message, len(message)), message.value.decode()

    def sectors_of_additions(self) -> int:
        """Counts 32-byte sectors that warps reached by atomic additions since `configure`."""
        return self._sectors()

    def count_accesses(self) -> None:
        """Counts kernel reads and writes from now until `configure`."""
        self._count()

    def traffic(self) -> dict[str, Traffic]:
        """Returns the bytes that each kernel moved since `count_accesses`, by mangled name.

        Counts all device memory except the error word. Each sector counts once for each warp
        instruction that accesses it, as if there were no cache.
        """
        nm = subprocess.run(["nm", str(self._path)], capture_output=True, text=True, check=True)
        lines = (line.split() for line in nm.stdout.splitlines())
        names = {int(line[0], 16): line[2] for line in lines if len(line) == 3 and line[1] in "tT"}
        found, offset, counts = {}, ctypes.c_int64(), (ctypes.c_int64 * 4)()
        while self._traffic(ctypes.c_int64(len(found)), ctypes.byref(offset), counts):
            launches, *sectors = counts
            sizes = (SECTOR * count for count in sectors)
            found[names[offset.value]] = Traffic(launches, *sizes)
        return found

    @contextlib.contextmanager
    def in_place_of_cpu(self):
        """Makes the ops run emulated CUDA kernels on CPU tensors."""
        overrides = torch.library.Library("dlrm", "IMPL", "CPU")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it reports that CPU kernels are overridden
                for name in OPS:
                    overrides.impl(name, getattr(torch.ops.dlrm_emulated, name).default)
            yield
        finally:
            overrides._destroy()
            self.configure()
            torch.ops.dlrm_emulated.take_cuda_error(torch.empty(0))


OPS = [
    "dot_interaction",
    "dot_interaction_backward",
    "joint_embedding",
    "joint_embedding_bag",
    "joint_embedding_bag_backward",
    "joint_embedding_bag_sample_weights_backward",
    "relu_bias_backward",
    "row_update_",
    "take_cuda_error",
]
