"""Plans are complete, even, within memory and, as predicted, no slower than whole tables."""

import dataclasses
import re

import pytest
import torch

from dlrm.model.config import DLRMConfig
from dlrm.tasks.planning.costs import costs, step_seconds
from dlrm.tasks.planning.machines import MACHINES
from dlrm.tasks.planning.planner import EVEN, Limits, changes_that_fit, plan_placement, shortage
from dlrm.tasks.planning.report import report
from dlrm.tasks.planning.workload import Workload, table_bytes
from dlrm.tasks.recommendation import Recommendation

CRITEO = (
    *(7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209),
    *(10667, 104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35),
)
SMALL = {"embedding_dim": 32, "bottom_mlp_sizes": (32,), "top_mlp_sizes": (1,)}
SKEWED = DLRMConfig((6_000, *[400] * 10), **SMALL)  # 60 % of the rows in one table
CPU, GPU = MACHINES["cpu"], MACHINES["h100"]


def unevenness(placement, workload):
    held = [sum(one) for one in table_bytes(placement, workload)]
    return max(held) * len(held) / sum(held)


@pytest.mark.parametrize("machine", [CPU, GPU], ids=lambda machine: machine.name)
@pytest.mark.parametrize("optimizer", ["sgd", "row_wise_adagrad", "adam"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranks_hold_the_same_bytes_and_steps_are_no_slower(ranks, optimizer, machine):
    for config in (DLRMConfig(CRITEO), SKEWED):
        workload = Workload(config, 4096, optimizer)
        found = plan_placement(workload, Limits(ranks), machine)
        assert unevenness(found, workload) <= EVEN
        whole = config.placed(ranks)
        predicted = [step_seconds(costs(p, workload, machine)) for p in (found, whole)]
        assert predicted[0] <= 1.25 * predicted[1]
        if optimizer == "row_wise_adagrad":
            assert all(piece.has_all_columns for piece in found.pieces)


def test_a_table_that_is_looked_up_more_often_is_divided():
    workload = Workload(
        dataclasses.replace(SKEWED, table_sizes=(500,) * 4), 4096, lookups=(30, 1, 1, 1)
    )
    found = plan_placement(workload, Limits(2), CPU)
    ranks = {piece.rank for piece in found.pieces if piece.table == 0}
    assert ranks in ({0, 1}, {None})
    whole = workload.config.placed(2)
    slowest = [max(c.seconds.look_ups for c in costs(p, workload, CPU)) for p in (whole, found)]
    assert slowest[1] < 0.8 * slowest[0]


def test_a_step_that_is_recorded_has_neither_copies_nor_divided_rows():
    for optimizer in ("sgd", "row_wise_adagrad"):
        workload = Workload(DLRMConfig(CRITEO), 65536, optimizer)
        found = plan_placement(workload, Limits(8, fixed_shapes=True), GPU)
        assert all(piece.has_all_rows and not piece.replicated for piece in found.pieces)


def test_other_layouts_have_whole_tables():
    config = dataclasses.replace(SKEWED, embedding_type="joint_sparse")
    assert plan_placement(Workload(config, 4096), Limits(4), CPU).is_whole


def test_the_same_plan_comes_again():
    workload = Workload(DLRMConfig(CRITEO), 65536)
    assert plan_placement(workload, Limits(8), GPU) == plan_placement(workload, Limits(8), GPU)


def test_traffic_is_that_of_vectors_and_their_gradients():
    config = DLRMConfig((10, 10), 4, 8, (8,), (1,))
    placement = config.placed(2)
    for cost in costs(placement, Workload(config, 6), CPU):
        assert cost.sent == 2 * 3 * 8 * 4  # vectors for the other's 3 samples, and back


def test_what_does_not_fit_says_by_how_much_and_what_would():
    config = DLRMConfig((1 << 20,) * 4, embedding_dim=256, bottom_mlp_sizes=(256,))  # 4 GiB
    workload = Workload(config, 1024, "adam")
    limits = Limits(2, 5 << 30)
    placement = plan_placement(workload, limits, GPU)
    lacking = shortage(placement, workload, limits, GPU)
    values = {"adam": 3, "adagrad": 2, "row_wise_adagrad": 1, "sgd": 1}  # for each weight
    each = 2 * 2**20 * 4 * 256 * values["adam"]
    assert lacking == costs(placement, workload, GPU)[0].memory.total - limits.memory
    assert 0 < lacking - (each - limits.memory) < 2**30
    changes = list(changes_that_fit(workload, limits, GPU))
    assert changes[0] == "--ranks 3"
    assert "--embedding_optimizer adagrad" in changes
    for change in changes:
        flags = dict(re.findall(r"--(\w+) ([\w,]+)", change))
        ranks = int(flags.get("ranks", 2))
        cap = int(flags.get("max_table_size", 1 << 40))
        dim = int(flags.get("embedding_dim", 256))
        rows = sum(min(size, cap) for size in config.table_sizes)
        held = values[flags.get("embedding_optimizer", "adam")]
        assert rows * 4 * dim * held / ranks < limits.memory
    lines = "\n".join(report(placement, workload, limits, GPU))
    assert "does not fit: the fullest rank lacks" in lines
    assert "what would: --ranks 3; --embedding_optimizer adagrad" in lines
    assert "predicted from the constants of 'h100'" in lines


def test_a_smaller_batch_is_proposed_where_activations_are_what_lacks_memory():
    workload = Workload(SKEWED, 1 << 20)
    needed = max(
        cost.memory.total for cost in costs(plan_placement(workload, Limits(1), CPU), workload, CPU)
    )
    limits = Limits(1, needed * 3 // 4)
    (change,) = (c for c in changes_that_fit(workload, limits, CPU) if "batch" in c)
    batch_size = int(change.removeprefix("--batch_size "))
    for size, fits in ((batch_size, True), (2 * batch_size, False)):
        smaller = dataclasses.replace(workload, batch_size=size)
        assert (not shortage(plan_placement(smaller, limits, CPU), smaller, limits, CPU)) == fits


def test_a_plan_can_be_trained(ranks):
    placement = plan_placement(Workload(SKEWED, 64), Limits(2), CPU)
    assert ranks(2).call(logits, [(placement,)] * 2) == [None, None]


def logits(world, placement):
    """Compares the logits of this rank's samples with those of a whole model."""
    ids = 37 * torch.arange(9)[:, None] + torch.arange(11)
    numerical = torch.arange(9 * 13.0).view(9, 13) / 100
    whole = Recommendation(SKEWED, seed=3).model(numerical, ids)
    model = Recommendation(SKEWED, world, seed=3, placement=placement).model
    own = world.part(9)
    found = model(numerical[own], ids[:, model.fields_by_rank[world.rank]])
    torch.testing.assert_close(found, whole[own])
