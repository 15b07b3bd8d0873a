"""Rows at full size on the meta device, which holds no values."""

import functools

import torch

from dlrm.distributed import World
from dlrm.language import flags as bert_flags
from dlrm.language.bert import BertConfig
from dlrm.language.task import PreTraining, QuestionAnswering, SequenceClassification
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.published.rows import BenchmarkRow
from dlrm.scripts.common import dlrm_flags
from dlrm.tasks.networks import flags as network_flags
from dlrm.vision import flags as cnn_flags
from dlrm.vision.task import NetworkConfig

_TASKS = {"pretrain": PreTraining, "squad": QuestionAnswering, "mrpc": SequenceClassification}


def resolved(row: BenchmarkRow):
    """Returns the flag values of a network's row, recipe included, and its batch division."""
    if row.command == "cnn":
        values = cnn_flags.parse(row.arguments())
        division = network_flags.divide_batch(values, row.processes)
        return cnn_flags.resolved(values, division.global_batch), division
    values, _ = bert_flags.resolved(bert_flags.parse([*row.arguments(), "--base_device=cpu"]))
    bert_flags.check(values)
    values = type(values)({**values, "batch_size": int(values["batch_size"])}, values.given)
    return values, network_flags.divide_batch(values, row.processes)


@functools.cache
def image_network(config: NetworkConfig):
    """Returns its stages and parameter count."""
    with torch.device("meta"):
        model = config.build()
    return model.stages(), sum(p.numel() for p in model.parameters())


@functools.cache
def language_network(task: str, config: BertConfig):
    """Returns its stages and parameter count."""
    with torch.device("meta"):
        made = _TASKS[task](config, world=World(device="meta"))
    return made.stages(), sum(p.numel() for p in made.model.parameters())


def click_values(row: BenchmarkRow):
    """Parses a DLRM row's flags."""

    defaults = dlrm_flags.DIST_MAIN if row.command == "dist_main" else None
    return dlrm_flags.parse(row.arguments(), dlrm_flags.make_flags(defaults))


@functools.cache
def click_network(config: DLRMConfig) -> int:
    """Returns its number of parameters."""
    with torch.device("meta"):
        return sum(p.numel() for p in DLRM(config, World(device="meta")).parameters())
