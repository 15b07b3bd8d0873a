"""`benchmarks/reproduce.py` runs a protocol's steps, here on a few invented rows."""

import hashlib
import math
import os
import re
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow.csv import read_csv
from sklearn.metrics import log_loss, roc_auc_score

import dlrm

ROWS = {"train.csv": 600, "valid.csv": 200, "test.csv": 200}


@pytest.fixture(scope="module")
def reproduce(root):
    sys.path.insert(0, str(root / "benchmarks"))
    import reproduce

    yield reproduce
    sys.path.remove(str(root / "benchmarks"))


def write_files(folder, protocol):
    """Writes rows whose last column decides most labels; returns those of test.csv."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for name, count in ROWS.items():
        lines = [protocol.columns]
        for _ in range(count):
            last = int(random.integers(0, 6))
            label = int(random.random() < (0.1, 0.9)[last % 2])
            numbers = [str(random.integers(-2, 500)) for _ in protocol.numbers]
            others = [str(random.integers(0, 8)) for _ in protocol.categories[1:]]
            lines.append([str(label), *numbers, *others, str(last)])
        (folder / name).write_text("\n".join(map(",".join, lines)) + "\n")
    return lines[1:]


def test_numbers_become_the_categories_of_the_protocol(reproduce, tmp_path):
    numbers = [-2, 0, 1, 2, 3, 4, 7, 8, 100, 3_000_000]
    expected = [math.floor(math.log(x) ** 2) if x > 2 else x for x in numbers]
    assert expected == [-2, 0, 1, 2, 1, 1, 3, 4, 21, 222]
    assert reproduce.bucket(np.array(numbers)).tolist() == expected
    protocol = reproduce.PROTOCOLS["criteo_x4"]
    source = tmp_path / "train.csv"
    row = ["1", "", "100", *["5"] * 11, "00ff", *[""] * 25]
    source.write_text("\n".join([",".join(protocol.columns), ",".join(row)]) + "\n")
    (path,) = reproduce.converted(protocol, [source], tmp_path / "rows")
    (found,) = pq.read_table(path).to_pylist()
    expected = {"Label": 1, "I1": 0, "I2": 21, "I3": 2, "C1": "00ff", "C2": None}
    assert {name: found[name] for name in expected} == expected
    source.write_text(
        "\n".join([",".join(protocol.columns), ",".join(["1", "x", *row[2:]])]) + "\n"
    )
    with pytest.raises(ValueError, match=r"train.csv: In CSV column #1: Row #2.*invalid value 'x'"):
        reproduce.converted(protocol, [source], tmp_path / "others")
    assert not (tmp_path / "others").exists()


def test_other_files_and_columns_are_refused(reproduce, tmp_path):
    protocol = reproduce.PROTOCOLS["movielens_x1"]
    write_files(tmp_path / "data", protocol)
    first = tmp_path / "data" / "train.csv"
    found = hashlib.md5(first.read_bytes()).hexdigest()
    expected = f"{first}: expected the md5 sum efc8bceeaa0e895d566470fc99f3f271 of Movielens"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}.*, got {found}; --other_files"):
        reproduce.check_files(protocol, tmp_path / "data", False)
    assert reproduce.check_files(protocol, tmp_path / "data", True)["train.csv"] == found
    first.write_text("label,user,item,tag\n0,1,2,3\n")
    with pytest.raises(ValueError, match=r"expected the columns label,user_id,item_id,tag_id, got"):
        reproduce.check_files(protocol, tmp_path / "data", True)
    first.unlink()
    with pytest.raises(FileNotFoundError, match="train.csv"):
        reproduce.check_files(protocol, tmp_path / "data", True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["criteo_x4", "movielens_x1"])
def test_a_protocol_from_files_to_table(reproduce, root, tmp_path, name):
    protocol = reproduce.PROTOCOLS[name]
    rows = write_files(tmp_path / "data", protocol)
    words = [name, f"--data={tmp_path / 'data'}", f"--output={tmp_path / 'out'}"]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))

    def run(*others):
        return subprocess.run(
            [sys.executable, str(root / "benchmarks" / "reproduce.py"), *words, *others],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )

    done = run()
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()
    small = ("--batch_size=100", "--top_mlp_sizes=32,1", "--base_device=cpu", "--epochs=3")
    done = run("--other_files", *small)
    assert done.returncode == 0, done.stderr
    (ours,) = (line for line in done.stdout.splitlines() if line.startswith("dlrm  "))
    model = dlrm.load(tmp_path / "out" / "run")
    if protocol.numbers:
        table = pq.read_table(tmp_path / "out" / "rows" / "test.parquet")
    else:
        table = read_csv(tmp_path / "data" / "test.csv")
    chances = model.predict(table)
    labels = [int(row[0]) for row in rows]
    expected = [f"{roc_auc_score(labels, chances):.4f}", f"{log_loss(labels, chances):.4f}"]
    assert ours.split()[-2:] == expected
    assert float(expected[0]) > 0.6
    assert "published figures, so they do not compare" in done.stdout
    done = run("--other_files", *small, "--lr=0.1")
    assert f"--output {tmp_path / 'out'}: has a run of other files or flags" in done.stderr
