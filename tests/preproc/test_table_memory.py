"""Preparing wide tables of many values needs memory for some parts, and --memory."""

import resource
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm.data.schema.schema import CategoricalField, Label, NumericalField, Schema

ROWS = 400_000


@pytest.mark.slow
def test_a_long_row_group_is_prepared_in_640_mib(tmp_path):
    """One row group is one part, whose rows are kept as they are packed."""
    random = np.random.default_rng(0)
    numbers = {f"n{i}": random.lognormal(1, 1, ROWS).astype(np.float32) for i in range(13)}
    values = [f"value {i}" for i in range(30_000)]
    texts = {
        f"c{i}": pa.DictionaryArray.from_arrays(
            np.minimum(random.zipf(1.2, ROWS), 30_000).astype(np.int32) - 1, values
        ).cast(pa.string())
        for i in range(26)
    }
    table = pa.table({"y": (random.random(ROWS) < 0.2).astype(np.int8), **numbers, **texts})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=ROWS)
    fields = [NumericalField(name, "log") for name in numbers]
    ids = [CategoricalField(name, frequency_limit=15) for name in texts]
    Schema(Label("y"), tuple(fields), tuple(ids)).save(tmp_path / "schema.yaml")
    command = [sys.executable, "-m", "dlrm.scripts.prepare", "--engine=local", "--cores=2"]
    command += ["--schema=schema.yaml", "--input=rows.parquet", "--output=dataset", "--noreport"]
    command.append("--memory=128MB")

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (640 << 20, 640 << 20))

    done = subprocess.run(
        command, preexec_fn=limit, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "dataset" / "manifest.json").exists()
