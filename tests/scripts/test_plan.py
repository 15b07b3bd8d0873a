"""`dlrm.scripts.plan` predicts the memory that a training takes."""

import os

import forked
import pytest
import yaml
from small_dataset import MODEL, RUN, TABLE_SIZES, write_dataset
from test_dist_main import Ranks, last_metrics

pytestmark = pytest.mark.long
PLAN, MAIN = "dlrm.scripts.plan", "dlrm.scripts.main"
TRAIN = ["--mode=train", "--base_device=cpu", "--dataset=data", *MODEL, *RUN]
SIZES = "--synthetic_dataset_table_sizes=" + ",".join(map(str, [6000, *[400] * 10]))


def planned(*flags, code=0, **options):
    done = forked.run(PLAN, *flags, **options)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_a_plan_is_printed_and_written(tmp_path):
    said = planned(SIZES, "--ranks=4", "--memory_gb=2", "--output=plan.yaml", cwd=tmp_path)
    assert "11 tables of 10,000 rows x 128:" in said
    assert "bound by" in said
    assert "fits in 2.00 GB a rank" in said
    assert said.startswith("machine: ")
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert [table["rows"] for table in written["tables"]] == [6000, *[400] * 10]
    assert len(written["tables"][0]["pieces"]) == 4
    again = planned(SIZES, "--ranks=4", "--memory_gb=2", "--placement=plan.yaml", cwd=tmp_path)
    assert again.splitlines() == said.splitlines()[:-1]


