"""Plans against the models that they are of: bytes of every configuration, and operations."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dlrm import ops
from dlrm.distributed import World
from dlrm.distributed.placement import Piece, Placement
from dlrm.model.config import DLRMConfig
from dlrm.model.layers.choices import INTERACTION_NAMES, NUMERICAL_KINDS
from dlrm.tasks.planning.costs import costs
from dlrm.tasks.planning.dense_part import dense_part_of
from dlrm.tasks.planning.machines import MACHINES
from dlrm.tasks.planning.workload import Workload
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.ema import EMA
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.optim.dense import CLICK_OPTIMIZERS
from dlrm.train.optim.row_optimizers import TABLE_OPTIMIZERS

CPU = MACHINES["cpu"]
SIZES, DIM = (7, 10, 3), 4
INTERACTIONS = [{"interaction_op": name} for name in (*INTERACTION_NAMES, "dot,dcn")]
INTERACTIONS += [
    {"interaction_op": "dcn", "cross_rank": 2, "cross_layers": 1},
    {"interaction_op": "cat,dcn", "cross_structure": "parallel"},
]
NETWORKS = [
    {**interaction, "numerical_embedding": kind, "wide": wide, "ensemble": members}
    for interaction, kind, wide, members in itertools.product(
        INTERACTIONS, NUMERICAL_KINDS, (False, True), (1, 3)
    )
]
NETWORKS += [
    {"ensemble": "dot*2,quadratic", "wide": True, "numerical_embedding": "piecewise"},
    {"interaction_op": "quadratic", "dropout": 0.5, "self_ensemble": True},
]
WHOLE = Placement.from_whole_tables(SIZES, DIM, [[0, 1, 2]])
DIVIDED = Placement(  # a table in columns, one in rows, one copied
    SIZES,
    DIM,
    2,
    (
        Piece(0, (0, 7), (0, 2), 0, (7, DIM)),
        Piece(0, (0, 7), (2, 4), 1, (7, DIM)),
        Piece(1, (0, 6), (0, 4), 1, (10, DIM)),
        Piece(1, (6, 10), (0, 4), 0, (10, DIM)),
        Piece(2, (0, 3), (0, 4), None, (3, DIM)),
    ),
)
BY_ROWS = Placement(SIZES, DIM, 2, (*DIVIDED.pieces[2:], Piece(0, (0, 7), (0, 4), 1, (7, DIM))))
LAYOUTS = [  # layout of the tables, and their optimizers
    *(({"embedding_type": "joint_fused"}, kind) for kind in TABLE_OPTIMIZERS),
    *(({"embedding_dtype": "bf16"}, kind) for kind in TABLE_OPTIMIZERS),
    *(
        ({"embedding_type": layout}, kind)
        for layout in ("joint_sparse", "joint", "multi_table")
        for kind, optimizer in TABLE_OPTIMIZERS.items()
        if optimizer.sparse is not None
    ),
]


def config_of(**parts):
    return DLRMConfig(
        SIZES,
        num_numerical_features=2,
        embedding_dim=DIM,
        bottom_mlp_sizes=(3, DIM),
        top_mlp_sizes=(5, 1),
        numerical_bins=4,
        **parts,
    )


def held(config, optimizers, placement, rank):
    """Returns the bytes that a rank's training holds after a step, as in `RankMemory`."""
    task = Recommendation(config, World(rank, placement.num_ranks), placement=placement)
    made = task.optimizers(optimizers)
    groups = task.parameter_groups()
    for weight in groups["tables"]:
        row = torch.ones(1, weight.shape[1], dtype=weight.dtype)
        index = torch.zeros(1, 1, dtype=torch.int64)
        weight.grad = torch.sparse_coo_tensor(index, row, weight.shape, check_invariants=False)
    for weight in groups["dense"]:
        weight.grad = torch.ones_like(weight)
    set_learning_rate(made, 0.1)
    states = []
    for optimizer in made:
        optimizer.step()
        values = [value for state in optimizer.state.values() for value in state.values()]
        states.append(
            sum(one.nbytes for one in values if isinstance(one, torch.Tensor) and one.ndim)
        )
        for missed in getattr(optimizer, "_missed", {}).values():
            states[-1] += missed.done.nbytes
    tables = sum(weight.nbytes for weight in groups["tables"])
    tables += sum(low.nbytes for low in task.model.embeddings.lower_halves().values())
    dense = Parameters(task.model, task.table_parameters()).dense()
    gradients = sum(weight.grad.nbytes for weight in groups["dense"])
    average = EMA(task.model, 0.9, dense).state
    return {
        "weights": tables,
        "state": sum(states[:-1]),
        "dense": sum(value.nbytes for value in dense.values()) + gradients + states[-1],
        "average": sum(value.nbytes for value in average.values()),
    }


