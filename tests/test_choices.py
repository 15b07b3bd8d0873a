"""Configurations repeat the names of registries, since they import no torch."""

import pytest

from dlrm import ops
from dlrm.data import bags, choices as data
from dlrm.data.schema import fields
from dlrm.data.schema.numeric_transforms import NUMERIC_TRANSFORMS
from dlrm.data.tables.draft import SAMPLE_ROWS
from dlrm.data.tables.files import FORMATS
from dlrm.model.layers import choices
from dlrm.model.layers.interaction import INTERACTIONS
from dlrm.ops import library as products
from dlrm.scripts import checkpoint
from dlrm.scripts.schema import DraftConfig
from dlrm.tasks import config
from dlrm.train.checkpoints import nvidia
from dlrm.train.optim import config as optim
from dlrm.train.optim.dense import CLICK_OPTIMIZERS
from dlrm.train.optim.row_optimizers import TABLE_OPTIMIZERS
from dlrm.vision import config as vision, efficientnet, resnet

NAMES = {
    "interactions": (
        choices.INTERACTION_NAMES,
        (*INTERACTIONS, choices.DCN, choices.QUADRATIC),
    ),
    "poolings of operators": (choices.POOLINGS, ops.POOLINGS),
    "poolings of datasets": (choices.POOLINGS, bags.POOLINGS),
    "bins": ((choices.MAX_BINS,), (fields.MAX_BINS,)),
    "products": ((config.AUTO_PRODUCTS, *config.PRODUCTS), (products.AUTO, *products.PRODUCTS)),
    "optimizers of tables": (optim.TABLE_OPTIMIZER_NAMES, TABLE_OPTIMIZERS),
    "optimizers of MLPs": (optim.CLICK_OPTIMIZER_NAMES, CLICK_OPTIMIZERS),
    "formats of tables": (data.TABLE_FORMATS, FORMATS),
    "numerical transforms": (data.NUMERIC_TRANSFORMS, NUMERIC_TRANSFORMS),
    "ResNets": (vision.RESNETS, resnet.VARIANTS),
    "EfficientNets": (vision.EFFICIENTNETS, efficientnet.VARIANTS),
    "feature orders": (checkpoint.FEATURE_ORDERS, nvidia.FEATURE_ORDERS),
    "paddings": (checkpoint.PADDINGS, nvidia.PADDINGS),
    "rows of a draft": ((DraftConfig.rows,), (SAMPLE_ROWS,)),
}


@pytest.mark.parametrize("what", NAMES)
def test_the_choices_of_a_setting_are_those_of_its_registry(what):
    chosen, registry = NAMES[what]
    assert sorted(chosen) == sorted(registry)
