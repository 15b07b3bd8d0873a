"""Every row of BERT: its flags are a configuration, it builds at full size, it starts."""

import functools
from collections import Counter

import numpy as np
import pytest
import torch

from dlrm.distributed import World
from dlrm.model.networks.bert import BertConfig
from dlrm.scripts.bert import command as bert
from dlrm.scripts.bert import flags as bert_flags
from dlrm.scripts.common import network_flags
from dlrm.systems.language import LANGUAGE
from dlrm.systems.rows import System
from dlrm.tasks.language import PreTraining, QuestionAnswering, SequenceClassification
from dlrm.train.execution import ExecutionConfig, partition
from dlrm.train.optim.network import NetworkOptimizerConfig
from dlrm.train.precision import PrecisionConfig
from dlrm.train.schedule import CurveConfig, learning_rate_curve
from dlrm.train.task import TrainConfig

ROWS = [pytest.param(row, id=name) for name, row in LANGUAGE.items()]
WRONG_LENGTH = "ipu/bert-large/pretrain-384-pod64-b"
PUBLISHED = {  # task, layers, vocabulary
    ("pretrain", 12, 30522): 110_106_428,
    ("pretrain", 24, 30522): 336_226_108,
    ("squad", 12, 30522): 108_893_186,
    ("squad", 24, 30522): 334_094_338,
    ("squad", 3, 30400): 44_999_426,  # without biases in the attention
    ("mrpc", 12, 30522): 109_483_778,
    ("mrpc", 24, 30522): 335_143_938,
}


def resolved(row: System):
    values, _ = bert_flags.resolved(bert_flags.parse([*row.arguments(), "--base_device=cpu"]))
    bert_flags.check(values)
    values = type(values)({**values, "batch_size": int(values["batch_size"])}, values.given)
    return values, network_flags.batch_plan(values, row.processes)


@functools.cache
def on_meta(task: str, config: BertConfig):
    kinds = {"pretrain": PreTraining, "squad": QuestionAnswering, "mrpc": SequenceClassification}
    with torch.device("meta"):
        return kinds[task](config, world=World(device="meta"))


def counted(task: str, config: BertConfig) -> int:
    """Parameters by the formulas of the architecture, with PopART's biases or BERT's."""
    layers, width, _, inner = config.shape
    bias = width if config.attention_bias else 0
    embeddings = (config.vocab_size + config.max_position_embeddings + 2 + 2) * width
    attention = 4 * (width * width + bias)
    layer = attention + 2 * 2 * width + (width + 1) * inner + (inner + 1) * width
    pooler = (width + 1) * width
    heads = {
        "squad": 2 * (width + 1),
        "mrpc": pooler + 2 * (width + 1),
        "pretrain": pooler + 2 * (width + 1) + width**2 + bias + 2 * width + config.vocab_size,
    }
    return embeddings + layers * layer + heads[task]


@pytest.mark.parametrize("row", ROWS)
def test_its_flags_are_a_configuration_and_it_builds_at_full_size(row):
    values, plan = resolved(row)
    for config in (
        *(PrecisionConfig, ExecutionConfig, NetworkOptimizerConfig, CurveConfig, TrainConfig),
    ):
        values.config(config)
    config = values.config(BertConfig)
    task = on_meta(values["task"], config)
    count = sum(p.numel() for p in task.model.parameters())
    assert count == counted(values["task"], config)
    key = (values["task"], config.shape.num_layers, config.vocab_size)
    assert count == PUBLISHED.get(key, count)
    parts = partition(task.stages(), values["pipeline_splits"])
    assert len(parts) == max(1, len(values["layers_per_stage"])) + values["encoder_start_stage"]
    assert plan.accumulation == values["gradient_accumulation_steps"]  # as many processes as asked


