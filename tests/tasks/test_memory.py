"""Bytes of tables against hand-computed numbers and what training really holds."""

import dataclasses
import re

import pytest
import torch

from dlrm.distributed import OtherRankError, World
from dlrm.model.config import DLRMConfig
from dlrm.tasks.memory import Footprint, Memory, agree_that_tables_fit, check_tables_fit
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.optim.config import OptimizerConfig

GIB = 2**30
# Rows of 1 KiB: 3, 1 and 1 GiB, and as much again per float of optimizer state.
LARGE = DLRMConfig((3 << 20, 1 << 20, 1 << 20), embedding_dim=256, bottom_mlp_sizes=(512, 256))


def devices(*free, place="rank {}", name="cuda"):
    return [Memory(name, place.format(i), int(f * GIB), 80 * GIB) for i, f in enumerate(free)]


def footprint(optimizer="sgd", config=LARGE, **others):
    chosen = OptimizerConfig(optimizer, "sgd", **others) if optimizer else None
    return Footprint(config, chosen)


def needed(config, optimizer, ranks=1, **others):
    placement = config.placed(ranks)
    found = footprint(optimizer, config, **others)
    return [sum(found.of(placement.of_rank(rank))) for rank in range(ranks)]


def check(optimizer, own, config=LARGE, **others):
    check_tables_fit(footprint(optimizer, config, **others), config.placed(len(own)), own)


@pytest.mark.parametrize(
    ("optimizer", "gibibytes"),
    [(None, 5), ("sgd", 5), ("adagrad", 10), ("adam", 15), ("row_wise_adagrad", 5 + 20 / 1024)],
)
def test_a_table_needs_its_values_and_its_optimizers_state(optimizer, gibibytes):
    assert needed(LARGE, optimizer) == [gibibytes * GIB]
    narrow = dataclasses.replace(LARGE, embedding_dtype="bf16")
    assert needed(narrow, optimizer) == [gibibytes * GIB]
    shares = [6 / 5 * gibibytes * GIB, 9 / 5 * gibibytes * GIB]
    assert [3 * b for b in needed(LARGE, optimizer, 2)] == shares
    divided = dataclasses.replace(LARGE, placement="auto")  # the rows of the largest table
    assert needed(divided, optimizer, 2) == [gibibytes * GIB / 2] * 2


def test_the_wide_term_needs_a_value_of_each_row_and_its_state():
    wide = dataclasses.replace(LARGE, wide=True)
    weights = (5 << 20) * 4
    for optimizer, floats in {None: 1, "sgd": 1, "adagrad": 2, "adam": 3}.items():
        plain = needed(LARGE, optimizer)
        assert needed(wide, optimizer) == [plain[0] + floats * weights]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "row_wise_adagrad", "adam"])
@pytest.mark.parametrize("l2", [0.0, 1e-4])
def test_it_is_what_a_training_holds(optimizer, l2):
    config = DLRMConfig((400, 30), 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(8, 1), wide=True)
    task = Recommendation(config)
    tables, *_ = task.optimizers(OptimizerConfig(optimizer, "sgd", embedding_l2=l2))
    weights = [weight for weight, _ in task.table_parameters()]
    held = sum(weight.nbytes for weight in weights)
    held += sum(s.nbytes for weight in weights for s in tables.state[weight].values() if s.ndim)
    missed = 4 * 430 * 2 * bool(l2)  # steps that each row, and each wide weight, has had
    assert needed(config, optimizer, embedding_l2=l2) == [held + missed]


def test_what_just_fits_is_taken_and_the_message_has_the_numbers():
    (device,) = devices(12)
    check("adam", [device._replace(free=15 * GIB)])
    with pytest.raises(ValueError) as raised:
        check("adam", [device])
    assert str(raised.value) == (
        "the embedding tables need 15.00 GiB on cuda, 10.00 GiB of it the optimizer's state, and "
        "12.00 GiB of 80.00 GiB are free. Smaller: --embedding_dim, --embedding_optimizer sgd, "
        "--hash_indices with --max_table_size, more processes"
    )
    with pytest.raises(ValueError, match=r"need 5.00 GiB on the host, and .* or --table_files DIR"):
        check("sgd", devices(4, name="the host"))


def test_a_process_of_several_is_named():
    with pytest.raises(ValueError, match=re.escape("need 2.00 GiB on cuda (rank 0)")):
        check("sgd", devices(1.5, 4))


def test_processes_of_one_machine_share_its_memory():
    with pytest.raises(ValueError, match=re.escape("need 5.00 GiB on cuda (ranks 0, 1)")):
        check("sgd", devices(4, 4, place="here"))
    check("sgd", devices(4, 4))


def test_a_gpu_is_asked_for_its_free_memory(monkeypatch):
    world, placement = World(device="cuda:1"), LARGE.placed(1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GIB, 80 * GIB))
    with pytest.raises(ValueError, match=r"need 5.00 GiB on cuda:1, and 4.00 GiB of 80.00"):
        agree_that_tables_fit(footprint(), placement, world)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 80 * GIB))
    agree_that_tables_fit(footprint(), placement, world)


def test_a_host_of_unknown_memory_is_not_judged(monkeypatch):
    monkeypatch.setattr("dlrm.tasks.memory.host_memory", lambda: None)
    agree_that_tables_fit(footprint(), LARGE.placed(1), World())


def agree(world, free):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dlrm.tasks.memory.host_memory", lambda: (free, 80 * GIB))
        patch.setattr("dlrm.tasks.memory.machine", lambda: f"machine {world.rank}")
        agree_that_tables_fit(footprint(), LARGE.placed(2), world)


def test_all_ranks_end_where_one_has_too_little(ranks):
    assert ranks(2).call(agree, [(2 * GIB,), (3 * GIB,)]) == [None, None]
    first, second = ranks(2).call(agree, [(2 * GIB,), (GIB,)])
    assert isinstance(first, ValueError)
    assert "the host (rank 1)" in str(first)
    assert isinstance(second, OtherRankError)


def test_a_batch_that_does_not_fit_beside_the_tables_is_refused():
    batch = 3 * 2 * 256  # of a sample: a vector of 16 bits for each table
    large = dataclasses.replace(footprint(None), samples=10 * GIB // batch)
    check_tables_fit(large, LARGE.placed(1), devices(15))
    with pytest.raises(ValueError, match=r"need 5.00 GiB .* and a batch 10.00 GiB .*--batch_size"):
        check_tables_fit(large, LARGE.placed(1), devices(14.9))
