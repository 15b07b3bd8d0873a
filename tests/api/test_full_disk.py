"""A disk on which no more can be written, as a limit of the size of files has it."""

import errno
import json
import resource

import forked
import numpy as np
import pyarrow as pa

import dlrm


def fit(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
    rows = np.arange(20_000)
    table = pa.table({"y": rows % 2, "x": (rows % 3) * 0.5})  # few bytes as Parquet
    try:
        dlrm.fit(table, label="y", verbose=False)
    except OSError as error:
        path.write_text(json.dumps([error.errno, error.filename]))


def test_fit_raises_an_oserror_with_the_path(tmp_path):
    process = forked.CONTEXT.Process(target=fit, args=(tmp_path / "error",))
    process.start()
    process.join()
    number, name = json.loads((tmp_path / "error").read_text())
    assert number == errno.EFBIG
    assert "dataset" in name