def planned(config, optimizers, placement, rank):
    """Returns what is planned for the same."""
    plain, averaged = (
        costs(placement, Workload.of_run(config, 6, optimizers, ema=ema), CPU)[rank].memory
        for ema in (False, True)
    )
    average = averaged.dense - plain.dense
    return {
        "weights": plain.weights,
        "state": plain.state,
        "dense": plain.dense,
        "average": average,
    }


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(*case, marks=pytest.mark.slow)
        if "embedding_dtype" in case[0] or case[1] in ("adam", "row_wise_adagrad")
        else case
        for case in LAYOUTS
    ],
    ids=str,
)
def test_planned_bytes_are_those_that_a_training_holds(layout, kind):
    fused = layout.get("embedding_type", "joint_fused") == "joint_fused"
    divided = BY_ROWS if kind == "row_wise_adagrad" else DIVIDED
    mlps = itertools.cycle(CLICK_OPTIMIZERS)
    for parts, placement in itertools.product(NETWORKS, (WHOLE, divided) if fused else (WHOLE,)):
        config = config_of(**layout, **parts)
        optimizers = OptimizerConfig(kind, next(mlps))
        for rank in range(placement.num_ranks):
            arguments = config, optimizers, placement, rank
            assert planned(*arguments) == held(*arguments), (parts, placement)


@pytest.mark.parametrize("kind", TABLE_OPTIMIZERS)
def test_further_state_is_planned(kind):
    """Statistics of batch norm, and the steps that rows have missed."""
    config = config_of(batch_norm=True, wide=True)
    for optimizers in (
        OptimizerConfig(kind, "adam", embedding_l2=0.1),
        OptimizerConfig(kind, "adam", embedding_l2=0.1, embedding_l2_mode="looked_up"),
    ):
        arguments = config, optimizers, WHOLE, 0
        assert planned(*arguments) == held(*arguments)


def test_what_is_frozen_has_no_state_and_no_gradients():
    frozen = OptimizerConfig("adam", "adam", freeze_embeddings=True, freeze_mlps=True)
    config = config_of()
    memory = costs(WHOLE, Workload.of_run(config, 6, frozen), CPU)[0].memory
    task = Recommendation(config)
    tables, dense = task.parameter_groups().values()
    assert (memory.weights, memory.state) == (sum(weight.nbytes for weight in tables), 0)
    assert memory.dense == sum(weight.nbytes for weight in dense)


def test_operations_are_what_a_person_counts():
    config = DLRMConfig((5,) * 4, 3, 8, bottom_mlp_sizes=(6, 8), top_mlp_sizes=(7, 1))
    dots = 5 * 5 * 8  # all vectors with all
    width = 8 + 10 + 6  # a vector, dots of pairs and padding
    assert dense_part_of(config).flops == 2 * (3 * 6 + 6 * 8 + dots + width * 7 + 7)


@pytest.mark.skipif(not ops.native_available(), reason="torch does not count those of oneDNN")
def test_operations_are_those_of_the_model():
    for parts in NETWORKS:
        config, batch = config_of(**parts), 5
        model = Recommendation(config).model
        model.products = "native"
        with FlopCounterMode(display=False) as found, torch.no_grad():
            model(torch.rand(batch, 2), torch.zeros(batch, 3, dtype=torch.int64))
        assert found.get_total_flops() == batch * dense_part_of(config).flops, parts


def test_a_model_is_counted_once_whatever_its_tables_are():
    counted = dense_part_of(config_of())
    rows = config_of(hash_indices=True, max_table_size=2, wide=True, embedding_type="joint")
    assert dense_part_of(rows) == counted
    assert dense_part_of(rows) is dense_part_of(rows)


def test_a_model_without_values_is_made_without_torchs_compiler():
    run = """
import sys
from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
config = DLRMConfig((9,), interaction_op="dot,dcn", numerical_embedding="piecewise", ensemble=2)
DLRM(config, World(device="meta"))
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", run], check=True)
