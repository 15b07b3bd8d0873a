"""Bytes of tables against hand-computed numbers and what training really holds."""

import dataclasses
import re
from unittest.mock import patch

import pytest
import torch

from dlrm.distributed import OtherRankError, World
from dlrm.model.config import DLRMConfig
from dlrm.store.config import TableStoreConfig
from dlrm.tasks import click_memory
from dlrm.tasks.footprint import (
    GIB,
    Memory,
    agree_that_tables_fit,
    alternatives,
    check_tables_fit,
)
from dlrm.tasks.planning.workload import Workload, table_bytes

# Rows of 1 KiB: 3, 1 and 1 GiB, and as much again per float of optimizer state.
LARGE = DLRMConfig((3 << 20, 1 << 20, 1 << 20), embedding_dim=256, bottom_mlp_sizes=(512, 256))


def devices(*free, place="rank {}"):
    return [Memory("cuda", place.format(i), int(f * GIB), 80 * GIB) for i, f in enumerate(free)]


def needed(config, optimizer, ranks=1):
    return [sum(one) for one in table_bytes(config.placed(ranks), Workload(config, 1, optimizer))]


def found(config, optimizer, devices, host=100, fixed=()):
    hosts = [Memory("the host", "m", int(host * GIB), 100 * GIB)] * len(devices)
    return list(alternatives(Workload(config, 1, optimizer), devices, hosts, fixed))


@pytest.mark.parametrize(
    ("optimizer", "gibibytes"),
    [(None, 5), ("sgd", 5), ("adagrad", 10), ("adam", 15), ("row_wise_adagrad", 5 + 20 / 1024)],
)
def test_a_table_needs_its_values_and_its_optimizers_state(optimizer, gibibytes):
    assert needed(LARGE, optimizer) == [gibibytes * GIB]
    narrow = dataclasses.replace(LARGE, embedding_dtype="bf16")
    assert needed(narrow, optimizer) == [gibibytes * GIB]
    assert [3 * b for b in needed(LARGE, optimizer, 2)] == [9 / 5 * gibibytes * GIB] + [
        6 / 5 * gibibytes * GIB
    ]


def test_the_wide_term_needs_a_value_of_each_row_and_its_state():
    wide = dataclasses.replace(LARGE, wide=True)
    weights = (5 << 20) * 4
    for optimizer, floats in {None: 1, "sgd": 1, "adagrad": 2, "adam": 3}.items():
        plain = needed(LARGE, optimizer)
        assert needed(wide, optimizer) == [plain[0] + floats * weights]
    with pytest.raises(ValueError, match=r"5,242,880 rows of 256 values and a wide weight\."):
        check_tables_fit(Workload(wide, 1, None), devices(5), devices(5))


def test_what_just_fits_is_taken():
    (device,) = devices(5)
    check_tables_fit(Workload(LARGE, 1, "sgd"), [device], [device])
    with pytest.raises(ValueError, match=re.escape("need 5.00 GiB on cuda")):
        check_tables_fit(
            Workload(LARGE, 1, "sgd"), [dataclasses.replace(device, free=device.free - 1)], [device]
        )


def test_the_message_says_what_is_needed_what_is_free_and_what_fits():
    (device,), (host,) = devices(12), devices(17)
    with pytest.raises(ValueError) as raised:
        check_tables_fit(Workload(LARGE, 1, "adam"), [device], [host])
    assert str(raised.value) == (
        "the embedding tables need 15.00 GiB on cuda, where 12.00 GiB of 80.00 GiB are free: "
        "5.00 GiB of 5,242,880 rows of 256 values and 10.00 GiB of adam's state. What fits: "
        "--embedding_dim 128 --bottom_mlp_sizes 512,128; --embedding_optimizer adagrad; "
        # n + 2 * 2**20 rows of 3 KiB in 9/10 of 12 GiB: n is at most 1,677,721
        "--hash_indices --max_table_size 1600000; "
        "2 processes with a GPU like this each (torchrun); --base_device cpu"
    )
    (device,) = devices(4.5)
    everything = ("embedding_dim", "embedding_optimizer", "max_table_size", "processes")
    with pytest.raises(ValueError) as raised:
        check_tables_fit(
            Workload(LARGE, 1, "sgd"),
            [device],
            [device],
            (*everything, "table_store", "base_device"),
        )
    assert str(raised.value) == (
        "the embedding tables need 5.00 GiB on cuda, where 4.50 GiB of 80.00 GiB are free: "
        "5,242,880 rows of 256 values. No other value of one flag makes them fit"
    )


def test_a_tenth_of_what_is_free_is_left_by_what_is_proposed():
    half, wanted = devices(2.8), "--embedding_dim 128 --bottom_mlp_sizes 512,128"  # of 2.5 GiB
    assert wanted in found(LARGE, "sgd", half)
    assert wanted not in found(LARGE, "sgd", devices(2.7))
    assert "--base_device cpu" in found(LARGE, "sgd", half, host=5.6)
    assert "--base_device cpu" not in found(LARGE, "sgd", half, host=5.5)
    assert "--embedding_optimizer sgd" in found(LARGE, "adagrad", devices(5.56))
    assert "--embedding_optimizer sgd" not in found(LARGE, "adagrad", devices(5.55))
    even = dataclasses.replace(LARGE, table_sizes=(1 << 20,) * 4)
    assert "2 processes" in "".join(found(even, "sgd", devices(2.3)))
    assert "2 processes" not in "".join(found(even, "sgd", devices(2.2)))


