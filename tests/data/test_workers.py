import operator
import os

import pytest

from dlrm.data.workers import workers


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
