"""The pipeline: the bytes it writes, the inputs it refuses, and what it leaves behind."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from column_testing import text_column, transform_texts
from nvidia_reader import read_as_nvidia
from preproc_testing import GOOD, binary_files, day_files, reference_dataset, write_days
from table_testing import dictionary_of
from tables_testing import contents

from dlrm.data import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.schema.fields import Cross
from dlrm.data.schema.numbers import Fitted
from dlrm.data.schema.schema import CategoricalField, Label, NumericalField, Schema
from dlrm.data.sources.log_lines import LogFormat
from dlrm.data.tables.files import find_tables
from dlrm.data.transform.transform import Transform
from dlrm.manifest import read_manifest
from dlrm.preproc.errors import TaskError
from dlrm.preproc.logs import pipeline
from dlrm.preproc.logs.options import LogOptions
from dlrm.preproc.logs.raw_log import find_days
from dlrm.preproc.prepare import input_facts
from dlrm.preproc.stage import PreparationRun
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.prepare_tables import prepare_tables
from dlrm.preproc.work_folder import open_work_folder
from dlrm.scripts.simulate_logs.command import Simulation, simulate

SMALL = LogFormat(2, 3)


def prepare(engine, folder, output, restart=False, **options):
    """Runs the whole pipeline; returns the dataset's path."""
    options = LogOptions(**options)
    days = find_days(folder)
    facts = options.facts() | input_facts(days)
    with open_work_folder(output / "binary_dataset", facts, True, restart) as work:
        pipeline.prepare(PreparationRun(engine, work, options, lambda text: None), days)
        work.publish()
    return output / "binary_dataset"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


HAND_MADE = (
    "1\t5\t-1\tAbC\t00000abc\tffffffffffffffff\n"  # either case, leading zeros, 64 bits
    "0\t\t\t\t\t\n"
    "0\n"  # every field cut off
    "1\t\t-2\tabc\tabc\n"  # -2 clamps to 1
    "0\t99999999999\t-77\tabc\t\t1\n",
    "1\t3\n0\t\t4\tabc\tdef\tffffffffffffffff\n1\t0\t0\t1",  # no newline at the end
    "1\t1\t1\tabc\tabc\t1\n0\t2\t2\t1\tdef\t2\n0\t3\t\t\tabc\tffffffffffffffff\n",  # 3 rows: 1 + 2
)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Simulated logs in Criteo's shape, with an odd number of rows in the last day."""
    folder = tmp_path_factory.mktemp("logs") / "raw"
    simulate(Simulation(rows=1403, days=3), folder)
    return folder


@pytest.fixture(scope="module")
def good(local, logs, tmp_path_factory):
    return prepare(local, logs, tmp_path_factory.mktemp("good"), frequency_limit="3")


def test_bytes_equal_the_reference(good, logs):
    expected = reference_dataset(day_files(logs), limit=lambda column: 3)
    assert binary_files(good) == expected
    short = [line for line in (logs / "day_0").read_text().splitlines() if line.count("\t") < 39]
    assert short, "the simulated logs should have lines whose last fields are cut off"
    assert FeatureSpec.load(good).num_rows("test") == 234
    assert FeatureSpec.load(good).num_rows("validation") == 234
    assert [len(labels) for labels, *_ in read_as_nvidia(good).values()] == [935, 234]


def test_without_held_out_rows_all_days_train(local, logs, good, tmp_path):
    dataset = prepare(local, logs, tmp_path, frequency_limit="3", hold_out=False)
    spec = FeatureSpec.load(dataset)
    assert [spec.num_rows(split) for split in ("train", "test")] == [1403, 0]
    sums = [np.fromfile(path / "train/label.bin", np.uint8).sum() for path in (dataset, good)]
    held = [np.fromfile(good / f"{half}/label.bin", np.uint8) for half in ("test", "validation")]
    assert sums[0] == sums[1] + sum(labels.sum() for labels in held)
    dictionaries = [sorted((path / "transform").glob("*.npy")) for path in (dataset, good)]
    assert [p.read_bytes() for p in dictionaries[0]] == [p.read_bytes() for p in dictionaries[1]]


@pytest.mark.parametrize("split_bytes", [1_000_000, 30_011])
def test_splits_change_nothing(local, logs, good, tmp_path, split_bytes, monkeypatch):
    monkeypatch.setattr(local, "cores", split_bytes % 7 + 1)
    dataset = prepare(local, logs, tmp_path, frequency_limit="3", split_bytes=split_bytes)
    assert contents(dataset) == contents(good)


