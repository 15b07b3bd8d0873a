"""The emulator of CUDA itself: it finds the faults that it is there to find."""

import re

import pytest

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
