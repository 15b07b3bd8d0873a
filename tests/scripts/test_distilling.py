"""`--distill`: training on labels mixed with the probabilities of a trained model."""

import numpy as np
import pytest
import torch
from compared_checkpoints import differing
from small_dataset import write_dataset

import dlrm
from dlrm.data.clicks import readers
from dlrm.data.clicks.batch import Shard, Sharded
from dlrm.data.clicks.distilled import Distilled
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.synthetic import SyntheticDataset
from dlrm.distributed import World
from dlrm.serving.sources import inputs_of
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import last_checkpoint

ENSEMBLE = ["--ensemble=dot*2,quadratic", "--dropout=0.1", "--epochs=3"]
DISTILL = ["--distill=teacher", "--distill_weight=0.7"]
SHORT = ["--max_steps=12", "--print_freq=1", "--shuffle_batch_order", "--dropout=0.2"]


def losses(run):
    history = Checkpoint(last_checkpoint(run)).progress["history"]
    return [entry["loss"] for entry in history if "lr" in entry]


def weights(run):
    saved = Checkpoint(last_checkpoint(run))
    tables = [torch.from_numpy(np.array(table.part(0, table.rows))) for table in saved.tables]
    return [*saved.dense.values(), *tables]


@pytest.mark.parametrize(
    ("weight", "flags"),
    [
        (0.3, ["--self_ensemble", "--interaction_op=quadratic", "--gradient_accumulation_steps=3"]),
        (0.7, ["--table_files=files", "--ensemble=2"]),
    ],
    ids=["two passes", "files"],
)
def test_the_student_trains_as_on_a_dataset_with_mixed_labels(
    command, trained, monkeypatch, weight, flags
):
    command("--save_checkpoint_path=teacher", *ENSEMBLE, data=trained.dataset)
    distill = ["--distill=teacher", f"--distill_weight={weight}", "--save_checkpoint_path=student"]
    tested = command(*distill, *SHORT, *flags, "--test_freq=6", data=trained.dataset)
    scores, read, make = (
        dlrm.load("teacher"),
        readers.SplitDataset.batch,
        readers.SplitDataset.__init__,
    )

    def opened(dataset, spec, split, *others, **named):
        make(dataset, spec, split, *others, **named)
        dataset.trains = split == "train"

    def mixed(dataset, index):
        batch = read(dataset, index)
        if not dataset.trains:
            return batch
        logits, labels = scores.logits_of(inputs_of(batch)), batch.labels.numpy()
        taught = 1 / (1 + np.exp(-logits.astype(np.float64)))
        mean = (1 - weight) * labels.astype(np.float64) + weight * taught
        return batch._replace(labels=torch.from_numpy(mean).float())

    monkeypatch.setattr(readers.SplitDataset, "__init__", opened)
    monkeypatch.setattr(readers.SplitDataset, "batch", mixed)
    own = [flag.replace("=rows", "=other") for flag in flags]
    expected = command(
        "--save_checkpoint_path=plain", *SHORT, *own, "--test_freq=6", data=trained.dataset
    )
    assert losses("student") == pytest.approx(losses("plain"), rel=1e-6)
    for actual, other in zip(weights("student"), weights("plain"), strict=True):
        torch.testing.assert_close(actual, other, atol=1e-5, rtol=1e-4)
    assert tested["best_auc"] == pytest.approx(expected["best_auc"], abs=1e-4)  # of the labels


def test_a_resumed_student_ends_as_an_uninterrupted_one(command, trained, tmp_path):
    data = trained.dataset
    command("--save_checkpoint_path=teacher", *ENSEMBLE, data=data)
    command("--save_checkpoint_path=whole", *DISTILL, *SHORT, data=data)
    parts = ["--save_checkpoint_path=parts", *SHORT, "--resume"]
    command(*parts, *DISTILL, "--max_steps=5", data=data)
    differs = r"dataset's teacher: 'manifest \w{12}' in the checkpoint, now None"
    with pytest.raises(ValueError, match=differs):
        command(*parts, data=data)
    command("--save_checkpoint_path=other", *SHORT, data=data)
    with pytest.raises(ValueError, match=r"dataset's teacher: 'manifest \w{12}' .*now 'manifest"):
        command(*parts, *DISTILL, "--distill=other", data=data)
    with pytest.raises(ValueError, match="--distill_weight: 0.7 in the checkpoint, now 0.5"):
        command(*parts, "--distill=teacher", data=data)
    (tmp_path / "teacher").rename(tmp_path / "moved")  # the same model elsewhere
    command(*parts, *DISTILL, "--distill=moved", data=data)
    assert not differing(last_checkpoint("whole"), last_checkpoint("parts"))