def test_without_a_gpu_the_machine_is_assumed_to_be_a_cpu(tmp_path):
    said = planned(SIZES, cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    first, *others = said.splitlines()
    assert first == "machine: cpu is assumed; --machine chooses another: a100, h100"
    assert planned(SIZES, "--machine=cpu", cwd=tmp_path).splitlines() == others


def test_what_does_not_fit_has_an_exit_code_and_what_would(tmp_path):
    flags = ("--memory_gb=0.1", "--machine=cpu", "--output=plan.yaml")
    done = forked.run(PLAN, SIZES, *flags, cwd=tmp_path)
    assert done.returncode == 3
    assert "does not fit: the fullest rank lacks" in done.stdout
    assert done.stderr.startswith("plan.yaml: not written, since the plan does not fit in --mem")
    assert not (tmp_path / "plan.yaml").exists()
    sizes = "--synthetic_dataset_table_sizes=40000000"
    said = planned(sizes, "--memory_gb=12", "--machine=h100", code=3, cwd=tmp_path)
    assert "--ranks 2" in said


@pytest.mark.parametrize(
    ("flags", "column", "expected"),  # 67 million weights, 40 million rows of 16 values
    [
        ((), "dense", "0.54"),  # weights and gradients
        (("--mlp_optimizer=adam",), "dense", "1.08"),
        (("--mlp_optimizer=adam", "--ema_decay=0.9"), "dense", "1.35"),
        (("--freeze_mlps",), "dense", "0.27"),
        (("--ensemble=4000",), "dense", "0.80"),  # and 33 million of the heads
        ((), "weights", "2.56"),
        (("--wide",), "weights", "2.72"),
        (("--embedding_dtype=bf16",), "weights", "2.56"),
        (("--embedding_l2=0.1",), "state", "0.16"),
        (("--embedding_optimizer=adam",), "state", "5.12"),
        (("--embedding_optimizer=adam", "--freeze_embeddings"), "state", "0.00"),
    ],
    ids=str,
)
def test_flags_change_the_memory_that_they_cost(tmp_path, flags, column, expected):
    shape = ("--synthetic_dataset_table_sizes=40000000,9", "--embedding_dim=16")
    shape += ("--bottom_mlp_sizes=16", "--top_mlp_sizes=8192,8192,1", "--batch_size=64")
    lines = planned(*shape, *flags, "--machine=cpu", cwd=tmp_path).splitlines()
    assert lines[3].split()[lines[2].split().index(column)] == expected


def test_a_store_makes_a_model_fit_that_lacks_memory(tmp_path):
    flags = ("--synthetic_dataset_table_sizes=4000000,9000", "--embedding_dim=16")
    flags += ("--bottom_mlp_sizes=16", "--top_mlp_sizes=1", "--batch_size=512", "--machine=cpu")
    said = planned(*flags, "--memory_gb=0.5", code=3, cwd=tmp_path)
    changes = said.rsplit("what would: ", 1)[1].strip().split("; ")
    memory = changes[-1].split()[1]
    assert changes[-1] == f"--table_memory {memory} --table_store DIR"
    said = planned(*flags, "--memory_gb=0.5", f"--table_memory={memory}", cwd=tmp_path)
    assert "fits in 0.50 GB" in said
    assert "of 4,009,000 rows in memory, 0.32 GB on disk" in said  # records of 64 and 16 bytes
    least = said.split("need --table_memory ")[1].split()[0]
    planned(*flags, f"--table_memory={least}", cwd=tmp_path)
    done = forked.run(PLAN, *flags, "--table_memory=17MB", cwd=tmp_path)
    assert "a batch of 512 samples may need 1,024; expected at least" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--placement=plan.yaml", "--ranks=3"), "ranks: expected the number of processes, 3, got"),
        (
            ("--placement=plan.yaml", "--ranks=2", "--embedding_dim=64", "--bottom_mlp_sizes=64"),
            "64",
        ),
        (("--batch_norm", "--ranks=2"), "--batch_norm: expected one process, got 2"),
        (("--placement=nvida",), "--placement nvida: expected auto, balanced, nvidia or a file"),
        (("--memory_gb=0",), "--memory_gb 0.0: expected a number above 0"),
        (("--mean_ids=1,2",), "--mean_ids 1.0,2.0: expected one number of 0 or more, or one for"),
        (("--output=plan.yaml",), "plan.yaml: exists; --overwrite replaces it"),
        (("--dataset=nowhere",), "nowhere"),
        (
            ("--table_memory=8GB", "--machine=h100"),
            "--table_memory 8GB needs --machine cpu, got h100: rows are",
        ),
        (("--table_memory=eight",), "--table_memory eight: expected a size such as 8GB or 512MiB"),
        (
            ("--table_memory=8GB", "--machine=cpu", "--placement=plan.yaml", "--ranks=2"),
            "--table_memory 8GB: expected whole tables, but --placement plan.yaml divides or",
        ),
    ],
    ids=str,
)
def test_mistakes_are_one_line(tmp_path, flags, message):
    planned(SIZES, "--ranks=2", "--output=plan.yaml", cwd=tmp_path)
    done = forked.run(PLAN, SIZES, *flags, cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def by_hand(folder):
    """Writes a plan of columns, rows, a copy, and hot rows."""
    pieces = [
        [{"rank": 0, "columns": [0, 2]}, {"rank": 1, "columns": [2, 4]}],
        [{"rank": 0, "rows": [0, 90]}, {"rank": 1, "rows": [90, 200]}],
        [{"rank": "all"}],
        [{"rank": "all", "rows": [0, 10]}, {"rank": 1, "rows": [10, 130]}],
    ]
    tables = [
        {"name": f"t{i}", "rows": rows, "pieces": own}
        for i, (rows, own) in enumerate(zip(TABLE_SIZES, pieces, strict=True))
    ]
    text = yaml.safe_dump({"ranks": 2, "embedding_dim": 4, "tables": tables})
    (folder / "plan.yaml").write_text(text)


def test_a_training_of_a_plan_is_that_of_one_process_and_goes_on_elsewhere(tmp_path):
    write_dataset(tmp_path / "data")
    by_hand(tmp_path)
    one = forked.succeed(MAIN, *TRAIN, "--epochs=2", "--save_checkpoint_path=one", cwd=tmp_path)
    expected = last_metrics(one.stdout)
    steps = ["--save_checkpoint_path=run", "--resume"]
    for placement, length in (("plan.yaml", 8), ("auto", 14), ("nvidia", 20)):
        flags = [f"--placement={placement}", f"--max_steps={length}", "--epochs=2"]
        job = Ranks(tmp_path, MAIN, *TRAIN, *steps, *flags)
        assert job.wait() == 0, job.output()
    done = forked.succeed(MAIN, *TRAIN, *steps, "--epochs=2", cwd=tmp_path)
    found = last_metrics(done.stdout)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-3), name
