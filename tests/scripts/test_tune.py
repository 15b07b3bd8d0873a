"""`dlrm.scripts.tune` searches settings on training rows only, and resumes after any end."""

import json
import random
import shutil
import time

import forked
import numpy as np
import pytest
from absl import flags
from small_dataset import write_dataset

import dlrm
from dlrm.data.clicks import bags, layout
from dlrm.data.clicks.bags import Jagged, ListField
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.writer import SplitWriter
from dlrm.flags import parse_flags
from dlrm.manifest import sealed_json
from dlrm.scripts.tune.__main__ import main
from dlrm.scripts.tune.folds import FoldPart, write_part
from dlrm.scripts.tune.halving import Rung, plan_rungs
from dlrm.scripts.tune.space import Space

TUNE = "dlrm.scripts.tune"
SPACE = """
lr: {low: 0.002, high: 0.05, log: true}
epochs: {low: 1, high: 2}
embedding_dim: [2, 4]
top_mlp_sizes: [[16, 1], [8, 1]]
batch_size: 128
schedule: linear
"""
ROWS = {"train": 3000, "test": 10}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("tune") / "dataset", ROWS)


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    path = tmp_path_factory.mktemp("space") / "space.yaml"
    path.write_text(SPACE)
    return path


def arguments(dataset, space, output, *others):
    given = {"dataset": dataset, "output": output, "space": space, "processes": 1, "trials": 5}
    return [*(f"--{name}={value}" for name, value in given.items()), "--eta=2", *others]


def results(output):
    """Returns the results of a search, without the times of its runs."""
    return {name: (output / name).read_bytes() for name in NAMES}


NAMES = ("tuning.txt", "tuning.json", "best.flags")


@pytest.fixture(scope="module")
def searched(dataset, space, tmp_path_factory):
    output = tmp_path_factory.mktemp("searched") / "out"
    assert main(arguments(dataset, space, output)) == 0
    return output


def test_the_best_settings_train_by_the_command(searched, dataset, tmp_path):
    facts = json.loads((searched / "tuning.json").read_text())
    assert [rung["trials"] for rung in facts["rungs"]] == [5, 3, 2]
    best, second = (trial["results"]["3"][0]["auc"] for trial in facts["trials"][:2])
    assert best >= second
    assert best > 0.65
    assert not (searched / "parts").exists()
    where = [f"--dataset={dataset}", f"--flagfile={searched / 'best.flags'}"]
    done = forked.succeed("dlrm.scripts.main", *where, "--base_device=cpu", cwd=tmp_path)
    assert "chosen_on : set_aside\n" in done.stdout  # the dataset has no validation rows
    *_, roles = (searched / "tuning.txt").read_text().splitlines()
    assert roles.startswith("metrics are of held-out training rows, chosen on; test and ")


