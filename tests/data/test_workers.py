import operator
import os
import signal
import sys
import time

import forked
import pytest

from dlrm.command_line import exit_code_of
from dlrm.data import workers as workers_module
from dlrm.data.workers import end_processes, in_order, process_pool, workers


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_order_and_errors_are_raised(processes):
    with workers(processes) as in_order:
        assert list(in_order(abs, range(-20, 0))) == list(range(20, 0, -1))
        results = in_order(operator.inv, [1, 2, "three", 4])
        assert [next(results), next(results)] == [-2, -3]
        with pytest.raises(TypeError, match="str"):
            next(results)


def test_items_are_taken_as_the_work_advances():
    taken = []
    with workers(2) as in_order:
        results = in_order(abs, (taken.append(item) or item for item in range(100)))
        next(results)
        assert len(taken) < 10
        results.close()


def test_a_killed_process_is_named():
    with (
        pytest.raises(ChildProcessError, match="a process was killed, .* fewer --processes"),
        workers(2) as in_order,
    ):
        list(in_order(os._exit, [3]))


def interrupt(path):
    """Runs tasks, and gets Ctrl-C while processes start and work, as all of its group do."""
    os.setpgid(0, 0)
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with workers(2) as in_order:
            for done in in_order(time.sleep, [0.0, 1000.0, 1000.0]):
                assert done is None
                os.killpg(0, signal.SIGINT)
                time.sleep(1000)
    except KeyboardInterrupt:
        sys.exit(130)


def test_ctrl_c_is_for_the_process_that_started_the_others(tmp_path):
    process = forked.CONTEXT.Process(target=interrupt, args=(tmp_path / "stderr",))
    process.start()
    process.join(120)  # it does not wait for the tasks
    process.kill()
    assert process.exitcode == 130
    assert (tmp_path / "stderr").read_text() == ""


def stop_as_a_process_starts(is_forked, path):
    """Gets SIGTERM when the first process has begun, before its pool knows of it."""
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    start = workers_module._WithoutInterrupts.start

    def stopped(process):
        start(process)
        os.kill(os.getpid(), signal.SIGTERM)

    workers_module._WithoutInterrupts.start = stopped

    def act():
        pool = process_pool(2, is_forked)
        try:
            list(in_order(pool, time.sleep, [1000.0, 1000.0], 2))
        finally:
            end_processes(pool)

    sys.exit(exit_code_of(act))


@pytest.mark.parametrize("is_forked", [True, False])
def test_a_process_that_starts_as_sigterm_arrives_ends_too(is_forked, tmp_path):
    args = is_forked, tmp_path / "stderr"
    process = forked.CONTEXT.Process(target=stop_as_a_process_starts, args=args)
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 143
    assert (tmp_path / "stderr").read_text() == "error: terminated\n"
