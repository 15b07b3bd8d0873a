"""The command `dlrm`: its subcommands, their help, and what stands in its way."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm import __version__
from dlrm.scripts.commands import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def python(*words, **options):
    given = {"capture_output": True, "text": True, "env": ENVIRONMENT, **options}
    return subprocess.run([sys.executable, *map(str, words)], check=False, **given)


# Prints name -> [exit code, heavy modules that its help or flags imported] as JSON.
WALK = """
import contextlib, io, json, sys
from dlrm.scripts.commands import main
found = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = main(words)
    heavy = [n for n in ("torch", "numpy", "pandas", "pyarrow", "pyspark") if n in sys.modules]
    found[" ".join(words)] = code, heavy, len(text.getvalue())
print(json.dumps(found))
"""


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_no_help_imports_what_takes_time(word, tmp_path):
    words = [[word], *([name, word] for name in COMMANDS)]
    done = python("-c", WALK, json.dumps(words), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(COMMANDS) + 1 > 25
    for name, (code, heavy, length) in found.items():
        assert (code, heavy) == (0, []), name
        assert length > 10, name


def test_the_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text and c.meaning in text for name, c in COMMANDS.items())


def test_an_unknown_command_is_one_line(capsys):
    for word, advice in {
        "TRIAN": "did you mean train?",
        "help": "did you mean --help?",
        "fly": "dlrm --help lists them",
    }.items():
        assert main([word]) == 2
        assert capsys.readouterr().err == f"error: {word}: no command of dlrm; {advice}\n"


@pytest.mark.parametrize(("name", "mode"), [("train", "train"), ("test", "test")])
def test_train_and_test_are_main_with_other_defaults(name, mode, monkeypatch):
    asked = {}
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("dlrm.scripts.common.click_command.run", asked.update)
    with pytest.raises(SystemExit) as ended:
        main([name, "--batch_size=64"])
    assert not ended.value.code
    assert (asked["mode"], asked["batch_size"], asked["embedding_type"]) == (
        mode,
        64,
        "joint_fused",
    )


def test_train_has_the_defaults_of_dist_main_in_a_process_of_a_launcher(monkeypatch):
    asked = {}
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr("dlrm.scripts.common.click_command.run", asked.update)
    with pytest.raises(SystemExit):
        main(["train"])
    assert (asked["batch_size"], asked["embedding_type"]) == (65536, "joint_sparse")


def test_a_folder_of_the_name_is_no_obstacle(tmp_path):
    (tmp_path / "dlrm").mkdir()
    done = python("-m", "dlrm", "--version", cwd=tmp_path)
    assert done.stdout.startswith(f"dlrm {__version__} (torch ")
    assert done.returncode == 0


def test_a_text_that_nobody_reads_ends_in_silence_and_a_full_disk_in_a_line():
    words = ["train", "--version"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as closed:
        done = python("-m", "dlrm", *words, capture_output=False, stdout=closed, stderr=-1)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
    with open("/dev/full", "w") as full:
        done = python("-m", "dlrm", *words, capture_output=False, stdout=full, stderr=-1)
    assert done.returncode == 1
    assert re.fullmatch(r"error: \[Errno 28] .* 'standard output'\n", done.stderr)


def test_a_terminal_without_a_character_gets_its_code():
    name_output = "from dlrm.command_line import name_standard_output; name_standard_output()"
    code = f"{name_output}; print('0 \u2013 1')"
    done = python("-c", code, env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"})
    assert (done.stdout, done.stderr) == ("0 \\u2013 1\n", "")


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, *_):
        if name.split(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Blocker())
from dlrm.scripts.commands import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("package", "installed", "words"),
    [
        ("pyspark", "pyspark", ["prepare-logs", "--input_folder=.", "--output_folder=out"]),
        ("PIL", "Pillow", ["cnn", "--dataset=.", "--base_device=cpu"]),
        (
            "tokenizers",
            "tokenizers",
            ["prepare-text", "--source=day_0", "--vocab_file=v", "--output=y"],
        ),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(package, installed, words, tmp_path):
    for day in range(2):
        (tmp_path / f"day_{day}").write_text("1" + "\t1" * 13 + "\tab" * 26 + "\n")
    (tmp_path / "v").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    done = python("-c", BLOCKED, package, *words, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert f"No module named '{package}'; pip install '{installed}" in done.stderr
    assert ("--engine local" in done.stderr) is (package == "pyspark")
    assert "dlrm[" not in done.stderr  # another project's name in the package index
    assert len(done.stderr.splitlines()) == 1
