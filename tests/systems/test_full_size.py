"""Every row is a configuration whose network builds at full size with known parameters.

Networks are built on the meta device, which holds no values.
"""

import functools

import pytest
import torch

from dlrm.data.clicks.config import DataConfig
from dlrm.distributed import World
from dlrm.language import flags as bert_flags
from dlrm.language.bert import BertConfig
from dlrm.language.task import PreTraining, QuestionAnswering, SequenceClassification
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.published.rows import catalog
from dlrm.scripts.common import dlrm_flags
from dlrm.tasks.networks.flags import divide_batch
from dlrm.train.config import ExecutionConfig, PrecisionConfig, TrainConfig
from dlrm.train.execution import partition
from dlrm.train.optim.config import NetworkOptimizerConfig, OptimizerConfig
from dlrm.train.schedule import CurveConfig, ScheduleConfig
from dlrm.vision import command as cnn, flags as cnn_flags
from dlrm.vision.augmentation import Augmentation
from dlrm.vision.task import ImageLossConfig, NetworkConfig

pytestmark = pytest.mark.long
CATALOG = catalog()


def of_command(*commands):
    rows = (row for row in CATALOG.values() if row.command in commands and row.measure == "run")
    return [pytest.param(row, id=row.id) for row in rows]


IMAGE_PARAMETERS = {  # model, and for EfficientNet group dim and expand ratio
    ("resnet50", None, None): 25_557_032,
    ("resnext101_32x4d", None, None): 44_177_704,
    ("efficientnet_b0", None, None): 5_288_548,
    ("efficientnet_b4", 1, 6): 19_341_616,
    ("efficientnet_b4", 16, 4): 19_328_168,
}
LANGUAGE_PARAMETERS = {  # task, layers, vocabulary
    ("pretrain", 12, 30522): 110_106_428,
    ("pretrain", 24, 30522): 336_226_108,
    ("squad", 12, 30522): 108_893_186,
    ("squad", 24, 30522): 334_094_338,
    ("squad", 3, 30400): 44_999_426,  # without biases in the attention
    ("mrpc", 12, 30522): 109_483_778,
    ("mrpc", 24, 30522): 335_143_938,
}
MLPS = 2_369_921  # 13-512-256-128 and 480-1024-1024-512-256-1, with biases
CLICK_PARAMETERS = {  # rows of all tables
    32_709_138: 32_709_138 * 128 + MLPS,
    177_944_275: 177_944_275 * 128 + MLPS,
    3_000_000: 295_385_153,
}


TASKS = {"pretrain": PreTraining, "squad": QuestionAnswering, "mrpc": SequenceClassification}


def resolved(row):
    """Returns the flag values of a network's row, recipe included, and its batch division."""
    if row.command == "cnn":
        values = cnn_flags.parse(row.arguments())
        division = divide_batch(values, row.processes)
        return cnn_flags.resolved(values, division.global_batch), division
    values, _ = bert_flags.resolved(bert_flags.parse([*row.arguments(), "--base_device=cpu"]))
    bert_flags.check(values)
    values = values.replaced({"batch_size": int(values["batch_size"])})
    return values, divide_batch(values, row.processes)


@functools.cache
def on_meta(make, *arguments):
    """Builds a model, or the task of one, without values; returns it and its parameter count."""
    with torch.device("meta"):
        made = make(*arguments)
    return made, sum(weight.numel() for weight in getattr(made, "model", made).parameters())


def language_task(name, config):
    return TASKS[name](config, world=World(device="meta"))


def click_model(config):
    return DLRM(config, World(device="meta"))


def check_network(values, division, stages):
    configs = (PrecisionConfig, ExecutionConfig, NetworkOptimizerConfig, CurveConfig, TrainConfig)
    for config in configs:
        values.config(config)
    parts = partition(stages, values["pipeline_splits"])
    assert len(parts) == len(values["pipeline_splits"]) + 1
    assert division.accumulation == values["gradient_accumulation_steps"]  # processes as asked