def test_a_run_that_goes_on_may_be_taught(command, trained, capsys):
    data = trained.dataset
    command("--save_checkpoint_path=teacher", "--max_steps=4", data=data)
    capsys.readouterr()
    command("--save_checkpoint_path=student", *DISTILL, "--max_steps=4", data=data)
    said = "labels are mixed with the probabilities of teacher/step-000000004 (0.7)"
    assert said in capsys.readouterr().out
    going_on = ["--continue_from=student", "--max_steps=3"]
    command("--save_checkpoint_path=alone", *going_on, data=data, training=[], model=[])
    command("--save_checkpoint_path=taught", *going_on, *DISTILL, data=data, training=[], model=[])
    assert losses("alone") != losses("taught")


def test_what_cannot_teach_is_refused(command, trained, other_ids, tmp_path):
    command("--save_checkpoint_path=teacher", "--max_steps=2", data=trained.dataset)

    def refused(match, *flags, data=trained.dataset, error=ValueError):
        with pytest.raises(error, match=match):
            command("--save_checkpoint_path=student", *flags, data=data)
        assert last_checkpoint("student") is None

    teacher = "--distill=teacher"
    refused("none: no checkpoint here", "--distill=none", error=FileNotFoundError)
    refused(r"transform is not that of teacher.*categorical 0: id 1", teacher, data=other_ids)
    refused("--distill teacher contradicts --mode test", teacher, "--mode=test")
    refused("--distill_weight 0.4 needs --distill", "--distill_weight=0.4")
    for weight in (0, 1.01):
        refused(f"--distill_weight.{weight}", teacher, f"--distill_weight={weight}")
    others = write_dataset(tmp_path / "others")
    refused(
        r"--distill teacher/step.*: expected a model of 3 numerical fields and tables of "
        r"\[50, 200, 3, 130\] rows, as .*others has, got 3 numerical",
        teacher,
        data=others,
    )


@pytest.mark.parametrize("hotness", [None, [3, 1, 4]])
def test_ranks_are_taught_what_one_process_is(hotness):
    spec = FeatureSpec.default(".", 4, [50, 7, 200])
    data = SyntheticDataset(spec, "train", 40, 13, seed=1, hotness=hotness)

    def teacher(numerical, ids, lengths, id_weights):
        ids = ids.double()
        if lengths is not None:
            per_sample = lengths.sum(1)
            assert len(ids) == per_sample.sum()
            sums = [part.sum().item() for part in ids.split(per_sample.tolist())]
            ids = torch.tensor(sums[: len(per_sample)], dtype=torch.float64)[:, None]
        return ((numerical.double().sum(1) + ids.sum(1)) % 1).float().logit(1e-6)

    for index in range(len(data)):
        whole = data.batch(index)
        own = whole.categorical, whole.lengths, None
        mixed = 0.75 * whole.labels + 0.25 * teacher(whole.numerical, *own).sigmoid()
        torch.testing.assert_close(
            Distilled(data, data, teacher, 0.25, World()).batch(index).labels,
            mixed,
            atol=1e-6,
            rtol=0,
        )
        parts = []
        for rank, tables in enumerate([(0, 2), (1,)]):
            world = World(rank, 2)
            own = Sharded(data, Shard(world, tables))
            batch = Distilled(own, data, teacher, 0.25, world).batch(index)
            assert torch.equal(batch.categorical, own.batch(index).categorical)
            parts.append(batch.labels)
        torch.testing.assert_close(torch.cat(parts), mixed, atol=1e-6, rtol=0)
