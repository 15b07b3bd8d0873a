"""The CUDA emulator finds the faults that it is meant to find."""

import re

import pytest
import torch

from dlrm import ops

SUM = 64 * 63 // 2


@pytest.fixture(autouse=True)
def reset(emulator):
    yield
    emulator.configure()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_kernel_without_fault_runs_in_any_order_of_threads(seed, emulator):
    emulator.configure(seed=seed)
    assert emulator.fault(0) == (SUM, "")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, r"is stuck: thread 0 waits at __syncthreads \(63 of 64 came\).* 1 threads have ended"),
        (3, r"is stuck: thread 0 waits at a barrier of its warp \(31 of 32 came\)"),
        (4, "wrote outside its 256 bytes of shared memory"),
        (5, "wrote outside its 256 bytes of shared memory"),
        (7, "copy of 16 bytes is not aligned to them"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_faults_are_found(fault, message, seed, emulator):
    emulator.configure(seed=seed)
    found, text = emulator.fault(fault)
    assert found == -1
    assert re.search(message, text)


def test_a_missing_barrier_gives_another_sum(emulator):
    assert emulator.fault(2) != (SUM, "")


def test_a_copy_that_is_not_waited_for_gives_another_sum(emulator):
    assert emulator.fault(6) != (SUM, "")


def test_it_runs_after_a_fault(emulator):
    emulator.fault(1)
    assert emulator.fault(0) == (SUM, "")


def gathered(emulator, weight, ids):
    """Returns the traffic of a gather with ids of one table."""
    with emulator.in_place_of_cpu():
        emulator.count_accesses()
        ops.joint_embedding(weight, ids[:, None], torch.tensor([0, len(weight)]))
        (traffic,) = emulator.traffic().values()
    return traffic


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_gather_moves_what_it_must(dtype, emulator):
    weight = torch.randn(300, 128).to(dtype)
    ids = torch.randperm(300)[:256].int()
    traffic = gathered(emulator, weight, ids)
    rows = len(ids) * 128 * dtype.itemsize
    assert traffic.launches == 1
    assert traffic.written == rows
    warps = len(ids) // 32  # each reads two table bounds, a sector each
    assert traffic.read == rows + ids.nbytes + warps * 2 * 32


def test_strided_reads_show(emulator):
    """With 4-byte rows, 32 lanes reach 4 adjacent sectors, or 32 if rows are 8 apart."""
    weight, ids = torch.randn(2048, 1), torch.arange(256)
    dense, strided = (gathered(emulator, weight, ids * step) for step in (1, 8))
    assert strided.read - dense.read == (256 - 256 // 8) * 32
    assert strided.written == dense.written == 256 * 4


def test_nothing_is_counted_unless_asked_for(emulator):
    with emulator.in_place_of_cpu():
        ops.joint_embedding(torch.randn(9, 4), torch.arange(9)[:, None], torch.tensor([0, 9]))
        assert all(traffic.read == 0 for traffic in emulator.traffic().values())
