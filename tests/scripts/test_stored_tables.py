"""The commands with tables larger than memory."""

import forked
import pytest
from small_dataset import write_dataset
from test_dist_main import last_metrics

MAIN = "dlrm.scripts.main"
ROWS = 1_000_000  # of 64 values: 256 MB
FLAGS = [
    *("--dataset=data", "--base_device=cpu", "--embedding_dim=64", "--bottom_mlp_sizes=64"),
    *("--top_mlp_sizes=1", "--batch_size=256", "--embedding_optimizer=sgd", "--max_steps=2"),
]
MEASURED = """
import resource, runpy
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
try:
    runpy.run_module("dlrm.scripts.main", run_name="__main__", alter_sys=True)
finally:
    print("grew by", peak() - before)
"""


@pytest.mark.parametrize("stored", [False, True], ids=["files", "store"])
def test_a_checkpoint_is_tested_within_the_memory_given(stored, tmp_path):
    write_dataset(tmp_path / "data", table_sizes=(ROWS, 30))
    (tmp_path / "measured.py").write_text(MEASURED)
    where = ["--table_memory=40MB", "--table_store=store"]
    forked.succeed(MAIN, *FLAGS, "--save_checkpoint_path=run", *where[: 2 * stored], cwd=tmp_path)
    results, grown = [], []
    where[1] = "--table_store=other"
    for flags in ([], where):
        test = ["--mode=test", "--load_checkpoint_path=run", *flags]
        done = forked.succeed(tmp_path / "measured.py", *FLAGS, *test, cwd=tmp_path)
        results.append(last_metrics(done.stdout))
        grown.append(int(done.stdout.split("grew by ")[1]))
    results = [{k: v for k, v in one.items() if "auc" in k or "loss" in k} for one in results]
    assert results[0] == results[1] != {}
    assert grown[0] > 4 * 64 * ROWS
    assert grown[1] < 40e6 + 100e6


def test_memory_that_a_batch_may_exceed_is_refused_at_the_start(tmp_path):
    write_dataset(tmp_path / "data", table_sizes=(ROWS, 30))
    where = ["--table_memory=18MB", "--table_store=store", "--save_checkpoint_path=run"]
    for batch, said in (
        # 18 MB less buffers and 1/8 byte a row leave 1.1 MB for rows of 273 + 24 bytes.
        (4096, "a batch of 4,000 samples may need 4,030; expected at least 19MB, or --batch_size"),
        (
            2500,
            "a batch of 1,500 samples, beside the training's, may need 4,060; expected at least",
        ),
    ):
        done = forked.run(MAIN, *FLAGS, f"--batch_size={batch}", *where, cwd=tmp_path)
        assert done.returncode == 1
        assert said in done.stderr
        flag, size = done.stderr.split(", or ")[1].split()
        assert not (tmp_path / "store").exists()
    forked.succeed(MAIN, *FLAGS, "--batch_size=2500", f"{flag}={size}", *where, cwd=tmp_path)
