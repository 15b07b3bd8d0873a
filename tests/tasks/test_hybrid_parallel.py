"""Training with many processes equals training with one, wherever the tables are."""

import itertools

import pytest
import torch
from click_runs import BATCH, STEPS, Run, check, train

from dlrm.distributed import OtherRankError
from dlrm.train.log import StoppedError

pytestmark = pytest.mark.long


def cases():
    """Yields all combinations; those of every optimizer with other placements are slow."""
    for size, balance in itertools.product((2, 3, 4), ("balanced", "nvidia")):
        for optimizer in ("sgd", "adagrad", "row_wise_adagrad", "adam"):
            is_quick = (size, balance) == (3, "balanced") or optimizer == "adam"
            marks = () if is_quick else pytest.mark.slow
            yield pytest.param(size, balance, optimizer, marks=marks)


@pytest.mark.parametrize(("size", "balance", "optimizer"), cases())
def test_losses_and_weights_are_those_of_one_process(ranks, size, balance, optimizer):
    check(ranks, size, Run(optimizer, balance))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "run",
    [
        Run(embedding_dtype="bf16"),
        Run(hotness=4),
        Run(parts=(("interaction_op", "cat"),)),
        Run(accumulate=2),
        Run(accumulate=3, hotness=4),
        Run(accumulate=100),
        Run(rows=BATCH * 3 + 1),  # a last batch of one sample
        Run(optimizer="adam", rows=BATCH * 3 + 1),
        *(Run(optimizer=kind, parts=(("wide", True),)) for kind in ("sgd", "adam")),
        Run("adam", accumulate=2, parts=(("wide", True),)),
        Run(embedding_dtype="bf16", parts=(("wide", True), ("numerical_embedding", "piecewise"))),
        Run(parts=(("numerical_embedding", "piecewise"), ("numerical_bins", 4))),
        Run(parts=(("interaction_op", "cuda_dot,dcn"), ("cross_rank", 3), ("wide", True))),
        Run(accumulate=2, parts=(("interaction_op", "dcn"), ("cross_structure", "parallel"))),
        Run(accumulate=2, parts=(("interaction_op", "quadratic"), ("quadratic_layers", 1))),
        Run(optimizer="adam", accumulate=2, parts=(("ensemble", 3), ("wide", True))),
        Run(optimizer="adam", parts=(("ensemble", "dot,quadratic"), ("wide", True))),
        Run(l2=0.1, accumulate=2, parts=(("wide", True),)),
        Run(optimizer="adam", l2=0.1, hotness=4),
        Run(optimizer="adagrad", l2=0.1, embedding_dtype="bf16"),
    ],
    ids=str,
)
def test_so_are_other_ways_to_train(ranks, size, run):
    check(ranks, size, run)


def test_half_precision_works_where_a_rank_has_no_table(ranks):
    results = ranks(4).call(train, [(Run(dtype=torch.float16),)] * 4)
    assert [len(result[0]) for result in results] == [STEPS - 1] * 4


@pytest.mark.parametrize("infinite_on", [0, 1])
def test_an_overflow_of_one_rank_skips_the_step_on_all(ranks, infinite_on):
    run = Run(dtype=torch.float16, infinite_on=infinite_on)
    first, second = ranks(2).call(train, [(run,)] * 2)
    assert first[4] == second[4] == "  skipped: 1"
    torch.testing.assert_close(first[1:3], second[1:3], atol=0, rtol=0)
    assert all(table.isfinite().all() for table in first[1])


def test_a_run_is_bitwise_repeatable(ranks):
    run = Run(optimizer="adam")
    once, again = (ranks(3).call(train, [(run,)] * 3)[0] for _ in range(2))
    assert once[0] == again[0]
    torch.testing.assert_close(once[1:3], again[1:3], atol=0, rtol=0)


def test_ranks_leave_together_at_a_threshold_and_after_the_last_step(ranks):
    for run, steps in ((Run(auc_threshold=0.01), 3), (Run(max_steps=7), 7)):
        for result in ranks(3).call(train, [(run,)] * 3):
            assert len(result[0]) == steps - 1  # the first has no line


@pytest.mark.parametrize(("stop_on", "print_freq", "stopped"), [(0, 1, 5), (2, 3, 7)])
def test_ranks_leave_together_after_the_next_line_when_one_is_asked_to_stop(
    ranks, stop_on, print_freq, stopped
):
    results = ranks(3).call(train, [(Run(stop_on=stop_on, print_freq=print_freq),)] * 3)
    assert {type(result) for result in results} == {StoppedError}
    (said,) = {str(result) for result in results}
    assert said.startswith(f"stopped after step {stopped}; nothing is saved")


@pytest.mark.parametrize("infinite_on", [0, 1])
def test_a_nan_of_one_rank_ends_all_and_is_said_once(ranks, infinite_on):
    first, second = ranks(2).call(train, [(Run(infinite_on=infinite_on),)] * 2)
    assert isinstance(first, FloatingPointError)
    assert isinstance(second, OtherRankError)
