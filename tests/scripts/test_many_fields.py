"""Datasets of more fields than files that a process may open."""

import os
import resource
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from dlrm.data import layout
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.writer import SplitWriter
from dlrm.documents import one_line


@contextmanager
def few_more_files(count):
    """Lets this process open that many more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1 + count
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_dataset_of_400_fields_needs_few_open_files(tmp_path):
    ids = np.random.default_rng(0).integers(0, 3, (400, 20), np.int8)
    labels, numerical = np.arange(20) % 2, np.zeros((20, 1))
    spec = FeatureSpec.default(tmp_path, 1, [3] * 400)
    with few_more_files(100):
        for split in spec.splits:
            with SplitWriter(spec, split) as writer:
                for rows in (slice(0, 13), slice(13, 20)):
                    writer.write(labels[rows], numerical[rows], list(ids[:, rows]))
        spec.save()
        layout.write_dataset_manifest(tmp_path, {"train": 20, "test": 20}, [3] * 400, {})
        config = DataConfig(dataset=str(tmp_path), batch_size=8, test_batch_size=20)
        datasets = open_datasets(config)
        np.testing.assert_array_equal(datasets.test.batch(0).categorical, ids.T)
        np.testing.assert_array_equal(datasets.train.batch(1).categorical, ids[:, 8:16].T)


def test_too_many_open_files_name_the_limit_and_the_remedy(tmp_path):
    (tmp_path / "file").touch()

    def open_all(stack, count):
        for _ in range(count):
            stack.enter_context(open(tmp_path / "file"))  # noqa: SIM115

    with few_more_files(3) as limit, ExitStack() as stack:
        with pytest.raises(OSError, match="Too many open files") as caught:
            open_all(stack, limit)
        found, task = one_line(caught.value), ValueError("a task failed")
        assert one_line(task) == "a task failed"
        task.__cause__ = caught.value
        assert one_line(task).startswith("a task failed: the command needs more than")
    assert f"Too many open files: '{tmp_path / 'file'}': the command needs more than" in found
    assert f" {limit} open files, the limit of this process; ulimit -n {4 * limit} " in found


def test_a_command_may_open_as_many_files_as_the_hard_limit_allows(root):
    program = (
        "import resource\n"
        "from dlrm.flags import ConfigFlags\n"
        "ConfigFlags(()).parse([])\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    options = {"preexec_fn": lambda: limit_files(300, 400), "text": True, "cwd": root}
    assert subprocess.check_output([sys.executable, "-c", program], **options) == "400 400\n"


def limit_files(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
