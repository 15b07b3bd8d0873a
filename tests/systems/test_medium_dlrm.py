"""The DLRMs of published rows have the published sizes."""

import pytest
from torch import nn

from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.model.layers.cross import CrossLayers
from dlrm.published.rows import find
from dlrm.scripts.common import dlrm_flags

pytestmark = pytest.mark.long


def build(values, **others):
    sizes = values.config(DataConfig).synthetic_sizes
    config = values.config(DLRMConfig, table_sizes=sizes, **others)
    return DLRM(config, World(device="meta"))


def test_the_medium_configuration_has_the_published_size():
    model = build(dlrm_flags.parse(find("gaudi/dlrm-medium/eager-fp32").flags))
    assert (model.config.output_init, model.config.embedding_init) == ("normal", "uniform")
    counts = {
        name: sum(parameter.numel() for parameter in part.parameters())
        for name, part in model.named_children()
        if name != "interact"
    }
    assert counts["embeddings"] == 192_000_000
    assert counts["bottom_mlp"] == 2_164_800
    assert counts["top_mlp"] + counts["output"] == 101_220_353
    assert sum(counts.values()) == 295_385_153
    widths = [
        (layer.in_features, layer.out_features)
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    hidden = [(4096, 4096)] * 6
    assert widths == [(1024, 1024), (1024, 1024), (1024, 64), (128, 4096), *hidden, (4096, 1)]


def test_mlperfs_dcnv2_has_the_published_layers():
    """From mlcommons/training, recommendation_v2/torchrec_dlrm: 3456 = 27 * 128 columns."""
    flags = ["--dataset_type=synthetic_gpu", "--synthetic_dataset=mlperf", "--pooling=sum"]
    flags += ["--interaction_op=dcn", "--cross_layers=3", "--cross_rank=512"]
    values = dlrm_flags.parse(flags)
    sizes = values.config(DataConfig, batch_size=1, test_batch_size=1).synthetic_sizes
    assert sum(sizes) == 204_184_588
    small = ["--synthetic_dataset_max_table_size=50", "--batch_size=64"]
    small += ["--synthetic_dataset_num_entries=64", "--test_batch_size=64"]
    values = dlrm_flags.parse([*flags, *small])
    model = build(values)
    assert model.embeddings.weight.shape == (sum(min(size, 50) for size in sizes), 128)
    assert isinstance(model.interact, CrossLayers)
    shapes = [[tuple(weight.shape) for weight in layer.weights] for layer in model.interact.layers]
    assert shapes == [[(512, 3456), (3456, 512)]] * 3
    assert [layer.bias.numel() for layer in model.interact.layers] == [3456] * 3
    widths = [layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert widths == [13, 512, 256, 3456, 1024, 1024, 512, 256]
    batch = open_datasets(values.config(DataConfig)).train.batch(0)
    assert batch.lengths[0].tolist()[18:21] == [1, 12, 100]
    assert batch.lengths.sum(1).tolist() == [214] * 64
