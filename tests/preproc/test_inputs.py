"""Forms of input and output: compressed days, Kaggle's files, NVIDIA's binary rows, bad lines."""

import gzip
import json
import os
import re
import signal
import struct
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
from preproc_testing import GOOD, binary_files, reference_dataset, write_days
from tables_testing import contents

from dlrm.data import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import open_binary
from dlrm.preproc.logs import pipeline, prepare_logs
from dlrm.preproc.stage import Stage
from dlrm.scripts.simulate_logs.command import Simulation, simulate

pytestmark = pytest.mark.long
SMALL = ["--num_numerical=2", "--num_categorical=3", "--frequency_limit=1"]


def run(raw, output, *arguments):
    """Runs the command in this process; returns its status."""
    paths = [f"--input_folder={raw}", f"--output_folder={output}"]
    return prepare_logs.main([*paths, "--engine=local", "--cores=1", *arguments])


def prepared(raw, output, *arguments):
    assert run(raw, output, *arguments) == 0
    assert sorted(path.name for path in output.iterdir()) == ["binary_dataset"]
    return output / "binary_dataset"


def fails(capsys, raw, output, *arguments):
    capsys.readouterr()
    assert run(raw, output, *arguments) == 1
    assert not (output / "binary_dataset").exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs") / "raw"
    simulate(Simulation(rows=907, days=3, num_numerical=2, num_categorical=3), folder)
    return [(folder / f"day_{i}").read_text() for i in range(3)]


def zstd(data):
    return pyarrow.Codec("zstd").compress(data, asbytes=True)


