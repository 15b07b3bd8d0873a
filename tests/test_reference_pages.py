"""The reference pages match the code: generated ones exactly, others by a run."""

import json
import re
import subprocess
import sys

from dlrm.metrics.table import TESTED


def test_flags_and_python_api_are_up_to_date(root):
    command = [sys.executable, root / "docs" / "generate.py", "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def documented(root):
    """Returns patterns for the names on the page of log keys."""
    text = (root / "docs" / "reference" / "log.md").read_text()
    names = re.findall(r"`([^`]+)`", "".join(re.findall(r"(?m)^\| (.*?) \|", text)))
    kinds = {"<metric>": f"({'|'.join(TESTED)})", "<part>": r"\w+"}
    for kind, pattern in kinds.items():
        names = [name.replace(kind, pattern) for name in names]
    return [re.compile(name) for name in names]


def test_every_name_in_a_log_is_documented(root, trained):
    lines = (trained.checkpoint.parent / "log.json").read_text().splitlines()
    entries = [json.loads(line.removeprefix("DLLL ")) for line in lines]
    names = {name for entry in entries for name in entry}
    names |= {name for e in entries if isinstance(e.get("step"), list) for name in e["data"]}
    assert len(names) > 12
    patterns = documented(root)
    assert not [n for n in sorted(names) if not any(p.fullmatch(n) for p in patterns)]


def test_every_file_of_a_dataset_and_a_run_is_documented(root, trained):
    text = (root / "docs" / "reference" / "files.md").read_text()
    names = re.findall(r"`([^`\n]+)`", text)
    named = [re.sub(r"<\w+>", lambda _: r"\w+", name) for name in names]
    folders = (trained.dataset, *trained.checkpoint.glob("step-*"))
    found = {
        path.relative_to(folder).as_posix()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and "transform" not in path.parts
    }
    assert len(found) > 8
    assert not [n for n in sorted(found) if not any(re.search(f"(^|/){p}$", n) for p in named)]