def test_a_trial_is_a_training_by_its_settings(searched, dataset, tmp_path):
    facts = json.loads((searched / "tuning.json").read_text())
    trial = next(one for one in facts["trials"] if one["settings"].get("epochs") == 2)
    rung, ((metrics,)) = list(trial["results"].items())[-1]
    share = facts["rungs"][int(rung) - 1]["share"]
    write_part(dataset, FoldPart(0, 1, 0.2, "random", share, 1), tmp_path / "part")
    steps = 2 * -(-dlrm.Dataset(tmp_path / "part").rows["train"] // 128)
    model = dlrm.fit(
        tmp_path / "part",
        recipe="auto",
        seed=1,
        test_freq=steps,
        set_aside=0.0,  # nothing is chosen during a trial
        base_device="cpu",
        **trial["settings"],
    )
    assert metrics["auc"] == model.results["test_auc"]
    assert metrics["log_loss"] == model.results["test_log_loss"]


def test_test_rows_are_not_opened(searched, dataset, space, tmp_path):
    shutil.copytree(dataset, tmp_path / "dataset")
    shutil.rmtree(tmp_path / "dataset/test")
    assert main(arguments(tmp_path / "dataset", space, tmp_path / "out")) == 0
    assert results(tmp_path / "out") == results(searched)


def test_a_search_that_was_killed_goes_on(searched, dataset, space, tmp_path):
    words = arguments(dataset, space, tmp_path / "out")
    process = forked.start(TUNE, *words, stdout=tmp_path / "log")
    done, deadline = tmp_path / "out/results", time.monotonic() + 120
    while len(list(done.glob("*.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.join()
    first = {path: path.read_bytes() for path in done.glob("*.json")}
    assert 3 <= len(first) < 10
    assert not (tmp_path / "out/tuning.txt").exists()
    assert main(words) == 0
    assert {path: path.read_bytes() for path in first} == first  # times included
    assert results(tmp_path / "out") == results(searched)


def flip(path, random):
    """Flips a bit of a file; returns its content before."""
    whole = path.read_bytes()
    damaged, place = bytearray(whole), random.randrange(8 * len(whole))
    damaged[place // 8] ^= 1 << place % 8
    path.write_bytes(damaged)
    return whole


def rewrite(path, **changes):
    """Changes entries of a sealed file; None removes one."""
    facts = {**json.loads(path.read_text()), **changes}
    path.write_text(sealed_json({name: one for name, one in facts.items() if one is not None}))


def test_a_result_of_another_training_is_made_again(searched, dataset, space, tmp_path, capsys):
    shutil.copytree(searched, tmp_path / "out")
    first, second, third, *_ = sorted((tmp_path / "out/results").glob("*-share-0.2500.json"))
    shutil.copy(second, first)
    rung = next((tmp_path / "out/results").glob("*-share-1.0000.json"))
    shutil.copy(rung.with_name(rung.name.replace("1.0000", "0.5000")), rung)
    rewrite(third, dataset="00000000")
    assert main(arguments(dataset, space, tmp_path / "out")) == 0
    said = capsys.readouterr().out
    assert f"cannot be used: {first}: the result of another training: expected trial 0, got" in said
    assert f"{rung}: the result of another training: expected share 1, got 0.5" in said
    assert f"{third}: the result of another training: expected dataset" in said
    assert said.count("trained again") == 3
    assert results(tmp_path / "out") == results(searched)


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (
            lambda path: path.write_text(path.read_text().replace('"auc": 0.', '"auc": 0.9')),
            "expected CRC-32",
        ),
        (lambda path: path.write_text("{}"), "expected the checksum own_crc32 at its end"),
        (lambda path: path.write_text(sealed_json({})), "expected settings and metrics, got {"),
        (lambda path: rewrite(path, result={"auc": 1.0}), "expected settings and metrics, got {"),
        (lambda path: rewrite(path, settings=None), "expected settings and metrics, got {"),
    ],
)
def test_a_damaged_result_is_made_again(searched, dataset, space, tmp_path, capsys, write, named):
    shutil.copytree(searched, tmp_path / "out")
    path = min((tmp_path / "out/results").iterdir())
    write(path)
    assert main(arguments(dataset, space, tmp_path / "out")) == 0
    said = capsys.readouterr().out
    assert f"trained again, since its result cannot be used: {path}: {named}" in said
    assert results(tmp_path / "out") == results(searched)


def test_damaged_rows_of_a_killed_search_are_written_again(
    searched, dataset, space, tmp_path, capsys
):
    shutil.copytree(searched, tmp_path / "out")
    min((tmp_path / "out/results").iterdir()).unlink()
    part = FoldPart(0, 1, 0.2, "random", 0.25, 1)
    directory = tmp_path / "out/parts" / part.name
    write_part(dataset, part, directory)
    flip(directory / "train/label.bin", random.Random(1))
    assert main(arguments(dataset, space, tmp_path / "out")) == 0
    said = capsys.readouterr().out
    label = directory / "train/label.bin"
    assert f"rows written again, since a file of them is damaged: {label}: expected CRC-32" in said
    assert results(tmp_path / "out") == results(searched)


def test_a_damaged_search_is_named(searched, dataset, space, tmp_path, capsys):
    shutil.copytree(searched, tmp_path / "out")
    begun = tmp_path / "out/search.json"
    begun.write_bytes((searched / "search.json").read_bytes().replace(b"0", b"1", 1))
    error = refused(capsys, *arguments(dataset, space, tmp_path / "out"))
    assert f"{begun}: expected CRC-32" in error


@pytest.mark.parametrize("content", ["{}", '{"flags": {}, "space": {}, "files": []}'])
def test_a_map_that_is_no_search_is_named(searched, dataset, space, tmp_path, capsys, content):
    shutil.copytree(searched, tmp_path / "out")
    (tmp_path / "out/search.json").write_text(content)
    error = refused(capsys, *arguments(dataset, space, tmp_path / "out"))
    assert error.startswith("error: ")
    assert "out/search.json: expected flags, space, files of a search, got {" in error


def test_damaged_flags_are_not_used(searched, tmp_path):
    path = tmp_path / "best.flags"
    text = (searched / "best.flags").read_text()
    path.write_text(text.replace("--batch_size=128", "--batch_size=129"))
    with pytest.raises(ValueError, match=r"best\.flags: expected CRC-32 .* that you have edited$"):
        parse_flags(flags.FlagValues(), ["main", f"--flagfile={path}"])
    with pytest.raises(ValueError, match=r"best\.flags: expected CRC-32"):
        parse_flags(flags.FlagValues(), ["main", "--flagfile", str(path)])
    (tmp_path / "outer").write_text(f"--flagfile={path}\n")
    with pytest.raises(ValueError, match=r"best\.flags: expected CRC-32"):
        parse_flags(flags.FlagValues(), ["main", f"--flagfile={tmp_path / 'outer'}"])
    path.write_text("\n".join(text.splitlines()[:-1]) + "\n")  # cut at a line
    with pytest.raises(ValueError, match=r"best\.flags: expected CRC-32"):
        parse_flags(flags.FlagValues(), ["main", f"--flagfile={path}"])
    edited = path.read_text().splitlines()[1:]
    path.write_text("\n".join(edited))
    with pytest.raises(ValueError, match="Unknown command line flag"):  # it is read
        parse_flags(flags.FlagValues(), ["main", f"--flagfile={path}"])


@pytest.mark.slow
def test_a_hundred_flips_in_a_search_change_no_result(searched, dataset, space, tmp_path, capsys):
    """Results are made again; what cannot be is named."""
    seed, named = 20261125, 0
    draw = random.Random(seed)
    output = tmp_path / "out"
    for number in range(100):
        shutil.copytree(searched, output)
        files = sorted(path for path in output.rglob("*") if path.suffix in (".json", ".flags"))
        path = files[number % len(files)]
        flip(path, draw)
        if path.name == "search.json":
            assert path.name in refused(capsys, *arguments(dataset, space, output))
            named += 1
        else:
            assert main(arguments(dataset, space, output)) == 0
            assert results(output) == results(searched), path
        shutil.rmtree(output)
    print(f"100 flips, seed {seed}: {named} named, {100 - named} without effect")


@pytest.mark.slow
def test_processes_change_nothing(searched, dataset, space, tmp_path):
    assert main([*arguments(dataset, space, tmp_path / "out"), "--processes=2"]) == 0
    assert results(tmp_path / "out") == results(searched)


@pytest.mark.slow
def test_folds_are_what_rungs_add(dataset, space, tmp_path, capsys):
    assert main(arguments(dataset, space, tmp_path / "out", "--folds=3", "--trials=3")) == 0
    facts = json.loads((tmp_path / "out/tuning.json").read_text())
    assert [(one["folds"], one["share"]) for one in facts["rungs"]] == [(1, 1), (2, 1), (3, 1)]
    assert len(facts["trials"][0]["results"]["3"]) == 3
    assert facts["trials"][0]["results"]["3"][0] == facts["trials"][0]["results"]["1"][0]
    assert " ± " in capsys.readouterr().out


def test_more_trials_take_what_is_known(searched, dataset, space, tmp_path):
    shutil.copytree(searched, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out/results").iterdir()}
    assert main(arguments(dataset, space, tmp_path / "out", "--trials=6")) == 0
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out/results").iterdir()}
    assert before.items() < after.items()
    assert len(json.loads((tmp_path / "out/tuning.json").read_text())["trials"]) == 6


def refused(capsys, *words):
    try:
        code = main([str(word) for word in words])
    except SystemExit as ended:  # of the parser
        code = ended.code
    assert code in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_data_that_changed_are_refused_by_name(searched, dataset, space, tmp_path, capsys):
    shutil.copytree(searched, tmp_path / "out")
    changed = write_dataset(tmp_path / "changed", ROWS, seed=5)
    error = refused(capsys, *arguments(changed, space, tmp_path / "out"))
    assert "changed/train/cat_0.bin: has changed: expected CRC-32" in error
    labels = tmp_path / "changed/train/label.bin"
    labels.write_bytes(bytes([1 - labels.read_bytes()[0]]) + labels.read_bytes()[1:])
    error = refused(capsys, *arguments(changed, space, tmp_path / "new"))
    assert "train/label.bin: expected CRC-32" in error
    assert not (tmp_path / "new").exists()


def test_a_search_goes_on_as_it_began(searched, dataset, space, tmp_path, capsys):
    shutil.copytree(searched, tmp_path / "out")
    words = arguments(dataset, space, tmp_path / "out")
    assert "--seed: expected 1, got 2" in refused(capsys, *words, "--seed=2")
    (tmp_path / "other.yaml").write_text(SPACE.replace("128", "64"))
    error = refused(capsys, *words, f"--space={tmp_path / 'other.yaml'}")
    assert "--space, batch_size: expected 128, got 64" in error
    assert "exists, and is no search" in refused(capsys, *words, f"--output={dataset}")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dropuot: 0.1", "dropuot: expected a setting among"),
        ("seed: [1, 2]", "seed: expected a setting among"),
        ("lr: {low: 0.1, high: 0.01}", "lr: expected low below high, got 0.1 and 0.01"),
        ("lr: {low: 0, high: 0.01, log: true}", "expected low below high above 0"),
        ("lr: {low: a, high: 1}", "lr: expected numbers as low and high, got 'a'"),
        ("lr: {lowest: 0}", "lr: expected low, high and log, got lowest"),
        ("lr: []", "lr: expected values, got an empty list"),
        ("dropout: [2.0]", "--dropout 2.0: expected 0 or more, less than 1"),
    ],
)
def test_a_space_that_is_none_is_named(dataset, tmp_path, capsys, text, named):
    (tmp_path / "space.yaml").write_text(text)
    words = arguments(dataset, tmp_path / "space.yaml", tmp_path / "out", "--trials=2")
    assert named in refused(capsys, *words)


@pytest.mark.parametrize("flag", ["--trials=0", "--eta=1", "--held_out=1", "--processes=0"])
def test_impossible_flags_are_named(dataset, space, tmp_path, capsys, flag):
    error = refused(capsys, *arguments(dataset, space, tmp_path / "out"), flag)
    assert flag.replace("=", " ") in error


def test_a_trial_that_diverges_is_the_last(dataset, tmp_path, capsys):
    (tmp_path / "space.yaml").write_text("{lr: [1.0e+38], batch_size: 128, epochs: 1}")
    words = arguments(dataset, tmp_path / "space.yaml", tmp_path / "out", "--trials=2", "--rungs=1")
    assert main(words) == 0
    assert (
        "diverged" in (tmp_path / "out/tuning.txt").read_text().splitlines()[-2]
    )  # before the roles


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"lr": "fast"}, "space.yaml: lr: expected float, got 'fast'"),
        ({"lr": [0.1, "fast"]}, "space.yaml: lr: expected float, got 'fast'"),
        ({"epochs": {"low": 0.5, "high": 2}}, "space.yaml: epochs: expected int, got 0.5"),
        ({"wide": [True, 1]}, "space.yaml: wide: expected bool, got 1"),
    ],
)
def test_a_value_of_another_type_is_refused_before_a_trial_runs(facts, message):
    with pytest.raises(ValueError, match=message):
        Space.from_dict(facts, [*KNOWN], "space.yaml")