def test_spark_writes_the_same_bytes(spark, logs, good, tmp_path):
    dataset = prepare(spark, logs, tmp_path, frequency_limit="3", split_bytes=50_000)
    assert contents(dataset) == contents(good)


@pytest.mark.parametrize("split_bytes", [1, 40])
def test_odd_lines_equal_the_reference(local, tmp_path, split_bytes):
    days = write_days(tmp_path / "raw", *HAND_MADE)
    options = {"frequency_limit": "2,4:1", "numeric_transform": "nvidia", "seed": 2**64 + 5}
    dataset = prepare(local, days, tmp_path, log_format=SMALL, split_bytes=split_bytes, **options)
    limits = {3: 2, 4: 1, 5: 2}
    expected = reference_dataset(
        day_files(days), 2, 3, limit=limits.__getitem__, nvidia=True, seed=5
    )
    assert binary_files(dataset) == expected


def test_input_order_and_dictionary_days(local, tmp_path):
    days = write_days(tmp_path / "raw", *HAND_MADE)
    options = {"output_ordering": "input", "dictionary_days": (0, 1), "frequency_limit": "0"}
    dataset = prepare(local, days, tmp_path, log_format=SMALL, split_bytes=50, **options)
    expected = reference_dataset(
        day_files(days), 2, 3, limit=lambda column: 0, order="input", fit=(0, 1)
    )
    assert binary_files(dataset) == expected


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (1, 40)])
def test_any_number_of_columns(local, tmp_path, shape):
    columns = dict(zip(("num_numerical", "num_categorical"), shape, strict=True))
    simulate(Simulation(rows=101, days=2, **columns, seed=3), tmp_path / "raw")
    dataset = prepare(local, tmp_path / "raw", tmp_path, log_format=LogFormat(*shape))
    assert binary_files(dataset) == reference_dataset(day_files(tmp_path / "raw"), *shape)


def test_real_rows_equal_the_reference(local, tmp_path, shared_data):
    lines = (shared_data / "criteo_tb" / "tb_500_shared.tsv").read_text().splitlines(keepends=True)
    days = ["".join(lines[i : i + 167]) for i in range(0, 500, 167)]
    folder = write_days(tmp_path / "raw", *days)
    dataset = prepare(local, folder, tmp_path, frequency_limit="4", split_bytes=20_000)
    expected = reference_dataset(day_files(folder), limit=lambda column: 4)
    assert binary_files(dataset) == expected


def test_dataset_describes_itself(good):
    spec = FeatureSpec.load(good)
    manifest = read_manifest(good, layout.KIND, check_crc=True)
    assert manifest["rows"] == {name: spec.num_rows(name) for name in layout.SPLITS}
    assert manifest["rows"] == {"train": 935, "test": 234, "validation": 234}
    assert manifest["cardinalities"] == spec.cardinalities == layout.read_model_size(good)
    assert manifest["transform"]["frequency_limit"] == "3"
    clicks = np.fromfile(good / "train" / "label.bin", bool).sum()
    assert spec.metadata["clicks"]["train"] == clicks


def test_stored_transform_gives_the_bytes_of_the_dataset(good, logs):
    transform = Transform.load(good / "transform")
    rows = [line.split("\t") for line in (logs / "day_2").read_text().splitlines()]
    columns = [text_column(row[i] if i < len(row) else None for row in rows) for i in range(1, 40)]
    result = transform_texts(transform, columns)
    served = {"numerical.bin": result.numerical.tobytes()}
    served |= {layout.categorical_name(i): ids.tobytes() for i, ids in enumerate(result.ids)}
    for name, expected in served.items():
        parts = [good / split / name for split in ("test", "validation")]
        assert b"".join(part.read_bytes() for part in parts) == expected, name


def test_separate_stages_give_the_same_files(engine, good, logs, tmp_path):
    def run(output, **options):
        options = LogOptions(**options, report=False)
        with open_work_folder(tmp_path / output, {}, True, False) as work:
            yield PreparationRun(engine, work, options, lambda text: None)
            work.publish()

    days, models = day_files(logs), tmp_path / "models"
    for one in run("models", frequency_limit="3"):
        pipeline.fit_days(one, days)
    for one in run("train"):
        pipeline.transform_days(one, days[:2], "all", models, True)
    for half, name in (("first", "test"), ("second", "validation")):
        for one in run(name, output_ordering="input"):
            pipeline.transform_days(one, days[2:], half, models, True)
    for name, expected in binary_files(good).items():
        assert (tmp_path / name).read_bytes() == expected, name
    for one in run("other", log_format=LogFormat(2, 3)):
        with pytest.raises(ValueError, match="made for 13 numerical"):
            pipeline.transform_days(one, days, "all", models, True)
        break


