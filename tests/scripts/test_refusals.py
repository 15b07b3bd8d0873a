"""Bad input of every kind ends a command with one line that begins with `error:`."""

import gzip
import os

import forked
import numpy as np
import pytest

MAIN, PREPARE, PREDICT = (f"dlrm.scripts.{name}" for name in ("main", "prepare", "predict"))
SYNTHETIC = "dlrm.scripts.prepare_synthetic_dataset"
TEXT, LOGS = "dlrm.language.prepare_text", "dlrm.preproc.logs.prepare_logs"
SIMULATE = "dlrm.scripts.simulate_logs"
LIMIT = 60  # seconds


def refused(module, *arguments, code=1, **options):
    """Runs a command that must fail; returns its only line on stderr."""
    if options or module in (MAIN, TEXT):
        done = forked.run(module, *arguments, timeout=LIMIT, **options)
    else:
        done = forked.call(module, *arguments)
    lines = done.stderr.splitlines()
    assert done.returncode == code, done
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def test_a_file_of_flags_that_is_binary_is_named(tmp_path):
    (tmp_path / "flags").write_bytes(b"--seed=1\n\xff\xfe\x00")
    assert "--flagfile: expected text" in refused(MAIN, f"--flagfile={tmp_path / 'flags'}")


def test_a_new_line_in_a_name_does_not_split_the_message(tmp_path):
    line = prepared(f"{tmp_path}/a\nerror: b", tmp_path / "out")
    assert "a\\nerror: b" in line


def prepared(path, output):
    (schema := output.with_name("s.yaml")).write_text("{label: y, numerical: [x]}")
    given = [f"--schema={schema}", f"--input={path}", f"--output={output}"]
    return refused(PREPARE, *given, "--cores=1")


def test_a_remedy_is_one_that_the_command_has(tmp_path):
    for label, got in (("", "an empty cell"), ("yes", "'yes'")):
        (tmp_path / "rows.csv").write_text(f"y,x\n1,2\n{label},3\n")
        line = prepared(tmp_path / "rows.csv", tmp_path / f"out {label}")
        assert "(label: {positive: VALUE} in the schema names one that counts as 1), got" in line
        assert f"got {got}; --bad_lines quarantine" in line
    (tmp_path / "logs" / "binary_dataset").mkdir(parents=True)
    line = refused(MAIN, f"--dataset={tmp_path / 'logs'}")
    assert line.endswith(f"; the dataset is {tmp_path / 'logs' / 'binary_dataset'}")


def test_a_line_without_an_end_is_not_read_whole(tmp_path):
    with open(tmp_path / "rows.csv", "wb") as file:
        file.write(b"y,x\n1,")
        file.truncate(1 << 30)
    line = prepared(tmp_path / "rows.csv", tmp_path / "out")
    assert "rows.csv, line 2: longer than" in line


def test_prepare_text_waits_for_no_fifo_and_reads_no_endless_line(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "long").write_bytes(b"short\n" + b"word " * 2_500_000)
    (tmp_path / "vocab").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    flags = [f"--vocab_file={tmp_path / 'vocab'}", f"--output={tmp_path / 'out'}"]
    assert "fifo: expected a regular" in refused(TEXT, f"--source={tmp_path / 'fifo'}", *flags)
    assert "long: line 2: longer than" in refused(TEXT, f"--source={tmp_path / 'long'}", *flags)


def test_a_day_that_is_there_twice_is_refused(tmp_path):
    for name in ("day_0", "day_1"):
        (tmp_path / name).write_text("1\t1\tab\n" * 10)
    (tmp_path / "day_0.gz").write_bytes(gzip.compress(b"0\t1\tab\n" * 10))
    line = refused(
        *(LOGS, "--engine=local", f"--input_folder={tmp_path}", f"--output_folder={tmp_path}/out"),
        *("--num_numerical=1", "--num_categorical=1"),
    )
    assert "day_0.gz: expected one of the two, got day_0 too" in line


def parquet(path, columns, names):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table(columns, names=names), path)