def test_rungs_end_with_all_there_is():
    assert plan_rungs(27, 3, 3, 1) == [Rung(27, 1, 3**-2), Rung(9, 1, 3**-1), Rung(3, 1, 1.0)]
    assert plan_rungs(9, 3, 3, 5) == [Rung(9, 1, 1.0), Rung(3, 2, 1.0), Rung(1, 5, 1.0)]
    assert plan_rungs(8, 3, 3, 2) == [Rung(8, 1, 1.0), Rung(3, 2, 1.0)]
    assert plan_rungs(4, 1, 3, 1) == [Rung(4, 1, 1.0)]


def test_settings_are_drawn_from_the_space_alone():
    facts = {"lr": {"low": 1e-4, "high": 1.0, "log": True}, "epochs": {"low": 1, "high": 3}}
    space = Space.from_dict({**facts, "wide": [True, False], "schedule": "linear"}, [*KNOWN], "x")
    drawn = [space.draw(3, trial) for trial in range(400)]
    assert drawn[7] == space.draw(3, 7) != space.draw(4, 7)
    assert {one["epochs"] for one in drawn} == {1, 2, 3}
    assert {one["schedule"] for one in drawn} == {"linear"}
    rates = np.array([one["lr"] for one in drawn])
    assert 1e-4 <= rates.min() < rates.max() <= 1
    assert abs(np.median(np.log10(rates)) + 2) < 0.4  # log-uniform