@pytest.mark.parametrize(
    ("name", "global_batch", "lr", "length", "predictions"),
    [
        ("gaudi/bert-base/mrpc-eager-fp32", 64, 2e-5, 128, None),
        ("gaudi/bert-base/squad-eager-fp32", 12, 3e-5, 384, None),
        ("gaudi/bert-large/mrpc-eager-fp32", 32, 3e-5, 128, None),
        ("gaudi/bert-large/squad-graph-bf16-b24", 24, 3e-5, 384, None),
        ("gaudi/bert-large/pretrain-p1-fp32-wiki", 8192, 6e-3, 128, 20),
        ("gaudi/bert-large/pretrain-p1-bf16-bookwiki", 8192, 6e-3, 128, 20),
        ("gaudi/bert-large/pretrain-p2-fp32-wiki", 4096, 4e-3, 512, 80),
        ("gaudi/bert-large/pretrain-p2-bf16-bookwiki", 4096, 4e-3, 512, 80),
        ("dlperf/bert-base/fp32-b32/4n32d", 1024, 1e-4, 128, 20),
        ("dlperf/bert-base/fp32-bmax/1n1d", 8, 1e-4, 128, 20),
        ("ipu/bert-large/pretrain-128-pod16", 65536, 6e-3, 128, 20),
        ("ipu/bert-large/pretrain-128-pod64", 65536, 6e-3, 128, 20),
        ("ipu/bert-large/pretrain-384-pod16", 16384, 2.828427e-3, 384, 56),
        ("ipu/bert-large/pretrain-384-pod64-a", 16384, 2.828427e-3, 384, 56),
        ("ipu/bert-large/pretrain-384-pod64-b", 16384, 2.828427e-3, 384, 56),
        ("ipu/bert-base/pretrain-128-pod16", 65536, 6e-3, 128, 20),
        ("ipu/bert-base/pretrain-128-pod64", 65536, 6e-3, 128, 20),
        ("ipu/bert-base/pretrain-128-pod64-as-titled", 65536, 6e-3, 128, 20),
        ("ipu/bert-base/pretrain-384-pod16", 16384, 2.828427e-3, 384, 56),
    ],
)
def test_rates_and_batches_are_those_of_the_inventory(name, global_batch, lr, length, predictions):
    values, plan = resolved(LANGUAGE[name])
    assert plan.global_batch == global_batch
    assert values["lr"] == pytest.approx(lr)
    assert values["max_seq_length"] == length
    if predictions:
        assert values["max_predictions_per_seq"] == predictions


@pytest.mark.parametrize(
    ("name", "steps", "top"),
    [
        # The greatest rate: with p = step / N, poly is lr * p / w before w and then lr * sqrt(1-p).
        ("gaudi/bert-large/pretrain-p1-fp32-wiki", 7038, 6e-3 * 2000 / (0.2843 * 7038)),
        ("gaudi/bert-large/pretrain-p2-fp32-wiki", 1563, 4e-3 * 200 / (0.128 * 1563)),
        ("ipu/bert-large/pretrain-128-pod16", 7038, 6e-3),
        ("ipu/bert-base/pretrain-384-pod16", 2137, 2.828427e-3),
    ],
)
def test_the_curves_of_pretraining_reach_their_top_and_fall(name, steps, top):
    values, _ = resolved(LANGUAGE[name])
    assert values["total_steps"] == steps
    rate = learning_rate_curve(values.config(CurveConfig), steps, 10)
    rates = [rate(step) for step in range(1, steps + 1)]
    assert max(rates) == pytest.approx(top, rel=2e-3)
    assert rates[-1] < 0.05 * top


def test_the_recipes_differ_where_the_sources_do():
    gaudi, _ = resolved(LANGUAGE["gaudi/bert-large/pretrain-p1-fp32-wiki"])
    popart, _ = resolved(LANGUAGE["ipu/bert-large/pretrain-128-pod16"])
    dlperf, _ = resolved(LANGUAGE["dlperf/bert-base/fp32-b32/1n1d"])
    squad, _ = resolved(LANGUAGE["gaudi/bert-large/squad-graph-fp32-b10"])
    names = ("optimizer", "weight_decay", "max_grad_norm", "lr_schedule", "attention_dropout")
    assert [gaudi[name] for name in names] == ["lamb", 0.01, None, "poly", 0.1]
    assert [popart[name] for name in names] == ["lamb", 0.01, None, "linear", 0.0]
    assert [dlperf[name] for name in names] == ["adamw", 0.01, 1.0, "linear", 0.1]
    assert [squad[name] for name in names] == ["adamw", 0.0, 1.0, "linear", 0.1]
    assert (gaudi["lamb_flavour"], popart["lamb_flavour"]) == ("nvlamb", "popart")
    scales = {
        name.removeprefix("ipu/bert-"): resolved(row)[0]["loss_scale"]
        for name, row in LANGUAGE.items()
        if row.source.startswith("004") and "pretrain" in name
    }
    assert scales["large/pretrain-128-pod16"] == scales["large/pretrain-384-pod16"] == 64
    assert scales["base/pretrain-128-pod16"] == 512
    assert scales["base/pretrain-128-pod64"] == scales["base/pretrain-128-pod64-as-titled"] == 128