def test_compressed_days_give_the_bytes_of_plain_ones(days, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    halves = (gzip.compress(part.encode()) for part in (days[0][:5000], days[0][5000:]))
    (raw / "day_0.gz").write_bytes(b"".join(halves))
    (raw / "day_1.zst").write_bytes(zstd(days[1].encode()))
    (raw / "day_2").write_text(days[2])
    dataset = prepared(raw, tmp_path / "out", *SMALL)
    plain = write_days(tmp_path / "plain", *days)
    assert contents(dataset) == contents(prepared(plain, tmp_path / "expected", *SMALL))


# Only a checksum reveals a changed .zst, and pyarrow writes none.
PACKED = {
    "cut.gz": lambda day: gzip.compress(day)[:-20],
    "changed.gz": lambda day: (packed := gzip.compress(day))[:300] + b"\0" + packed[301:],
    "cut.zst": lambda day: zstd(day)[:-20],
    "other.zst": bytes,
}


@pytest.mark.parametrize("form", PACKED)
def test_a_damaged_compressed_day_is_named(days, tmp_path, capsys, form):
    raw = write_days(tmp_path / "raw", days[0])
    path = (raw / "day_1").with_suffix(Path(form).suffix)
    path.write_bytes(PACKED[form](days[1].encode()))
    line = fails(capsys, raw, tmp_path / "out", *SMALL)
    assert f"{path}: damaged or cut off after" in line


def test_errors_in_compressed_days_name_the_file_of_the_user(tmp_path, capsys):
    raw = write_days(tmp_path / "raw", GOOD)
    (raw / "day_1.gz").write_bytes(gzip.compress((GOOD + "1\tx\n").encode()))
    line = fails(capsys, raw, tmp_path / "out", *SMALL)
    assert f"{raw / 'day_1.gz'}, line 3, column 1 (numerical 0)" in line


@pytest.mark.parametrize(("rows", "cores"), [(14, 1), (103, 2)])
def test_kaggle_is_cut_into_sevenths(days, tmp_path, rows, cores):
    lines = days[0].splitlines(keepends=True)[:rows]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train.txt").write_text("".join(lines).rstrip("\n"))
    arguments = [*SMALL, "--split_bytes=50", f"--cores={cores}", "--dictionary_days=1-5"]
    dataset = prepared(tmp_path / "raw", tmp_path / "out", *arguments)
    parts = ["".join(part) for part in np.array_split(np.array(lines, object), 7)]
    folder = write_days(tmp_path / "days", *parts)
    paths = [folder / f"day_{i}" for i in range(7)]
    expected = reference_dataset(paths, 2, 3, limit=lambda column: 1, fit=(1, 5))
    assert binary_files(dataset) == expected


def test_kaggle_test_without_labels_is_transformed_too(days, tmp_path):
    """As the same lines with labels, by what is fitted to train.txt."""
    raw = write_days(tmp_path / "raw", days[0], days[1])
    (raw / "day_0").rename(raw / "train.txt")
    labeled = (raw / "day_1").rename(tmp_path / "day")
    unlabeled = [line.partition("\t")[2] or "\t" for line in days[1].splitlines()]
    (raw / "test.txt.gz").write_bytes(gzip.compress("\n".join(unlabeled).encode()))
    dataset, output = prepared(raw, tmp_path / "out", *SMALL), tmp_path / "labeled"
    words = [f"--input_file={labeled}", f"--model_folder={dataset / 'transform'}", *SMALL[:2]]
    command = ["--mode=transform", "--output_ordering=input", "--engine=local", *words]
    assert prepare_logs.main([*command, f"--output_folder={output}"]) == 0
    expected = contents(output, ".bin")
    assert expected.pop("label.bin")
    assert contents(dataset / "unlabeled") == expected


def test_binary_rows_are_those_of_the_split_files(days, tmp_path):
    raw = write_days(tmp_path / "raw", *days)
    arguments = [*SMALL, "--split_bytes=4000"]
    split = prepared(raw, tmp_path / "split", *arguments)
    binary = prepared(raw, tmp_path / "binary", *arguments, "--output_format=binary")
    spec = FeatureSpec.load(split)
    for name in layout.SPLITS:
        data = open_binary(binary, name, 2, 1000)
        batch, rows = data.batch(0), spec.num_rows(name)
        numerical = np.fromfile(split / name / "numerical.bin", np.float16).reshape(rows, 2)
        # Binary rows have the logarithms before rounding to float16.
        assert np.array_equal(batch.numerical.numpy().astype(np.float16), numerical)
        assert not np.array_equal(batch.numerical.numpy(), numerical.astype(np.float32))
        for i in range(3):
            ids = np.fromfile(split / name / f"cat_{i}.bin", spec.dtype(f"cat_{i}.bin"))
            assert np.array_equal(batch.categorical.numpy()[:, i], ids)
        labels = np.fromfile(split / name / "label.bin", bool)
        assert np.array_equal(batch.labels.numpy(), labels)
    assert data.table_sizes == spec.cardinalities
    assert (binary / "model_size.json").read_bytes() == (split / "model_size.json").read_bytes()


def test_a_binary_row_is_what_nvidia_says(tmp_path):
    raw = write_days(tmp_path / "raw", "1\t5\t\tff\tfe\t\n", "0\t-9\t7\tff\tfe\t3\n1\n")
    dataset = prepared(raw, tmp_path / "out", *SMALL, "--output_format=binary", "--no-report")
    f32 = [struct.unpack("<f", struct.pack("<f", np.log(x)))[0] for x in (7, 2)]
    expected = struct.pack("<iffiii", 1, *f32, 1, 1, 0)
    assert (dataset / "train_data.bin").read_bytes() == expected
    assert not list(dataset.glob("report*"))


BAD = ["7\t1\t2\ta\tb\tc", "1\t1\t2\ta\tb\tc\td", "", "1\t1\t2\ta\tzz\tc"]


def test_quarantine_leaves_bad_lines_out_and_says_why(days, tmp_path, capsys):
    lines = [day.splitlines() for day in days]
    lines[0][100:100] = BAD[:2]
    lines[2][7:7] = BAD[2:]
    raw = write_days(tmp_path / "raw", *("\n".join(day) + "\n" for day in lines))
    plain = write_days(tmp_path / "plain", *days)
    arguments = [*SMALL, "--bad_lines=quarantine", "--max_bad_lines=0.01", "--split_bytes=3000"]
    dataset = prepared(raw, tmp_path / "out", *arguments, "--cores=2")
    assert binary_files(dataset) == binary_files(prepared(plain, tmp_path / "expected", *SMALL))
    rows = [
        line.split("\t", 2)
        for name in ("day_0", "day_2")
        for line in (dataset / "quarantine" / f"{name}.tsv").read_text().splitlines()
    ]
    places = [("day_0", 101), ("day_0", 102), ("day_2", 8), ("day_2", 9)]
    assert [(place, text) for place, _, text in rows] == [
        (f"{raw / name}, line {number}", bad)
        for (name, number), bad in zip(places, BAD, strict=True)
    ]
    assert rows[3][1] == "column 4 (categorical 1): expected up to 16 hexadecimal digits, got 'zz'"
    report = json.loads((dataset / "report.json").read_text())
    assert report["rows_quarantined"] == [{"file": f"day {i}", "rows": 2} for i in (0, 2)]
    assert "4 rows" in capsys.readouterr().out
    arguments[-2] = "--max_bad_lines=0.004"
    line = fails(capsys, raw, tmp_path / "other", *arguments)
    assert "4 of 911 rows cannot be read, a share above --max_bad_lines 0.004" in line
    assert f"{raw / 'day_0'}, line 101, column 0 (label)" in line


def test_report_says_what_was_in_the_logs(tmp_path):
    train = [f"{i % 4 == 0:d}\t{i}\t{'' if i % 5 else 7}\t{i % 3:x}\t{i:x}\t1" for i in range(100)]
    last = [f"0\t{-3 if i % 2 else 5}\t1\t{i % 6:x}\t\t1" for i in range(40)]
    raw = write_days(tmp_path / "raw", "\n".join(train), "\n".join(last))
    limits = ["--num_numerical=2", "--num_categorical=3", "--frequency_limit=2"]
    dataset = prepared(raw, tmp_path / "out", *limits, "--dictionary_days=0-0")
    report = json.loads((dataset / "report.json").read_text())
    assert report["sliced_by"] == "day"
    assert report["slices"] == [
        {"slice": "day 0", "rows": 100, "positives": 25, "positive_rate": 0.25},
        {"slice": "day 1", "rows": 40, "positives": 0, "positive_rate": 0.0},
    ]
    assert [s["rows"] for s in report["splits"].values()] == [100, 20, 20]
    assert [s["values_raised_to_1"] for s in report["splits"].values()] == [0, 10, 10]
    assert [f["cardinality"] for f in report["categorical"]] == [4, 1, 2]
    # test_table_report compares quantiles, shares, drift and the page
    text = (dataset / "report.html").read_text()
    assert "140 rows, " in text
    assert "The last day is held out" in text


def test_a_transform_of_other_logs_is_suspected(days, tmp_path, capsys):
    raw = write_days(tmp_path / "raw", *days)
    other = write_days(tmp_path / "other", "1\t1\t1\tdeadbeef\tdeadbeef\tdeadbeef\n")
    dataset = prepared(raw, tmp_path / "out", *SMALL)
    command = ["--mode=transform", f"--input_file={other / 'day_0'}", "--engine=local"]
    command += [f"--model_folder={dataset / 'transform'}", f"--output_folder={tmp_path / 'o'}"]
    assert prepare_logs.main([*command, *SMALL]) == 0
    assert "warning: only 0.0% of the categorical values have an id" in capsys.readouterr().out


def test_nothing_of_a_transform_is_used_once_it_is_fitted_again(
    days, tmp_path, capsys, monkeypatch
):
    raw, models = write_days(tmp_path / "raw", *days), f"--model_folder={tmp_path / 'models'}"

    def fit(limit):
        options = [models, *SMALL[:2], f"--frequency_limit={limit}"]
        assert run(raw, tmp_path / "none", "--mode=generate_models", *options) == 0

    def transform(name, *words):
        return run(raw, tmp_path / name, "--mode=transform", models, *SMALL, *words)

    fit(1)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "transform", lambda *_, **__: 1 / 0)  # once dictionaries are sorted
        with pytest.raises(ZeroDivisionError):
            transform("stopped")
    fit(40)
    assert transform("direct") == 0
    assert transform("stopped") == 1
    assert re.search(r"models/transform.json was of .*--restart discards", capsys.readouterr().err)
    assert transform("stopped", "--restart") == 0
    stopped, direct = (contents(tmp_path / name, ".bin") for name in ("stopped", "direct"))
    assert stopped == direct