KNOWN = ("lr", "epochs", "wide", "schedule")


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """A dataset whose rows hold their number as an id, in a list and as a weight."""
    directory, rows = tmp_path_factory.mktemp("numbered") / "dataset", 1000
    places = np.arange(rows)
    sizes = {"row": rows, "list": rows}
    lists = {"list": ListField(3)}
    spec = FeatureSpec.named(
        directory / layout.FEATURE_SPEC, "label", ["x"], sizes, ["train", "test"], lists=lists
    )
    lengths = (places % 3).astype(lists["list"].lengths_dtype)
    for split in ("train", "test"):
        with SplitWriter(spec, split) as writer:
            ids = [places, Jagged(np.repeat(places, lengths), lengths)]
            writer.write(places % 2, places[:, None] / 2, ids)
        weights = (places / 4).astype(layout.WEIGHT_DTYPE)
        weights.tofile(directory / split / layout.WEIGHT_FILE)
    spec.save()
    layout.write_dataset_manifest(directory, {"train": rows, "test": rows}, [rows] * 2, {})
    assert bags.num_starts(rows) == 2
    return directory


def rows_of(directory):
    """Checks the columns of a part's splits; returns their row numbers."""
    found = []
    for dataset in open_datasets(DataConfig(dataset=str(directory)))[:2]:
        batch = dataset.batch(0)
        lengths = batch.lengths.numpy()
        ends = np.cumsum(lengths.sum(1))
        rows = batch.categorical.numpy()[ends - lengths.sum(1)]
        np.testing.assert_array_equal(lengths[:, 1], rows % 3)
        np.testing.assert_array_equal(batch.categorical, np.repeat(rows, 1 + rows % 3))
        np.testing.assert_array_equal(batch.numerical[:, 0], rows / 2)
        np.testing.assert_array_equal(batch.labels, rows % 2)
        np.testing.assert_array_equal(batch.weights, rows / 4)
        found.append(rows)
    return found