def test_only_what_fits_is_proposed():
    (tight,) = devices(5.56)
    assert found(LARGE, "adam", [tight], host=14) == [
        "--embedding_dim 64 --bottom_mlp_sizes 512,64",  # 3.75 GiB; 128 needs 7.5
        "--embedding_optimizer sgd",  # row_wise_adagrad needs 20 MiB more
        "--hash_indices --max_table_size 580000",  # 3 n rows of 3 KiB in 9/10: n is at most 583,008
    ]
    even = dataclasses.replace(LARGE, table_sizes=(1 << 20,) * 4)
    assert found(even, "sgd", devices(1.7), host=1)[2:] == [  # with 3, one would hold 2 GiB
        "4 processes with a GPU like this each (torchrun)"
    ]
    (little,) = devices(0.001)
    assert found(LARGE, None, [little], host=1, fixed=["max_table_size"]) == []


def test_a_host_may_have_tables_in_a_store():
    host = Memory("the host", "m", 4 * GIB, 8 * GIB)
    for count, each in ((1, 3865), (2, 1932)):  # MB, of nine tenths of 4 GiB
        own = [host] * count
        proposed = f"--table_memory {each}MB --table_store DIR"
        assert list(alternatives(Workload(LARGE, 1, "adam"), own, own))[-1] == proposed
        assert proposed not in alternatives(Workload(LARGE, 1, "adam"), own, own, ["table_store"])
    plain = dataclasses.replace(LARGE, embedding_type="joint_sparse")
    for config, of in ((plain, [host]), (LARGE, devices(4))):
        assert "--table_store" not in " ".join(alternatives(Workload(config, 1, "sgd"), of, [host]))
    (little,) = [dataclasses.replace(host, free=2**24)]
    assert "--table_store" not in " ".join(
        alternatives(Workload(LARGE, 1, "sgd"), [little], [little])
    )


@pytest.mark.parametrize(
    ("layout", "expected"), [("joint_fused", "row_wise_adagrad"), ("joint_sparse", "sgd")]
)
def test_row_wise_adagrad_is_for_joint_fused(layout, expected):
    config = dataclasses.replace(LARGE, embedding_type=layout)
    assert f"--embedding_optimizer {expected}" in found(config, "adagrad", devices(6))


def test_nothing_is_proposed_that_must_stay():
    everything = ("embedding_dim", "embedding_optimizer", "max_table_size", "processes")
    assert found(LARGE, "adam", devices(12), fixed=everything) == ["--base_device cpu"]
    (device,) = devices(12)
    with pytest.raises(ValueError, match="No other value of one flag makes them fit"):
        check_tables_fit(
            Workload(LARGE, 1, "adam"),
            [device],
            [device],
            (*everything, "table_store", "base_device"),
        )


def test_a_process_of_several_is_named():
    with pytest.raises(ValueError, match=re.escape("need 2.00 GiB on cuda (rank 1)")):
        check_tables_fit(Workload(LARGE, 1, "sgd"), devices(4, 1.5), devices(1, 1))


def test_processes_of_one_machine_share_its_memory():
    shared = devices(4, 4, place="here")
    with pytest.raises(ValueError, match=re.escape("need 5.00 GiB on cuda (ranks 0, 1)")):
        check_tables_fit(Workload(LARGE, 1, "sgd"), shared, shared)
    check_tables_fit(Workload(LARGE, 1, "sgd"), devices(4, 4), shared)


def test_a_gpu_is_asked_for_its_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GIB, 80 * GIB))
    with pytest.raises(ValueError, match=r"need 5.00 GiB on cuda:1, where 4.00 GiB of 80.00"):
        agree_that_tables_fit(Workload(LARGE, 1, "sgd"), World(device="cuda:1"), None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 80 * GIB))
    agree_that_tables_fit(Workload(LARGE, 1, "sgd"), World(device="cuda:1"), None)


def test_a_host_of_unknown_memory_is_not_judged():
    agree_that_tables_fit(Workload(LARGE, 1, "sgd"), World(), None)


def agree(world, free):
    device = Memory("the host", f"machine {world.rank}", free, 80 * GIB)
    agree_that_tables_fit(Workload(LARGE, 1, "sgd"), world, device)


def test_all_ranks_end_where_one_has_too_little(ranks):
    assert ranks(2).call(agree, [(3 * GIB,), (2 * GIB,)]) == [None, None]
    first, second = ranks(2).call(agree, [(3 * GIB,), (GIB,)])
    assert isinstance(first, ValueError)
    assert "the host (rank 1)" in str(first)
    assert "processes" not in str(first)
    assert isinstance(second, OtherRankError)


def agree_on_store(world, host):
    """Asks for stores of 60 MB in each rank, on hosts of which 100 MB are free."""
    free = patch.object(click_memory, "host_memory", lambda: (100 * 10**6, 10**9))
    with free, patch.object(click_memory, "machine", lambda: host):
        tables = TableStoreConfig("60MB", "store")
        click_memory.agree_on_memory(Workload(LARGE, 1, "sgd"), world, tables=tables)


def test_stores_of_one_host_share_its_memory(ranks):
    agree_on_store(World(), "host")
    assert ranks(2).call(agree_on_store, [("first",), ("other",)]) == [None, None]
    first, second = ranks(2).call(agree_on_store, [("host",), ("host",)])
    assert isinstance(first, ValueError)
    assert str(first) == (
        "--table_memory 60MB: expected at most 50MB in each of 2 ranks, since 100MB of 1000MB are "
        "free on the host"
    )
    assert isinstance(second, OtherRankError)