BAD_LINES = [
    ("1\t2\t3\t4\t5\t6\t7\n", "day_1, line 5: expected up to 6 fields s"),
    ("1\t2\t3.5\t4\t5\t6\n", r"day_1, line 5, column 2 \(numerical 1\): expe"),
    ("1\t2\t3\t4\txyz\t6\n", r"line 5, column 4 \(categorical 1\): expected .* he"),
]


@pytest.mark.parametrize(("text", "message"), BAD_LINES)
def test_bad_line_is_named_and_no_dataset_is_left(local, tmp_path, text, message):
    days = write_days(tmp_path / "raw", GOOD, GOOD + GOOD + text + GOOD)
    with pytest.raises(TaskError, match=message) as error:
        prepare(local, days, tmp_path / "out", log_format=SMALL, split_bytes=11)
    assert "\n" not in str(error.value)
    assert names(tmp_path / "out") == ["binary_dataset.unfinished"]


def test_bad_last_row_leaves_the_earlier_dataset(engine, tmp_path):
    days = write_days(tmp_path / "raw", GOOD, GOOD)
    earlier = prepare(engine, days, tmp_path / "out", log_format=SMALL)
    before = contents(earlier)
    write_days(days, GOOD, GOOD + GOOD + "1\tx\n")
    message = r"day_1, line 5, column 1"
    with pytest.raises(TaskError, match=message):
        prepare(engine, days, tmp_path / "out", log_format=SMALL)
    assert contents(earlier) == before
    write_days(days, GOOD, GOOD + GOOD)
    prepare(engine, days, tmp_path / "out", log_format=SMALL)
    assert contents(earlier) != before
    assert names(tmp_path / "out") == ["binary_dataset"]


def test_wrong_options_are_named(local, tmp_path):
    days = write_days(tmp_path / "raw", GOOD, GOOD)
    with pytest.raises(ValueError, match="frequency limit '15,2:3': .*, got '2:3'"):
        prepare(local, days, tmp_path, log_format=SMALL, frequency_limit="15,2:3")
    with pytest.raises(ValueError, match="--dictionary_days 0-2"):
        prepare(local, days, tmp_path, log_format=SMALL, dictionary_days=(0, 2))
    with pytest.raises(ValueError, match="--output_ordering day_random"):
        LogOptions(output_ordering="day_random")
    assert not (tmp_path / "binary_dataset").exists()


def test_a_log_read_as_a_table_has_the_same_numbers_and_ids(local, logs, tmp_path):
    """The schema of logs is one of hexadecimal and decimal fields, which any table may have."""
    options = {"output_ordering": "input", "frequency_limit": "3", "hold_out": False}
    (tmp_path / "raw").mkdir()
    lines = (logs / "day_0").read_text().splitlines()
    whole = tmp_path / "raw" / "day_0"  # tables have no short lines
    whole.write_text("".join(f"{line}{chr(9) * (39 - line.count(chr(9)))}\n" for line in lines))
    run = LogOptions(**options)
    with open_work_folder(tmp_path / "log", run.facts(), True, False) as work:
        pipeline.prepare(PreparationRun(local, work, run, lambda text: None), [whole])
        work.publish()
    schema = replace(run.schema, crosses=(Cross(("categorical 0", "categorical 3"), buckets=50),))
    prepare_tables(
        TableOptions(Schema.from_dict(schema.to_dict()), output_ordering="input"),
        {"train": find_tables([whole], "csv")},
        tmp_path / "table",
        lambda folder: nullcontext(local),
        say=lambda line: None,
    )
    found, log = (contents(tmp_path / name / "train", ".bin") for name in ("table", "log"))
    assert len(found.pop("cat_26.bin")) == len(found["label.bin"])
    assert found == log


def test_the_transform_of_a_table_is_none_of_logs(local, tmp_path):
    """Its fields may have the same numbers, and its keys other meanings."""
    numbers = tuple(NumericalField(f"n{i}", "log") for i in range(2))
    schema = Schema(Label("y"), numbers, tuple(CategoricalField(f"c{i}") for i in range(3)))
    texts = [dictionary_of(["a", "b"])] * 3
    Transform(schema, [Fitted()] * 2, texts, ["string"] * 3).save(tmp_path / "table")
    run = PreparationRun(local, None, LogOptions(log_format=SMALL), print)
    with pytest.raises(ValueError, match="table: expected the transform of a log, got that of a t"):
        pipeline.transform_days(run, [], "all", tmp_path / "table", True)