def test_each_row_is_judged_in_one_fold(numbered, tmp_path):
    judged = []
    for fold in range(3):
        path = tmp_path / str(fold)
        write_part(numbered, FoldPart(fold, 3, 0.5, "random", 1.0, 7), path)
        train, test = rows_of(path)
        np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(1000))
        assert (np.diff(train) > 0).all()
        judged.append(test)
    np.testing.assert_array_equal(np.sort(np.concatenate(judged)), np.arange(1000))
    assert [len(one) for one in judged] == [334, 333, 333]


def test_rungs_fit_more_and_more_rows_and_judge_by_the_same(numbered, tmp_path):
    parts = []
    for share in (0.3, 1.0):
        write_part(numbered, FoldPart(0, 1, 0.2, "random", share, 7), tmp_path / str(share))
        parts.append(rows_of(tmp_path / str(share)))
    (few, judged), (many, again) = parts
    np.testing.assert_array_equal(judged, again)
    assert len(judged) == 200
    assert len(many) == 800
    assert set(few) < set(many)
    assert 190 < len(few) < 290
    write_part(numbered, FoldPart(0, 1, 0.2, "last", 1.0, 7), tmp_path / "last")
    train, test = rows_of(tmp_path / "last")
    np.testing.assert_array_equal(train, np.arange(800))
    np.testing.assert_array_equal(test, np.arange(800, 1000))


@pytest.mark.slow
def test_without_a_space_the_default_one_is_searched(dataset, tmp_path):
    words = [f"--dataset={dataset}", f"--output={tmp_path / 'out'}", "--processes=1"]
    assert main([*words, "--trials=2", "--rungs=1"]) == 0
    facts = json.loads((tmp_path / "out/tuning.json").read_text())
    first, second = sorted(facts["trials"], key=lambda one: one["trial"])
    assert first["settings"] == {}  # the recipe's
    flags = (tmp_path / "out/best.flags").read_text().splitlines()
    fixed = {"--wide", "--numerical_embedding=piecewise", "--schedule=linear", "--warmup=0.05"}
    assert fixed < set(flags)
    assert {"embedding_l2", "dropout", "lr", "batch_size", "epochs"} < set(second["settings"])