def test_a_damaged_page_of_parquet_names_the_file(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet(path, [[0, 1] * 5000, np.random.default_rng(0).random(10_000)], ["y", "x"])
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56  # the header of the first page
    path.write_bytes(content)
    line = prepared(path, tmp_path / "out")
    assert "rows.parquet: row group 0: damaged" in line


def hdf5(path, rows=4, **replaced):
    h5py = pytest.importorskip("h5py")
    arrays = {
        "input_ids": np.ones((rows, 8), "i4"),
        "input_mask": np.ones((rows, 8), "i4"),
        "segment_ids": np.zeros((rows, 8), "i4"),
        "masked_lm_positions": np.zeros((rows, 2), "i4"),
        "masked_lm_ids": np.zeros((rows, 2), "i4"),
        "next_sentence_labels": np.zeros(rows, "i4"),
    }
    with h5py.File(path, "w") as file:
        for name, value in (arrays | replaced).items():
            if isinstance(value, tuple):
                file.create_dataset(name, value, "i4", chunks=(1024, *value[1:]))
            else:
                file[name] = value(h5py) if callable(value) else value
    return path


LARGE = 4_000_000_000
HDF5 = {
    "an external link": ({"input_ids": lambda h5py: h5py.ExternalLink("x", "/y")}, "ExternalLink"),
    "a soft link": ({"input_ids": lambda h5py: h5py.SoftLink("/input_mask")}, "SoftLink"),
    "rows that are not there": (
        {
            **dict.fromkeys(("input_ids", "input_mask", "segment_ids"), (LARGE, 8)),
            **dict.fromkeys(("masked_lm_positions", "masked_lm_ids"), (LARGE, 2)),
            "next_sentence_labels": (LARGE,),
        },
        "got 4000000000 rows",
    ),
    "a label of no class": ({"next_sentence_labels": np.full(4, 5, "i4")}, "label of 0 or 1"),
}


@pytest.mark.parametrize("what", HDF5)
def test_hdf5_that_cannot_be_used_is_named(tmp_path, what):
    from dlrm.language.pretraining import PretrainingDataset

    replaced, message = HDF5[what]
    hdf5(tmp_path / "rows.hdf5", **replaced)
    with pytest.raises(ValueError, match=rf"rows\.hdf5: .*{message}"):
        PretrainingDataset(tmp_path / "rows.hdf5")


def test_a_learning_rate_beyond_float32_is_refused():
    line = refused(MAIN, "--dataset_type=synthetic_random", "--lr=1e300")
    assert "--lr=1e300: 1e+300 is not number <= 3e+38" in line


FEATURES = "99999999999: expected 0 to 65536"
RANDOM = ("--dataset_type=synthetic_random", "--max_steps=1", "--synthetic_dataset_table_sizes=9")


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        (MAIN, (*RANDOM, "--synthetic_dataset_hotness=1000000000"), "GB of memory"),
        (MAIN, (*RANDOM, "--synthetic_dataset_numerical_features=99999999999"), FEATURES),
        (SYNTHETIC, ("--synthetic_dataset_num_entries=100000000000000",), "GB on the disk"),
        (LOGS, ("--engine=local", "--num_numerical=99999999999"), FEATURES),
        (SIMULATE, ("--rows=100000000000000",), "GB on the disk"),
    ],
)
def test_a_claim_beyond_the_machine_is_refused_before_anything_begins(
    tmp_path, module, flags, message
):
    for name in ("day_0", "day_1"):
        (tmp_path / name).write_text("1\t1\tab\n")
    where = {
        SYNTHETIC: [f"--synthetic_dataset_dir={tmp_path / 'out'}"],
        LOGS: [f"--input_folder={tmp_path}", f"--output_folder={tmp_path / 'out'}"],
        SIMULATE: [f"--output={tmp_path / 'out'}"],
    }
    assert message in refused(module, *where.get(module, []), *flags, cwd=tmp_path)
    assert not (tmp_path / "out").exists()


def test_too_many_cores_leave_nothing_behind(tmp_path):
    (tmp_path / "day_0").write_text("1\t1\tab\n")
    (tmp_path / "day_1").write_text("1\t1\tab\n")
    (tmp_path / "t.csv").write_text("bought,shop\n1,2\n0,3\n")
    (tmp_path / "s.yaml").write_text("label: bought\ncategorical: [shop]\n")
    table = (f"--input={tmp_path / 't.csv'}", f"--schema={tmp_path / 's.yaml'}")
    for words in (
        (LOGS, f"--input_folder={tmp_path}", f"--output_folder={tmp_path / 'out'}"),
        ("dlrm.scripts.prepare", *table, f"--output={tmp_path / 'out'}"),
    ):
        assert "--cores 100000: expected 1 to" in refused(*words, "--cores=100000")
        assert not list(tmp_path.glob("*out*"))


def test_a_directory_that_another_may_have_made_is_not_used(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "shared" / "data").symlink_to(tmp_path / "elsewhere")
    line = refused(
        *(SYNTHETIC, f"--synthetic_dataset_dir={tmp_path}/shared/data"),
        *("--synthetic_dataset_num_entries=10", "--synthetic_dataset_table_sizes=9"),
    )
    assert "shared/data: another user may have made it" in line
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_dataset_whose_labels_are_all_the_same_says_so(tmp_path):
    rows = "".join(f"0,{number}\n" for number in range(50))
    (tmp_path / "rows.csv").write_text("y,x\n" + rows)
    (tmp_path / "s.yaml").write_text("{label: y, numerical: [x]}")
    flags = [f"--schema={tmp_path}/s.yaml", f"--input={tmp_path}/rows.csv"]
    done = forked.call(PREPARE, *flags, f"--output={tmp_path}/out", "--cores=1", code=0)
    assert "labels are 0, so no AUC can be computed" in done.stdout
