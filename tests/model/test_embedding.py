"""Tables are created on their device, with values drawn on the host in parts."""

import dataclasses
import hashlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlrm.distributed import World
from dlrm.distributed.placement import Placement
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.model.tables.initial import Initial
from dlrm.model.tables.joint import JointEmbedding

LARGE = DLRMConfig(  # the first table has four million values and the last has no rows
    table_sizes=(130_001, 5, 0),
    embedding_dim=33,
    bottom_mlp_sizes=(8, 33),
    top_mlp_sizes=(8, 1),
)
LAYOUTS = [{"embedding_dtype": "fp32"}, {"embedding_dtype": "bf16"}]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_table_has_the_values_of_one_draw(layout, threads):
    torch.set_num_threads(threads)
    model = DLRM(dataclasses.replace(LARGE, **layout), seed=3)
    tables = model.embeddings.tables()
    assert [len(table) for table in tables] == [130_001, 5, 0]
    for number, table in enumerate(tables):
        bound = max(len(table), 1) ** -0.5
        values = torch.empty(len(table), 33)
        expected = values.uniform_(-bound, bound, generator=drawn(str(number)))
        assert torch.equal(table, expected)


@pytest.mark.parametrize("first", [0, 4, 12, 25])
def test_appended_rows_are_the_last_rows_of_new_tables(first, monkeypatch):
    monkeypatch.setattr("dlrm.model.tables.initial._VALUES_AT_ONCE", 9)  # of three rows
    found = Initial(seed=3).added_rows(0, (25, 3), first)
    expected = [joint(rows)[0][-1] for rows in range(first + 1, 26)]
    torch.testing.assert_close(found, torch.stack(expected) if expected else torch.empty(0, 3))


def joint(*sizes):
    placement = Placement.of_tables(sizes, 3, [range(len(sizes))])
    return JointEmbedding(placement, range(len(sizes)), initial=Initial(seed=3)).tables()


def drawn(name):
    digest = hashlib.blake2b(f"3/table.{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") // 2)


class _HostTensors(TorchDispatchMode):
    """Records the size in bytes of the largest host tensor that an operator returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self.largest = max(self.largest, tensor.numel() * tensor.element_size())
        return result


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_more_than_a_part_of_a_table_is_on_the_host(layout, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_meta", property(lambda tensor: False))  # as on a GPU
    with _HostTensors() as host:
        model = DLRM(dataclasses.replace(LARGE, **layout), World(device="meta"))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert 2 << 20 < host.largest <= 4 << 20  # the first table has 17 MB


@pytest.mark.usefixtures("one_thread")
def test_initial_values_do_not_depend_on_the_default_device():
    expected = joint(7, 5)
    with torch.device("meta"):  # like a GPU's: a CPU generator cannot fill its tensors
        tables = joint(7, 5)
    assert all(map(torch.equal, tables, expected))
