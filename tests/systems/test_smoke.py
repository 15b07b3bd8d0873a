"""Flags that shrink a row of any source, derived from the row's flags alone."""

import pytest

from dlrm.published.jobs import RunOptions, plan_jobs
from dlrm.published.rows import BenchmarkRow, catalog
from dlrm.published.smoke import smoke_flags

pytestmark = pytest.mark.long


def row(*flags: str, command: str = "cnn", processes: int = 1) -> BenchmarkRow:
    return BenchmarkRow("a/row", "000 A1", command, flags, "", "gaudi", processes=processes)


RESNET = ("--mode=train", "--model=resnet50", "--batch_size=256")
BERT = ("--mode=pretrain", "--size=large", "--batch_size=max")


def test_a_command_without_sizes_is_refused():
    with pytest.raises(ValueError, match="a/row: no sizes for predict, only for cnn, bert"):
        smoke_flags(row(command="predict"))


@pytest.mark.parametrize(
    ("splits", "depths"),
    [
        ("", "1,1,1,1"),
        ("b1/2/relu,b2/3/relu,b3/3/relu", "3,4,4,1"),
        ("b3/13/relu,b3/2", "1,1,14,1"),
        ("b0,fc1", "1,1,1,1"),
    ],
)
def test_depths_keep_the_cuts_of_the_pipeline(splits, depths):
    flags = smoke_flags(row(*RESNET, *([f"--pipeline_splits={splits}"] if splits else [])))
    assert f"--depths={depths}" in flags
    assert not any(flag.startswith(("--width", "--pipeline_splits")) for flag in flags)


@pytest.mark.parametrize("flags", [RESNET, BERT])
@pytest.mark.parametrize(("asked", "done"), [(None, 1), (1, 1), (2, 2), (1024, 2)])
@pytest.mark.parametrize(("processes", "replicas"), [(1, 1), (2, 2), (64, 2)])
def test_steps_and_batches_are_few(flags, asked, done, processes, replicas):
    own = () if asked is None else (f"--gradient_accumulation_steps={asked}",)
    command = "bert" if flags is BERT else "cnn"
    found = set(smoke_flags(row(*flags, *own, command=command, processes=processes)))
    assert {"--batch_size=2", "--max_steps=2", "--base_device=cpu"} <= found
    assert {f"--gradient_accumulation_steps={done}", f"--replicas={replicas}"} <= found


@pytest.mark.parametrize("flags", [RESNET, BERT])
def test_graphs_are_not_compiled_and_the_precision_stays(flags):
    command = "bert" if flags is BERT else "cnn"
    eager = smoke_flags(row(*flags, "--amp", command=command))
    graph = smoke_flags(row(*flags, "--execution=graph", "--amp", command=command))
    assert set(graph) - set(eager) == {"--execution=eager"}
    assert not any(flag.startswith(("--amp", "--data")) for flag in graph)


def test_inference_makes_two_passes_of_two_batches():
    flags = ("--mode=benchmark_inference", "--model=resnet50", "--batch_size=64")
    found = smoke_flags(row(*flags))
    assert {"--repeat=2", "--batch_size=2", "--synthetic_dataset_num_entries=4"} <= set(found)
    assert "--batch_size=1" in smoke_flags(row(*flags[:2], "--batch_size=1"))
    assert not any(flag.startswith(("--max_steps", "--replicas")) for flag in found)


def test_every_row_has_a_plan_of_small_batches():
    for row in (row for row in catalog().values() if row.measure == "run"):
        trained = ("--restore_path=run",) if row.given["mode"] == "validate" else ()
        (job,) = plan_jobs(row, RunOptions(smoke=True, emulate=True, threads=1, flags=trained))
        assert trained or job.setting["batch_per_device"] <= (32 if "main" in row.command else 2)
