"""Pipelines of processes as a user starts them: the results of one process with the same flags."""

import json

import pytest
import torch
from safetensors.torch import load_file
from test_dist_main import Ranks

from dlrm.distributed import Pipelines, World
from dlrm.language import command as bert, flags as bert_flags
from dlrm.tasks.networks import work as networks
from dlrm.tasks.networks.flags import BatchDivision, pipeline_parts
from dlrm.vision import command as cnn, flags as cnn_flags

pytestmark = pytest.mark.usefixtures("one_thread")
BERT = (
    *("--mode=pretrain", "--num_layers=3", "--hidden_size=16", "--num_heads=2", "--vocab_size=60"),
    *("--intermediate_size=32", "--hidden_dropout=0", "--attention_dropout=0", "--data=generated"),
    *("--synthetic_dataset_num_entries=48", "--max_seq_length=16", "--max_predictions_per_seq=3"),
    *("--batch_size=4", "--gradient_accumulation_steps=3", "--replicas=1", "--print_freq=1"),
    *("--layers_per_stage=1,2", "--base_device=cpu", "--optimizer=lamb", "--lr=0.01"),
    *("--pipeline_schedule=1f1b", "--max_steps=3", "--save_checkpoint_path=run"),
)


def losses(log):
    data = [json.loads(line[5:]).get("data", {}) for line in log.read_text().splitlines()]
    return [values["loss"] for values in data if "loss" in values]


def check_same(one, two, files, tolerance):
    """Compares the last losses and the last checkpoints of two folders."""
    expected = losses(one / "run" / "log.json")
    assert losses(two / "run" / "log.json")[-len(expected) :] == pytest.approx(expected, rel=1e-5)
    for file in files:
        expected, found = (
            load_file(sorted(folder.glob("run/step-*"))[-1] / f"{file}.safetensors")
            for folder in (one, two)
        )
        assert set(found) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders for one process (the working directory) and for a pipeline."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    return tmp_path / "one", tmp_path / "two"


def test_a_pipeline_pretrains_and_goes_on_as_one_process_does(folders):
    one, two = folders
    bert.run(bert_flags.parse([*BERT]))
    for more in (("--max_steps=1",), ("--resume",)):
        job = Ranks(two, "dlrm.scripts.bert", *BERT, *more)
        assert job.wait() == 0, job.output()
    check_same(one, two, ("dense", "optimizer"), 1e-5)


@pytest.mark.parametrize(
    ("arguments", "processes", "parts"),
    [
        (["--pipeline_splits=b1/2/relu,b3/3/relu", "--replicas=2"], 6, 3),
        (["--pipeline_splits=b1/2/relu", "--replicas=2"], 2, 1),  # each runs both parts
        (["--pipeline_splits=b1/2/relu", "--replicas=4"], 2, 1),
        (["--pipeline_splits=b1/2/relu"], 2, 1),
        (["--replicas=1"], 2, 1),
    ],
)
def test_processes_beyond_the_replicas_form_pipelines(arguments, processes, parts):
    values = cnn_flags.parse(["--mode=train", *arguments])
    assert pipeline_parts(values, processes, cnn.TRAINING) == parts


def test_layers_per_stage_count_as_parts():
    flags = ["--mode=pretrain", "--layers_per_stage=3,7,2", "--encoder_start_stage=1"]
    values = bert_flags.parse([*flags, "--replicas=2"])
    assert pipeline_parts(values, 8, bert_flags.TRAINING) == 4


def test_another_number_of_processes_is_refused():
    values = cnn_flags.parse(["--mode=train", "--pipeline_splits=b1/2/relu", "--replicas=2"])
    with pytest.raises(ValueError, match="--replicas 2 .* 2 parts: expected 4 processes.* got 3"):
        pipeline_parts(values, 3, cnn.TRAINING)


def test_1f1b_with_fewer_micro_batches_than_parts_is_refused():
    values = cnn_flags.parse(["--pipeline_splits=b1/2/relu", "--pipeline_schedule=1f1b"])
    divided = Pipelines(World(0, 2), World(), World(0, 2))
    with pytest.raises(ValueError, match="1f1b: expected 2 micro-batches or more .* got 1"):
        networks.divide(None, values, divided, BatchDivision(4, 1))
