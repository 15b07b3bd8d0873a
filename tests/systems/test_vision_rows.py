"""Every row of image networks: its flags are a configuration, it builds at full size, it starts."""

import functools
from collections import Counter

import pytest
import torch

from dlrm.data.images.augmentation import Augmentation
from dlrm.model.networks import efficientnet, resnet
from dlrm.scripts.cnn import command as cnn
from dlrm.scripts.cnn import flags as cnn_flags
from dlrm.scripts.common import network_flags
from dlrm.systems.rows import System
from dlrm.systems.vision import VISION
from dlrm.tasks.images import ImageLossConfig, NetworkConfig
from dlrm.train.execution import ExecutionConfig, partition
from dlrm.train.optim.network import NetworkOptimizerConfig
from dlrm.train.precision import PrecisionConfig
from dlrm.train.schedule import CurveConfig
from dlrm.train.task import TrainConfig

ROWS = [pytest.param(row, id=name) for name, row in VISION.items()]
PARAMETERS = {  # model, and for EfficientNet group dim and expand ratio
    ("resnet50", None, None): 25_557_032,
    ("resnext101_32x4d", None, None): 44_177_704,
    ("efficientnet_b0", None, None): 5_288_548,
    ("efficientnet_b4", 1, 6): 19_341_616,
    ("efficientnet_b4", 16, 4): 19_328_168,
}


def resolved(row: System):
    values = cnn_flags.parse(row.arguments())
    plan = network_flags.batch_plan(values, row.processes)
    return cnn_flags.resolved(values, plan.global_batch), plan


@functools.cache
def on_meta(network: NetworkConfig):
    with torch.device("meta"):
        return network.build()


@pytest.mark.parametrize("row", ROWS)
def test_its_flags_are_a_configuration_and_it_builds_at_full_size(row):
    values, plan = resolved(row)
    for config in (
        *(Augmentation, ImageLossConfig, PrecisionConfig, ExecutionConfig),
        *(NetworkOptimizerConfig, CurveConfig, TrainConfig),
    ):
        values.config(config)
    cnn._check(values)
    network = values.config(NetworkConfig)
    model = on_meta(network)
    key = (network.model, network.group_dim, network.expand_ratio)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[key]
    parts = partition(model.stages(), values["pipeline_splits"])
    assert len(parts) == len(values["pipeline_splits"]) + 1
    assert plan.accumulation == values["gradient_accumulation_steps"]  # as many processes as asked


@pytest.mark.parametrize(
    ("name", "global_batch", "lr"),
    [
        ("ipu/rn50/train-m2000", 16384, 8.0),
        ("ipu/rn50/train-pod16", 16384, 8.0),
        ("ipu/rn50/train-pod64", 16384, 2.0),
        ("ipu/rnx101/train-m2000", 768, 0.375),
        ("ipu/rnx101/train-pod16", 768, 0.375),
        ("ipu/effb4-g1/train-m2000", 200, 0.0122),
        ("ipu/effb4-g1/train-m2000-as-titled", 192, 0.0117),
        ("ipu/effb4-g1/train-pod16", 800, 0.0488),
        ("ipu/effb4-g1/train-pod16-as-titled", 768, 0.0469),
        ("ipu/effb4-g1/train-pod64", 768, 0.0469),
        ("ipu/effb4-g16/train-m2000", 800, 0.0488),
        ("ipu/effb4-g16/train-pod16", 800, 0.0488),
        ("ipu/effb4-g16/train-pod64", 640, 0.0391),
    ],
)
def test_rates_and_batches_are_those_of_the_inventory(name, global_batch, lr):
    values, plan = resolved(VISION[name])
    assert plan.global_batch == global_batch
    assert values["lr"] == pytest.approx(lr, rel=5e-3)
    if values["optimizer"] == "rmsprop_tf":
        assert values["rmsprop_decay"] == pytest.approx(1 - values["lr"])


def test_every_row_of_the_inventory_is_here():
    sources = Counter(row.source for row in VISION.values())
    assert {f"000 A{i}" for i in range(1, 7)} <= sources.keys()
    assert sources["002 B"] == 16
    numbered = [*range(1, 12), *range(13, 44)]  # C12 is how all trainings go to the end
    assert {f"003 C{i}" for i in (*numbered, "6'", "7'")} <= sources.keys()
    assert sum("C12" in source for source in sources) == 13


# A small image and two steps; all else is the row's own. Half of the blocks are left out.
_TRAINING = (
    *("--synthetic_dataset_num_entries=64", "--num_classes=13", "--test_batch_size=8"),
    *("--base_device=cpu", "--print_freq=1", "--benchmark_warmup_steps=0"),
)
_FAST = ("gaudi/rn50/eager-bf16-b256", "ipu/rn50/train-m2000", "ipu/rnx101/train-m2000") + (
    "ipu/effb4-g1/train-m2000",
    "ipu/effb4-g1/train-m2000-as-titled/full",
    "ipu/rn50/infer-synthetic/b1",
    "ipu/effb0/infer-generated-x4/b1",
    "dlperf/rn50/fp32-b128/1n8d",
)


def reduced(row: System) -> list[str]:
    """The row's flags at a size that a test can afford."""
    values, _ = resolved(row)
    size = 64 if "resnet" not in values["model"] else 32
    small = [*_TRAINING, f"--image_size={size}"]
    if row.flags[0] == "--mode=benchmark_inference":
        small += [f"--batch_size={min(values['batch_size'], 2)}", "--repeat=2"]
        return small + ["--synthetic_dataset_num_entries=4"]
    accumulation = min(values["gradient_accumulation_steps"], 2)
    small += ["--batch_size=2", f"--gradient_accumulation_steps={accumulation}", "--max_steps=2"]
    small += ["--lr=1e-6"] if values["base_lr_exp"] is None else ["--base_lr_exp=-25"]
    if values["start_epoch"]:
        small += ["--start_epoch=0"]
    if "--execution=graph" in row.flags:
        small += ["--graph_backend=trace"]  # a compilation takes a minute
    return small + [f"--replicas={min(row.processes, 2)}"]


@pytest.fixture
def _few_blocks(monkeypatch):
    """Every stage that a row cuts at, and few more."""
    for name, variant in resnet.VARIANTS.items():
        monkeypatch.setitem(resnet.VARIANTS, name, variant._replace(depths=(3, 4, 4, 1)))
    for name, variant in efficientnet.VARIANTS.items():
        small = variant._replace(width=0.25)
        monkeypatch.setitem(efficientnet.VARIANTS, name, small)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=() if name in _FAST else pytest.mark.slow)
        for name, row in VISION.items()
        if "--mode=validate" not in row.flags
    ],
)
@pytest.mark.usefixtures("_few_blocks")
def test_it_starts_at_reduced_size(row, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    summary = cnn.run(cnn_flags.parse([*row.arguments(), *reduced(row)]))
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert ("note: --pipeline_splits:" in out) == any("pipeline_splits" in f for f in row.flags)
    assert ("the global batch stays" in out) == (row.processes > 1 and "--replicas" in out)
    if "--mode=benchmark_inference" in row.flags:
        assert summary["mean_inference_throughput"] > 0
        assert summary["mean_inference_latency"] <= summary["max_inference_latency"]
    else:
        assert 1 < summary["training_loss"] < 6  # ln 13 is 2.56
        assert summary["average_train_throughput"] > 0