@pytest.mark.parametrize("row", of_command("cnn"))
def test_an_image_network_builds_at_full_size(row):
    values, division = resolved(row)
    values.config(Augmentation)
    values.config(ImageLossConfig)
    cnn._check(values)
    network = values.config(NetworkConfig)
    model, count = on_meta(NetworkConfig.build, network)
    assert count == IMAGE_PARAMETERS[network.model, network.group_dim, network.expand_ratio]
    check_network(values, division, model.stages())


@pytest.mark.parametrize("row", of_command("bert"))
def test_a_language_network_builds_at_full_size(row):
    values, division = resolved(row)
    config = values.config(BertConfig)
    task, count = on_meta(language_task, values["task"], config)
    placed = len(values["layers_per_stage"]) + values["encoder_start_stage"]
    assert len(values["pipeline_splits"]) + 1 == (placed or 1)
    key = (values["task"], config.shape.num_layers, config.vocab_size)
    assert count == LANGUAGE_PARAMETERS.get(key, count)  # padded vocabularies have no published one
    check_network(values, division, task.stages())


@pytest.mark.parametrize("row", of_command("main", "dist_main"))
def test_a_click_model_builds_at_full_size(row):
    defaults = dlrm_flags.DIST_MAIN if row.command == "dist_main" else None
    values = dlrm_flags.parse(row.arguments(), dlrm_flags.make_flags(defaults))
    for config in (PrecisionConfig, ScheduleConfig, TrainConfig, OptimizerConfig):
        values.config(config)
    sizes = values.config(DataConfig).synthetic_dataset_table_sizes
    _, count = on_meta(click_model, values.config(DLRMConfig, table_sizes=sizes))
    assert count == CLICK_PARAMETERS[sum(sizes)]


@pytest.mark.parametrize(
    ("name", "global_batch", "lr", "length", "steps"),
    [
        ("gaudi/bert-base/mrpc-eager-fp32", 64, 2e-5, 128, None),
        ("gaudi/bert-base/squad-eager-fp32", 12, 3e-5, 384, None),
        ("gaudi/bert-large/mrpc-eager-fp32", 32, 3e-5, 128, None),
        ("gaudi/bert-large/pretrain-p1-fp32-wiki", 8192, 6e-3, 128, 7038),
        ("gaudi/bert-large/pretrain-p2-fp32-wiki", 4096, 4e-3, 512, 1563),
        ("ipu/bert-large/pretrain-128-pod16", 65536, 6e-3, 128, 7038),
        ("ipu/bert-base/pretrain-384-pod16", 16384, 2.828427e-3, 384, 2137),
        ("dlperf/bert-base/fp32-b32/4n32d", 1024, 1e-4, 128, 120),
    ],
)
def test_recipes_have_the_published_rates_and_batches(name, global_batch, lr, length, steps):
    values, division = resolved(CATALOG[name])
    assert division.global_batch == global_batch
    assert values["lr"] == pytest.approx(lr)
    assert values["max_seq_length"] == length
    assert values["total_steps"] == steps


def test_the_recipes_differ_where_the_sources_do():
    names = ("optimizer", "weight_decay", "max_grad_norm", "lr_schedule", "attention_dropout")
    expected = {
        "gaudi/bert-large/pretrain-p1-fp32-wiki": ["lamb", 0.01, None, "poly", 0.1, "nvlamb"],
        "ipu/bert-large/pretrain-128-pod16": ["lamb", 0.01, None, "linear", 0.0, "popart"],
        "dlperf/bert-base/fp32-b32/1n1d": ["adamw", 0.01, 1.0, "linear", 0.1],
        "gaudi/bert-large/squad-graph-fp32-b10": ["adamw", 0.0, 1.0, "linear", 0.1],
    }
    for row, found in expected.items():
        values, _ = resolved(CATALOG[row])
        assert [values[name] for name in (*names, "lamb_flavor")][: len(found)] == found
