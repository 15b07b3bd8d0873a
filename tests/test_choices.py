"""Configurations repeat the names of registries, since they import no torch."""

import pytest

from dlrm import ops
from dlrm.data.clicks import bags
from dlrm.data.transform import schema
from dlrm.model.layers import choices
from dlrm.model.layers.interaction import INTERACTIONS
from dlrm.model.layers.numerical_embedding import NUMERICAL_EMBEDDINGS
from dlrm.ops import products
from dlrm.tasks import config
from dlrm.train.execution import MODULE_EXECUTIONS
from dlrm.train.optim import config as optim
from dlrm.train.optim.dense import CLICK_OPTIMIZERS, NETWORK_OPTIMIZERS
from dlrm.train.optim.row_optimizers import TABLE_OPTIMIZERS

NAMES = {
    "interactions": (choices.INTERACTION_NAMES, (*INTERACTIONS, choices.DCN)),
    "numerical embeddings": (choices.NUMERICAL_KINDS, ("none", *NUMERICAL_EMBEDDINGS)),
    "poolings of operators": (choices.POOLINGS, ops.POOLINGS),
    "poolings of datasets": (choices.POOLINGS, bags.POOLINGS),
    "bins": ((choices.MAX_BINS,), (schema.MAX_BINS,)),
    "products": ((config.AUTO_PRODUCTS, *config.PRODUCTS), (products.AUTO, *products.PRODUCTS)),
    "executions": (config.CLICK_EXECUTIONS, MODULE_EXECUTIONS),
    "optimizers of tables": (optim.TABLE_OPTIMIZER_NAMES, TABLE_OPTIMIZERS),
    "optimizers of MLPs": (optim.CLICK_OPTIMIZER_NAMES, CLICK_OPTIMIZERS),
    "optimizers of networks": (optim.NETWORK_OPTIMIZER_NAMES, NETWORK_OPTIMIZERS),
}


@pytest.mark.parametrize("what", NAMES)
def test_the_choices_of_a_setting_are_those_of_its_registry(what):
    chosen, registry = NAMES[what]
    assert sorted(chosen) == sorted(registry)