def test_every_row_of_the_inventory_is_here():
    sources = Counter(row.source for row in LANGUAGE.values())
    assert {f"000 A{i}" for i in range(12, 29)} <= sources.keys()
    assert sources["002 B"] == 20
    titled = ("5'", "7'", "9'", "10'", "11'")
    assert {f"004 D{i}" for i in (*range(1, 19), *titled)} <= sources.keys()
    assert len(LANGUAGE) == 17 + 20 + 18 + 5
    assert all("-as-titled" in row.id for row in LANGUAGE.values() if row.source.endswith("'"))


_FAST = (
    *("gaudi/bert-base/mrpc-eager-fp32", "gaudi/bert-large/squad-graph-bf16-b24"),
    *("gaudi/bert-large/pretrain-p2-bf16-wiki", "dlperf/bert-base/amp-xla/4n32d"),
    *("ipu/bert-large/pretrain-128-pod64", "ipu/bert-base/pretrain-384-pod16"),
    *("ipu/bert-large/squad-infer-128/mb2", "ipu/bert-3layer/squad-infer-128/mb4"),
)
# Few layers and short rows; all else is the row's own.
_SMALL = ("--hidden_size=32", "--num_heads=2", "--intermediate_size=64", "--base_device=cpu")


def reduced(row: System) -> list[str]:
    """The row's flags at a size that a test can afford."""
    values, _ = resolved(row)
    small = [*_SMALL, "--vocab_size=120", "--max_seq_length=64"]
    if values["layers_per_stage"]:
        layers = values["layers_per_stage"]
        small += [
            f"--layers_per_stage={','.join('1' * len(layers))}",
            f"--num_layers={len(layers)}",
        ]
    else:
        small += ["--num_layers=3"]
    if row.flags[0] == "--mode=inference_benchmark":
        return small + [
            f"--batch_size={values['batch_size']}",
            "--repeat=2",
            "--batches_per_step=2",
        ]
    accumulation = min(values["gradient_accumulation_steps"], 2)
    small += ["--batch_size=2", f"--gradient_accumulation_steps={accumulation}", "--max_steps=2"]
    small += ["--max_predictions_per_seq=4", "--max_query_length=8", "--doc_stride=16"]
    small += ["--synthetic_dataset_num_entries=64", "--benchmark_warmup_steps=0", "--print_freq=1"]
    if "--execution=graph" in row.flags:
        small += ["--graph_backend=trace"]  # a compilation takes a minute
    return small + [f"--replicas={min(row.processes, 2)}"]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=() if name in _FAST else pytest.mark.slow)
        for name, row in LANGUAGE.items()
    ],
)
def test_it_starts_at_reduced_size(row, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    summary = bert.run(bert_flags.parse([*row.arguments(), *reduced(row)]))
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert ("note: --pipeline_splits:" in out) == any(
        f"--layers_per_stage={n}," in f for f in row.flags for n in "34"
    )
    assert ("the global batch stays" in out) == (row.processes > 1)
    if "--mode=inference_benchmark" in row.flags:
        names = ("min", "mean", "max")
        assert summary["mean_inference_throughput"] > 0
        latencies = [summary[f"{name}_inference_latency"] for name in names]
        assert latencies == sorted(latencies)
        assert summary["p99_inference_latency"] <= summary["p999_inference_latency"]
    else:
        chance = {"pretrain": np.log(120) + np.log(2), "squad": np.log(64), "mrpc": np.log(2)}
        values, _ = resolved(row)
        assert summary["training_loss"] == pytest.approx(chance[values["task"]], rel=0.1)
        assert summary["average_train_throughput"] > 0


@pytest.mark.parametrize("rows", [10, 1211])  # of 407 numbers each, where 1,211 are expected
def test_rows_of_128_tokens_are_refused_where_384_are_expected(rows, tmp_path):
    row, path = LANGUAGE[WRONG_LENGTH], tmp_path / "wiki_00_tokenised"
    length, predictions = 128, 20
    places = np.arange(length)
    one = np.concatenate(
        [
            np.full(length, 7),
            places,
            places >= 60,
            [predictions, length],
            np.full(predictions, 9),
            [1],
        ]
    )
    np.tile(one.astype("<i4"), rows).tofile(path)
    small = [flag for flag in reduced(row) if not flag.startswith("--max_")]
    with pytest.raises(ValueError, match=f"{path}.*(384|1211)"):
        bert.run(bert_flags.parse([*row.arguments(str(path)), *small]))
    right = LANGUAGE["ipu/bert-large/pretrain-128-pod64"]
    small = [flag for flag in reduced(right) if not flag.startswith("--max_")]
    log = f"--log_path={tmp_path}/log.json"
    summary = bert.run(
        bert_flags.parse([*right.arguments(str(path)), *small, "--max_steps=1", log])
    )
    assert summary["training_loss"] > 1
