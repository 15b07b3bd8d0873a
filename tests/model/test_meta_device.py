"""A model on the meta device has the shapes of a real one, and touches no memory."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.model.layers.choices import INTERACTION_NAMES, NUMERICAL_KINDS

SIZES, DIM = (7, 12, 3), 8
LAYOUTS = {
    "joint": {},
    "divided": {"placement": "auto"},  # the rows of table 1 on two ranks
    "bf16": {"embedding_dtype": "bf16"},
}
INTERACTIONS = [{"interaction_op": name} for name in (*INTERACTION_NAMES, "dot,dcn")]
INTERACTIONS += [
    {"interaction_op": "dcn", "cross_rank": 2},
    {"interaction_op": "cat,dcn", "cross_structure": "parallel"},
]
PARTS = [
    {**interaction, "numerical_embedding": kind, "wide": wide, "ensemble": members}
    for interaction, kind, wide, members in itertools.product(
        INTERACTIONS, NUMERICAL_KINDS, (False, True), (1, 3)
    )
]


def config_of(layout, parts):
    return DLRMConfig(
        table_sizes=SIZES,
        num_numerical_features=2,
        embedding_dim=DIM,
        bottom_mlp_sizes=(4, DIM),
        top_mlp_sizes=(4, 1),
        numerical_bins=4,
        batch_norm=layout != "divided",
        **LAYOUTS[layout],
        **parts,
    )


def made(layout, parts, device):
    world = World(size=2 if layout == "divided" else 1, device=device)
    return DLRM(config_of(layout, parts), world)


def shapes(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}


class _Values(TorchDispatchMode):
    """Refuses host tensors of values; numbers of tables and rows are integers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                assert tensor.dtype in (torch.int64, torch.bool), func
                assert tensor.numel() <= 6 * len(SIZES), func
        return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_model_has_its_shapes_and_no_values(layout):
    for parts in PARTS:
        with _Values():
            model = made(layout, parts, "meta")
        assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
        real = made(layout, parts, "cpu")
        assert shapes(model) == shapes(real), parts


def test_the_default_device_may_be_meta():
    with torch.device("meta"), _Values():
        model = made("joint", PARTS[-1], "cpu")
    assert model.world.device == "meta"
    assert shapes(model) == shapes(made("joint", PARTS[-1], "cpu"))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [("joint", [[7, 12, 3]] * 2), ("divided", [])],
)
def test_rows_that_a_sample_looks_up_once_are_neither_shared_nor_divided(layout, expected):
    model = made(layout, {"wide": True}, "meta")
    found = [model.embeddings.single_hot_table_sizes(), model.wide.single_hot_table_sizes()]
    assert [sizes for one in found for sizes in one.values()] == expected