def test_sigterm_ends_the_processes(days, tmp_path):
    simulate(Simulation(rows=200_000, days=2), tmp_path / "raw")
    command = [sys.executable, Path(prepare_logs.__file__), "--engine=local", "--cores=2"]
    process = subprocess.Popen(
        [*command, f"--input_folder={tmp_path / 'raw'}", f"--output_folder={tmp_path / 'out'}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(120) == 143
    process.stdout.close()


def test_input_without_any_good_line_and_a_flag_of_another_mode_are_refused(tmp_path, capsys):
    write_days(tmp_path / "raw", "x\n", "y\n\n")
    bad = ["--bad_lines=quarantine", "--max_bad_lines=1"]
    line = fails(capsys, tmp_path / "raw", tmp_path / "out", *SMALL, *bad)
    assert "error: the input has no line that can be read" in line
    line = fails(capsys, tmp_path / "raw", tmp_path / "out", *SMALL, "--days=1")
    assert "error: --days: is for --mode generate_models and transform" in line


@pytest.mark.parametrize("mistake", ["--num_categorical=1", "--dictionary_days=0-9"])
def test_a_mistake_that_nothing_came_of_may_be_corrected(tmp_path, capsys, mistake):
    write_days(tmp_path / "raw", GOOD * 2, GOOD)
    assert run(tmp_path / "raw", tmp_path / "out", *SMALL, mistake) == 1
    prepared(tmp_path / "raw", tmp_path / "out", *SMALL)


def test_on_a_terminal_a_bar_shows_the_share_that_is_read(monkeypatch, capsys):
    now = count()
    monkeypatch.setattr("tqdm.std.time", lambda: next(now))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    stage = Stage("count")
    on_part = stage.progress([SimpleNamespace(size=10_000_000)] * 4)
    on_part(0)
    on_part(2)
    shown = capsys.readouterr().err.split("\r")
    assert [text.partition("|")[0] for text in shown[1:]] == ["count:  25%", "count:  50%"]
