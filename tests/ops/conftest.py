"""Fixtures for the devices and instruction sets on which these tests run the ops."""

import shutil

import emulated_cuda
import pytest
import torch

from dlrm import ops
from dlrm.ops.library import why_not_cuda_kernels

INSTRUCTION_SETS = ["generic", "avx2", "avx512", "avx512_bf16"]


@pytest.fixture(scope="session")
def emulator():
    """Returns the CUDA kernels on the CPU; see emulated_cuda.py."""
    if not ops.native_available():
        pytest.skip("the native ops are not built")
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler")
    return emulated_cuda.Emulator(emulated_cuda.library())


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request):
    """Runs the test with the kernels of one instruction set; then restores the best."""
    if not ops.native_available():
        pytest.skip("the native ops are not built")
    chosen = ops.instruction_set(limit=request.param)
    yield chosen
    ops.instruction_set(limit=INSTRUCTION_SETS[-1])
    if chosen != request.param:
        pytest.skip(f"this processor has no {request.param}")


@pytest.fixture
def threads():
    """Sets the number of threads: `threads(1)`. Restores it after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def native(request):
    """Skips the test without the compiled ops."""
    if not ops.native_available():
        pytest.skip("the native ops are not built")
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cuda":
        problem = why_not_cuda_kernels()
        if problem is not None:
            pytest.skip(f"no CUDA kernels: {problem}")
