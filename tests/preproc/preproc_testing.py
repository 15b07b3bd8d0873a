"""A reference preprocessing in plain Python, and folders of logs for the pipeline."""

import math
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections import Counter
from contextlib import contextmanager
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
from table_oracle import splitmix64

import dlrm

GOOD = "1\t5\t6\ta\tb\tc\n0\t7\t8\td\te\tf\n"  # two rows of 2 numericals and 3 categoricals


class KilledError(BaseException):
    """Must not be caught, like SIGKILL."""


@contextmanager
def killed_at(place):
    """Kills the process of a block before the renaming that makes a file, given by number or name.

    The markers of finished stages are made so, such as `count.done`.
    """
    rename, seen = Path.replace, count(1)

    def replace(self, target):
        if place in (next(seen), Path(target).name):
            raise KilledError
        return rename(self, target)

    with patch.object(Path, "replace", replace), pytest.raises(KilledError):
        yield


@contextmanager
def small_disk(folder, size):
    """Mounts a file system of a size at a new folder."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def half(value):
    return struct.pack("<e", struct.unpack("<f", struct.pack("<f", value))[0])


def reference_dataset(
    days: list[Path],
    num_numerical: int = 13,
    num_categorical: int = 26,
    *,
    limit=lambda column: 15,
    nvidia=False,
    seed=0,
    order="total_random",
    fit=None,
) -> dict[str, bytes]:
    """Returns all binary files of a dataset: {"train/cat_0.bin": bytes, ...}."""
    N, M = num_numerical, num_categorical
    logs = [[line.split("\t") for line in day.read_text().splitlines()] for day in days]
    logs = [[row + [""] * (1 + N + M - len(row)) for row in log] for log in logs]
    fitted = [row for log in (logs if fit is None else logs[fit[0] : fit[1] + 1]) for row in log]
    ids, sizes = [], []
    for column in range(1 + N, 1 + N + M):
        counts = Counter(int(row[column], 16) for row in fitted if row[column])
        kept = sorted((-n, key) for key, n in counts.items() if n >= limit(column))
        ids.append({key: i for i, (_, key) in enumerate(kept, 1)})
        sizes.append("b" if len(kept) + 1 < 127 else "<h" if len(kept) + 1 < 32767 else "<i")
    train, last = [row for log in logs[:-1] for row in log], logs[-1]
    if order == "total_random":
        train = [train[i] for i in sorted(range(len(train)), key=lambda i: splitmix64(seed, i))]
    middle = len(last) // 2
    files = {}
    for name, rows in {"train": train, "test": last[:middle], "validation": last[middle:]}.items():
        files[f"{name}/label.bin"] = bytes(int(row[0]) for row in rows)
        fields = [x for row in rows for x in row[1 : 1 + N]]
        if nvidia:
            logarithms = [math.log(max(int(x) + 3, 1)) if x else 0 for x in fields]
        else:
            logarithms = [math.log(max(int(x or 0) + 2, 1)) for x in fields]
        if N:
            files[f"{name}/numerical.bin"] = b"".join(map(half, logarithms))
        for i in range(M):
            keys = [int(row[1 + N + i], 16) if row[1 + N + i] else None for row in rows]
            packed = [struct.pack(sizes[i], ids[i].get(key, 0)) for key in keys]
            files[f"{name}/cat_{i}.bin"] = b"".join(packed)
    return files


def write_days(folder, *days):
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(days):
        (folder / f"day_{i}").write_text(text, newline="")
    return folder


def day_files(folder):
    return [folder / f"day_{i}" for i in range(len(list(folder.glob("day_*"))))]


def binary_files(dataset):
    return {p.relative_to(dataset).as_posix(): p.read_bytes() for p in dataset.glob("*/*.bin")}


def node_environment(folder: Path) -> Path:
    """Makes an environment with the packages of this one, but without ours; returns its Python."""
    site = Path(sysconfig.get_path("purelib"))
    inside = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    inside.mkdir(parents=True)
    (folder / "bin").mkdir()
    for entry in site.iterdir():
        if "dlrm" not in entry.name and entry.suffix != ".pth":
            (inside / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    base = Path(sys.base_exec_prefix, "bin", f"python{sysconfig.get_python_version()}")
    python.symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    return python


def package_archive(folder: Path) -> Path:
    """Makes the archive of the package that `spark-submit --py-files` sends."""
    root = Path(dlrm.__file__).parents[1]
    return Path(shutil.make_archive(str(folder / "dlrm"), "zip", root, "dlrm"))


class Page(HTMLParser):
    """Content of a page: its tags, and the cell texts of each table."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.tables = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        assert "src" not in attrs, "nothing from elsewhere"
        assert attrs.get("href", "#").startswith("#"), "nothing from elsewhere"
        assert tag != "th" or attrs["scope"] in ("col", "row", "colgroup")
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"th", "td"} & set(self.open):
            self.tables[-1][-1][-1] += data
