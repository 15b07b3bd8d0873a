"""IPU rows match the documents' commands and configurations, and start at reduced size."""

import os
import re
from collections import Counter
from pathlib import Path

import documents
import numpy as np
import pytest
from full_size import resolved

from dlrm.language import command as bert, flags as bert_flags
from dlrm.published.rows import catalog
from dlrm.published.smoke import smoke_flags
from dlrm.vision import command as cnn, flags as cnn_flags

pytestmark = pytest.mark.long
ROWS = {name: row for name, row in catalog().items() if name.startswith("ipu/")}
_COMMANDS = documents.saved()["commands"]
PRINTED = [*_COMMANDS["003"], *_COMMANDS["004"]]
DOCUMENTS = ("003-ipu-cnn-benchmarks.md", "004-ipu-bert-benchmarks.md")
VALIDATION, WRONG_LENGTH = "ipu/cnn/validate-checkpoints", "ipu/bert-large/pretrain-384-pod64-b"
# From the inventory: global batch, rate, and first stages or layers of the parts.
_RN50 = ("b1/2/relu", "b2/3/relu", "b3/3/relu")
_G16, _G1 = ("block2c", "block4c", "block6a"), ("block2b", "block4b", "block6c")
TRAININGS = {
    "rn50/train-m2000": (16384, 8.0, _RN50),
    "rn50/train-pod16": (16384, 8.0, _RN50),
    "rn50/train-pod64": (16384, 2.0, _RN50),
    "rnx101/train-m2000": (768, 0.375, ("b3/3/relu",)),
    "rnx101/train-pod16": (768, 0.375, ("b3/3/relu",)),
    "effb4-g1/train-m2000": (200, 0.0122, _G16),
    "effb4-g1/train-m2000-as-titled": (192, 0.0117, _G1),
    "effb4-g1/train-pod16": (800, 0.0488, _G16),
    "effb4-g1/train-pod16-as-titled": (768, 0.0469, _G1),
    "effb4-g1/train-pod64": (768, 0.0469, _G1),
    "effb4-g16/train-m2000": (800, 0.0488, _G16),
    "effb4-g16/train-pod16": (800, 0.0488, _G16),
    "effb4-g16/train-pod64": (640, 0.0391, _G16),
    "bert-large/pretrain-128-pod16": (65536, 6e-3, (3, 7, 7, 7)),
    "bert-large/pretrain-128-pod64": (65536, 6e-3, (3, 7, 7, 7)),
    "bert-large/pretrain-384-pod16": (16384, 2.828427e-3, (3, 7, 7, 7)),
    "bert-large/pretrain-384-pod64-a": (16384, 2.828427e-3, (3, 7, 7, 7)),
    "bert-large/pretrain-384-pod64-b": (16384, 2.828427e-3, (3, 7, 7, 7)),
    "bert-large/pretrain-384-pod64-b-as-titled": (16384, 2.828427e-3, (3, 7, 7, 7)),
    "bert-base/pretrain-128-pod16": (65536, 6e-3, (4, 4, 4)),
    "bert-base/pretrain-128-pod64": (65536, 6e-3, (3, 7, 7, 7)),
    "bert-base/pretrain-128-pod64-as-titled": (65536, 6e-3, (4, 4, 4)),
    "bert-base/pretrain-384-pod16": (16384, 2.828427e-3, (4, 4, 4)),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_rates_batches_and_cuts_are_those_of_the_inventory(name):
    row = ROWS[f"ipu/{name}"]
    values, division = resolved(row)
    global_batch, rate, cuts = TRAININGS[name]
    assert division.global_batch == global_batch
    assert values["lr"] == pytest.approx(rate, rel=5e-3)
    assert cuts == values["layers_per_stage" if row.command == "bert" else "pipeline_splits"]
    if values["optimizer"] == "rmsprop_tf":
        assert values["rmsprop_decay"] == pytest.approx(1 - values["lr"])


def test_every_row_of_the_inventory_is_here():
    sources = Counter(row.source for row in ROWS.values())
    numbered = [*range(1, 12), *range(13, 44)]  # C12 trains all rows to the end
    assert {f"003 C{i}" for i in (*numbered, "6'", "7'")} <= sources.keys()
    assert sum("C12" in source for source in sources) == 13
    titled = ("5'", "7'", "9'", "10'", "11'")
    assert {f"004 D{i}" for i in (*range(1, 19), *titled)} <= sources.keys()
    for row in ROWS.values():
        assert ("-as-titled" in row.id) == ("'" in row.source)
        trained = "checkpoint" if row.id == VALIDATION else "ipu_inference"
        assert row.rule == ("ipu" if "train" in row.id else trained)
        assert row.quotation
        assert row.published == ()
        made_up = "/infer-" in row.id or "squad-infer" in row.id
        assert (row.data is None) == made_up


def test_every_printed_command_is_a_rows():
    assert len(PRINTED) == 27
    assert set(PRINTED) <= {row.printed for row in ROWS.values()}
    # A row with another command belongs to a sweep of batch sizes.
    size = re.compile(r"(--(?:micro-)?batch-size) \d+")
    swept = {size.sub(r"\1 N", command) for command in PRINTED}
    for row in ROWS.values():
        if row.printed not in PRINTED and row.id != VALIDATION:
            assert size.sub(r"\1 N", row.printed) in swept
            given, _ = resolved(row)
            assert f"size {given['batch_size']} " in row.printed


def test_the_quotations_are_of_the_documents():
    if "DLRM_SOURCES" not in os.environ:
        pytest.skip("DLRM_SOURCES names no directory with the documents")
    texts = [Path(os.environ["DLRM_SOURCES"], name).read_text() for name in DOCUMENTS]
    for row in ROWS.values():
        text = texts["004" in row.source]
        assert row.quotation in text or all(part in text for part in row.quotation.split(", "))
        assert row.hardware in text


def test_a_training_to_the_end_lacks_the_flags_of_a_benchmark():
    for name, epochs in (
        *(("rn50/train-m2000", 100), ("rn50/train-pod64", 100), ("rnx101/train-pod16", 100)),
        *(("effb4-g1/train-m2000-as-titled", 350), ("effb4-g16/train-pod64", 350)),
    ):
        row = ROWS[f"ipu/{name}"]
        short, long = resolved(row)[0], resolved(ROWS[f"{row.id}/full"])[0]
        assert long["epochs"] == epochs > short["epochs"]
        assert (long["ckpts_per_epoch"], long["save_checkpoint_path"]) == (1, "checkpoints")
        assert short["no_validation"]
        assert long["no_validation"] == row.printed.startswith("poprun")  # by validation.py
        left_out = {"epochs", "ckpts_per_epoch", "save_checkpoint_path", "no_validation"}
        assert all(long[flag] == short[flag] for flag in long.keys() - left_out)


def test_errata_are_rows_as_printed_and_as_titled():
    squad = "ipu/bert-large/squad-infer-128/mb2"
    for name, flag, printed, titled in (
        ("ipu/effb4-g1/train-m2000", "group_dim", 16, 1),
        ("ipu/effb4-g1/train-pod16", "expand_ratio", 4, 6),
        ("ipu/bert-base/pretrain-128-pod64", "size", "large", "base"),
        ("ipu/bert-base/pretrain-128-pod64", "loss_scale", 128, 128),
        (squad, "size", "base_3layer", "large"),
    ):
        assert resolved(ROWS[name])[0][flag] == printed
        assert resolved(ROWS[f"{name}-as-titled"])[0][flag] == titled
        assert ROWS[name].printed == ROWS[f"{name}-as-titled"].printed
    assert ROWS[WRONG_LENGTH].data == "wikipedia/AA/sequence_128/wiki_00_tokenised"
    titled = ROWS[f"{WRONG_LENGTH}-as-titled"]
    assert titled.data == "wikipedia/AA/sequence_384/wiki_00_tokenised"
    assert titled.flags == ROWS[WRONG_LENGTH].flags
    assert resolved(ROWS["ipu/bert-large/pretrain-384-pod64-a"])[0]["epochs"] == 10


_FAST = (
    *("ipu/rn50/train-m2000", "ipu/rnx101/train-pod16", "ipu/effb4-g1/train-m2000-as-titled/full"),
    *("ipu/effb4-g16/train-m2000", "ipu/rn50/infer-synthetic/b1"),
    *("ipu/effb0/infer-generated-x4/b8", "ipu/bert-large/pretrain-128-pod64"),
    *("ipu/bert-base/pretrain-384-pod16", "ipu/bert-large/squad-infer-128/mb2"),
    "ipu/bert-3layer/squad-infer-128/mb4",
)


@pytest.fixture
def run(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)

    def run(row, *more, dataset=None):
        command, flags = (cnn, cnn_flags) if row.command == "cnn" else (bert, bert_flags)
        return command.run(flags.parse([*row.arguments(dataset), *smoke_flags(row), *more]))

    return run


@pytest.mark.parametrize("name", _FAST)  # tests/scripts/systems runs all, by the real command
def test_it_starts_at_reduced_size(name, run, tmp_path, capsys):
    row = ROWS[name]
    summary = run(row)
    out = capsys.readouterr().out
    values, _ = resolved(row)
    assert ("note: --pipeline_splits:" in out) == bool(values["pipeline_splits"])
    if row.rule == "ipu_inference":
        assert summary["mean_inference_throughput"] > 0
        latencies = [summary[f"{name}_inference_latency"] for name in ("min", "mean", "max")]
        assert latencies == sorted(latencies)
        return
    assert ("the global batch stays" in out) == (row.processes > 1)
    # ln 1000 = 6.9 for 1,000 classes; ln 240 = 5.5 for 120 words and two orders.
    chance = 7.6 if row.command == "cnn" else np.log(240)
    assert summary["training_loss"] == pytest.approx(chance, rel=0.15)
    assert summary["average_train_throughput"] > 0
    assert (tmp_path / "checkpoints").exists() == (values["save_checkpoint_path"] is not None)


def test_checkpoints_of_a_small_training_are_validated(run, capsys):
    run(ROWS["ipu/rn50/train-m2000/full"])
    summary = run(ROWS[VALIDATION])
    assert summary["best_loss"] > 1
    assert "model: resnet50" in capsys.readouterr().out


def test_rows_of_128_tokens_are_refused_where_384_are_expected(run, tmp_path):
    h5py = pytest.importorskip("h5py", reason="no h5py, which reads HDF5")
    path, predictions = tmp_path / "wiki_00_tokenised", 20
    ids = np.full((10, 128), 7)
    positions = np.tile(np.arange(1, predictions + 1), (10, 1))
    with h5py.File(path, "w") as file:
        file["input_ids"], file["input_mask"] = ids, np.ones_like(ids)
        file["segment_ids"] = np.arange(128) >= np.full((10, 1), 60)
        file["masked_lm_positions"], file["masked_lm_ids"] = positions, np.full_like(positions, 9)
        file["next_sentence_labels"] = np.ones(10, int)
    sizes = ("--max_seq_length=384", "--max_predictions_per_seq=56")
    with pytest.raises(ValueError, match=f"{path}: expected sequence length 384 .*, got 128"):
        run(ROWS[WRONG_LENGTH], *sizes, dataset=str(path))
    sizes = ("--max_seq_length=128", "--max_predictions_per_seq=20", "--max_steps=1")
    right = ROWS["ipu/bert-large/pretrain-128-pod64"]
    assert run(right, *sizes, dataset=str(path))["training_loss"] > 1
