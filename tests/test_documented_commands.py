"""The commands and programs of README and guides run at reduced size, or say why not.

Commands of `dlrm` run by `python -m dlrm`, without an installation.

The blocks of a page run in order in one folder; `places` has the data that the page assumes. A
block after a comment `<!-- not run: why -->` is skipped, and so is one after
`<!-- run by tests/... -->`, which other tests run.
"""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import forked
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from dlrm.scripts.commands import COMMANDS
from dlrm.scripts.simulate_logs.command import Simulation, simulate
from dlrm.train.checkpoints.checkpoint import Checkpoint

ROOT = Path(__file__).parent.parent
FOLDERS = [ROOT / "preproc" / "README.md", ROOT / "triton" / "README.md"]
TUTORIAL = ROOT / "docs" / "tutorial.md"
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [ROOT / "README.md", TUTORIAL, *GUIDES, *FOLDERS]
# The other pages take minutes or run nothing here.
QUICK = ("root", "click-logs", "click-models", "from-nvidia", "from-torchrec", "serving")
MODEL = ["--embedding_dim=4", "--bottom_mlp_sizes=8,4", "--top_mlp_sizes=8,1"]
TRAINING = [
    *("--base_device=cpu", "--batch_size=64", "--test_batch_size=400", "--max_steps=6"),
    *("--synthetic_dataset_table_sizes=50,50", "--synthetic_dataset_num_entries=512"),
    "--print_freq=3",
]
# Flags added to a command: later flags take precedence.
REDUCED = {
    "evaluate": ["--bootstrap=5", "--importance_rows=50"],
    "tune": ["--trials=3", "--rungs=2", "--processes=1"],
    "simulate": ["--rows=1600"],
    "synthetic": ["--synthetic_dataset_num_entries=512"],
}
BENCHMARK = [
    *("--inference_benchmark_steps=2", "--inference_benchmark_runtimes=native"),
    "--inference_benchmark_batch_sizes=1,64",
]
_FENCE = re.compile(r"(?:^<!-- (.+?) -->\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)
_FLAG = re.compile(r"^--(?:no)?([A-Za-z]\w*)")
_LONG = re.compile(r"python3? -m\s+(dlrm\.[\w.]+)|python3?\s+triton/(?:export|server)\.py")
OF_ABSL = {"flagfile", "help", "version", "config"}


class Block(NamedTuple):
    """Holds the language, lines and preceding comment of a fenced block."""

    language: str
    text: str
    note: str

    @property
    def is_run(self) -> bool:
        return not self.note.startswith(("not run: ", "run by tests/"))


def blocks(page: Path) -> list[Block]:
    return [Block(m[2], m[3], m[1] or "") for m in _FENCE.finditer(page.read_text())]


def statements(text: str) -> Iterator[str]:
    """Yields the commands of a shell block, each with its continued lines or here-document."""
    lines = iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        if "<<END" in line:
            document = [line]
            while document[-1] != "END":
                document.append(next(lines))
            yield "\n".join(document) + "\n"
        elif line.strip():
            yield line


def placed(text: str, places: dict[str, Path]) -> str:
    """Replaces the names of data that a page assumes."""
    for name, path in places.items():
        text = re.sub(rf"(?<![\w./-]){re.escape(name)}(?![\w-])", str(path), text)
    return text


def reduced(words: list[str]) -> list[str]:
    """Returns the words of a command, with flags that reduce it."""
    name, _ = command_of(words)
    if name not in ("train", "test", "dlrm.scripts.main"):
        return words + REDUCED.get(name, [])
    if {"test", "inference_benchmark"} & set(words):
        return [*words, "--base_device=cpu", *(BENCHMARK if "inference_benchmark" in words else [])]
    return words + TRAINING + MODEL + (["--seeds=1,2"] if "--seeds" in words else [])


def command_of(words: list[str]) -> tuple[str, list[str]]:
    """Returns the subcommand of `dlrm` or the module that words run, "" for none, and its flags."""
    for i, (one, name) in enumerate(zip(words, [*words[1:], ""], strict=True)):
        if one == "dlrm" and name in COMMANDS:
            return name, words[i + 2 :]
        if one == "-m" and name.startswith("dlrm."):
            return name, words[i + 2 :]
    return "", []


def run(statement: str, folder: Path) -> None:
    """Runs a command as a reader would, at reduced size."""
    if statement.startswith(("python ", "dlrm ")):
        program, *words = reduced(expanded(shlex.split(statement, comments=True), folder))
        if program == "dlrm":
            name, arguments = program, words
        elif words[0] == "-m":
            _, name, *arguments = words
        else:
            name, arguments = ROOT / words[0], words[1:]
        done = forked.run(name, *arguments, cwd=folder, env=environment(), timeout=600)
    else:
        if "torchrun" in statement:
            statement = shlex.join(reduced(shlex.split(statement, comments=True)))
            launcher = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
            statement = statement.replace("torchrun", launcher, 1)
        statement = re.sub(r"\bpreproc/(?=\w+\.sh)", f"{ROOT}/preproc/", statement)
        options = {"capture_output": True, "text": True, "env": environment()}
        command = ["bash", "-ec", statement]
        done = subprocess.run(command, cwd=folder, check=False, **options)
    assert done.returncode == 0, f"{statement}\n{done.stdout[-2000:]}{done.stderr}"


def expanded(words: list[str], folder: Path) -> list[str]:
    """Returns words with patterns replaced by the paths that match, as a shell does."""
    found = [sorted(glob(word, root_dir=folder)) or [word] for word in words]
    return [path for paths in found for path in paths]


@contextmanager
def served(statement: str, folder: Path) -> Iterator[None]:
    """Runs the server of a page, at its usual ports, for the block."""
    command = [sys.executable, "-m", *shlex.split(statement)]
    options = {"cwd": folder, "env": environment()}
    with (
        open(folder / "server.log", "w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, **options) as process,
    ):
        try:
            end = time.monotonic() + 180
            while time.monotonic() < end and process.poll() is None:
                try:
                    urlopen("http://127.0.0.1:8000/v2/health/ready", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
            yield
        finally:
            process.send_signal(signal.SIGTERM)


def name_of(page: Path) -> str:
    """Returns the name of a page: that of its folder, for the README of one."""
    folder = "root" if page.parent == ROOT else page.parent.name
    return folder if page.stem == "README" else page.stem


def environment() -> dict[str, str]:
    """Returns variables; without Spark here, as other tests compare both engines."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    given = {
        "PYTHON": sys.executable,
        "PYTHONPATH": path,
        "ENGINE": "local",
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **given}


def test_git_ignores_what_the_commands_of_the_readme_write():
    rules = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    text = (ROOT / "README.md").read_text()
    written = re.findall(r"--(?:output|save_checkpoint_path|save-dir) ([\w.]+)", text)
    written += re.findall(r'\.save\("(\w+)"\)', text)
    assert len(set(written)) >= 6
    for name in written:
        assert any(fnmatch(name, rule) for rule in rules), name


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """Returns days of a log with Criteo's columns."""
    folder = tmp_path_factory.mktemp("days") / "days"
    simulate(Simulation(rows=1600, days=8), folder)
    return folder


@pytest.fixture
def places(trained, days, tmp_path):
    """Returns the paths that replace the pages' names of data and runs."""
    return {
        "/path/with/day_files/day_7": trained.log,
        "/path/with/day_files": days,
        "/path/to/write": tmp_path / "out",
        "/path/to/local": tmp_path / "local",
        "DIR": trained.dataset,
        "day2": trained.dataset,
        "day_6": trained.log,
        "day_7": trained.log,
        "other_run": Checkpoint.open(trained.checkpoint).path.parent,
    }


def write_adult(folder: Path) -> None:
    """Writes rows with the columns of UCI Adult."""
    rows = []
    for i in range(600):
        label = ">50K" if i % 3 == 0 else "<=50K"
        rows.append(
            f"{20 + i % 50}, Private, {i * 37}, Bachelors, {i % 16}, Never-married, Sales, "
            f"Own-child, White, Male, {i % 5 * 100}, 0, {30 + i % 20}, United-States, {label}"
        )
    (folder / "adult.data").write_text("\n".join(rows) + "\n")
    (names,) = re.findall(r"echo (age,\S+)", PAGES[0].read_text())
    columns = zip(*(row.split(", ") for row in rows), strict=True)
    numbers = {"age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week"}
    table = {
        name: [int(cell) for cell in column] if name in numbers else list(column)
        for name, column in zip(names.split(","), columns, strict=True)
    }
    parquet.write_table(pa.table(table), folder / "adult.parquet")


def write_tables(folder: Path) -> dict[str, Any]:
    """Writes the tables of the pages; returns those that their programs have in memory."""
    count = range(900)
    items = {
        "clicked": [i % 2 for i in count],
        "price": [float(i % 17) for i in count],
        "item": [i % 40 for i in count],
        "history": [[(i + k) % 40 for k in range(i % 4)] for i in count],
    }
    parquet.write_table(pa.table(items), folder / "items.parquet")
    sales = {
        "bought": [i % 2 for i in count],
        "price": [i % 17 + i % 2 * 0.5 for i in count],
        "shop": [f"shop {i % 9}" for i in count],
    }
    parquet.write_table(pa.table(sales), folder / "sales.parquet")
    schema = {"label": "bought", "numerical": ["price"], "categorical": ["shop"]}
    (folder / "sales.yaml").write_text(json.dumps(schema))
    frame = pa.table(sales)
    return {"frame": frame, "other_frame": frame}


def flags_file() -> str:
    """Returns the pages' command that writes `small.flags`."""
    every = (block for page in PAGES for block in blocks(page))
    (text,) = (s for block in every for s in statements(block.text) if "small.flags <<END" in s)
    return text


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=() if name_of(page) in QUICK else pytest.mark.slow, id=name_of(page)
        )
        for page in PAGES
    ],
)
@pytest.mark.usefixtures("curves")
def test_the_commands_of_a_page_run_in_order(page, places, trained, tmp_path, monkeypatch):
    runnable = [block for block in blocks(page) if block.is_run]
    if not any(block.language in ("bash", "python") for block in runnable):
        pytest.skip("the page has nothing that is run here")
    monkeypatch.chdir(tmp_path)
    write_adult(tmp_path)
    frames = write_tables(tmp_path)
    run(flags_file(), tmp_path)
    if not re.search(r"--save_checkpoint_path run\s", page.read_text()):  # else the page trains it
        (tmp_path / "run").symlink_to(trained.checkpoint)
    if page.stem == "serving":
        places = {"/path/to/write/binary_dataset": trained.dataset, **places}
    if page in FOLDERS:
        write_inputs(tmp_path, places, trained)
    with ExitStack() as servers:
        run_blocks(runnable, tmp_path, places, frames, servers)


def write_inputs(folder: Path, places: dict[str, Path], trained: Any) -> None:
    """Writes what the pages of folders assume: the demo's files, requests, images and text."""
    (folder / "binary_dataset").symlink_to(folder / "out" / "binary_dataset")
    lines = (places["/path/with/day_files"] / "day_7").read_text().splitlines()
    (folder / "requests.tsv").write_text("".join(f"{x.partition(chr(9))[2]}\n" for x in lines))
    places["/path/with/logs"] = places["/path/with/day_files"]
    demo = folder / "demo"
    for name, target in (
        ("run-1/checkpoints", trained.checkpoint),
        ("dataset-raw-700000-8/binary_dataset", trained.dataset),
        ("raw-700000-8/day_7", trained.log),
    ):
        (demo / name).parent.mkdir(parents=True, exist_ok=True)
        (demo / name).symlink_to(target)
    places.pop("day_7")
    for kind in ("cats", "dogs"):
        (folder / "IMAGES" / kind).mkdir(parents=True)
        for i in range(170):  # a batch of 256 without the share for testing
            Image.new("RGB", (9, 8), (i, i, i)).save(folder / "IMAGES" / kind / f"{i}.png")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(50))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    sentence = " ".join(f"word{i}" for i in range(12))
    (folder / "TEXT").write_text("\n\n".join("\n".join([sentence] * 20) for _ in range(30)) + "\n")


def run_blocks(
    runnable: list[Block],
    tmp_path: Path,
    places: dict[str, Path],
    frames: dict[str, Any],
    servers: ExitStack,
) -> None:
    """Runs blocks in order; a server runs until `servers` are closed."""
    names = dict(frames)  # which the programs of a page share
    for block in runnable:
        if block.language == "yaml" and block.text.startswith("version: 1"):
            (tmp_path / "items.yaml").write_text(block.text)
        elif block.language == "python":
            exec(block.text, names)
        elif block.language == "bash":
            for statement in statements(placed(block.text, places)):
                if statement.startswith("dlrm serve "):
                    servers.enter_context(served(statement, tmp_path))
                else:
                    run(statement, tmp_path)


@cache
def known_flags() -> dict[str, set[str]]:
    """Returns the flags of each command in the reference, by its name and its module."""
    text = (ROOT / "docs" / "reference" / "flags.md").read_text()
    _, *sections = re.split(r"^## (?:python -m|dlrm) (\S+)(?: \w+)?$", text, flags=re.M)
    flags: dict[str, set[str]] = {}  # those of all tasks of `dlrm systems` are together
    for name, body in zip(sections[::2], sections[1::2], strict=True):
        flags.setdefault(name, set()).update(re.findall(r"`[^`]*?--([\w-]+)", body))
    flags |= dict.fromkeys(("test", "dlrm.scripts.main", "dlrm.scripts.dist_main"), flags["train"])
    assert COMMANDS.keys() <= flags.keys()
    return {command.module: flags[name] for name, command in COMMANDS.items()} | flags


def unknown_flags(words: list[str]) -> list[str]:
    """Returns the flags of a command that it does not have, or the command if there is none."""
    name, given = command_of(words)
    if not name:
        is_ours = words[:1] == ["dlrm"] and not words[1].startswith("-")
        return words[:2] if is_ours else []
    known = known_flags()[name]
    flags = {m[1] for word in given if (m := _FLAG.match(word))} - OF_ABSL
    both = {word[2:].partition("=")[0].replace("-", "_") for word in given if word.startswith("--")}
    return [flag for flag in sorted(flags) if not {flag, *both} & known]


@pytest.mark.parametrize("page", PAGES, ids=map(name_of, PAGES))
def test_flags_of_every_command_exist_also_where_it_is_not_run(page):
    texts = [block.text for block in blocks(page) if block.language == "bash"]
    lines = [shlex.split(s, comments=True) for text in texts for s in statements(text)]
    assert not [flag for words in lines for flag in unknown_flags(words)]


def in_prose(page: Path) -> list[list[str]]:
    """Returns the commands of `dlrm` between backticks, which may continue on the next line."""
    text = _FENCE.sub("", page.read_text())
    return [one.split() for one in re.findall(r"`(dlrm\s+[a-z][^`]*)`", text)]


def test_commands_within_the_text_of_a_page_exist_with_their_flags():
    pages = [*PAGES, *(ROOT / "docs" / "reference").glob("*.md"), ROOT / "SECURITY.md"]
    found = {page.name: in_prose(page) for page in pages}
    assert sum(map(len, found.values())) > 60
    assert not {name: bad for name, lines in found.items() if (bad := wrong(lines))}


def wrong(lines: list[list[str]]) -> list[str]:
    return [" ".join(words) for words in lines if unknown_flags(words)]


@cache
def texts_of_the_code() -> list[tuple[Path, str]]:
    """Returns files with strings that name `dlrm` or a script: printed lines, help, docstrings."""
    paths = (p for f in ("dlrm", "preproc", "examples") for p in (ROOT / f).rglob("*.py"))
    return [
        (path, node.value)
        for path in paths
        if re.search(r"\bdlrm [a-z]|python3? ", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


# By these names NVIDIA documents its commands.
NVIDIAS = {"main", "transcode", "gen_csv", "prepare_synthetic_dataset"}


def test_the_code_names_commands_in_the_short_form():
    found = [(path, m[0], m[1]) for path, text in texts_of_the_code() for m in _LONG.finditer(text)]
    modules = {f"dlrm.scripts.{name}" for name in NVIDIAS}
    assert {module for _, _, module in found} >= modules
    assert not [(path, text) for path, text, module in found if module not in modules]


def test_commands_that_the_code_names_exist_with_their_flags():
    lines = [
        ["dlrm", *line.split()]
        for _, text in texts_of_the_code()
        for line in re.findall(r"(?<![\w./-])dlrm (?!and )([a-z][\w-]* --?\w.*)", text)
    ]
    assert len(lines) > 40
    assert not wrong(lines)


def test_every_block_that_is_not_run_says_why():
    notes = [block.note for page in PAGES for block in blocks(page) if not block.is_run]
    assert notes
    assert all(re.fullmatch(r"not run: .{5,}|run by tests/\S+.*", note) for note in notes)


def test_every_picture_of_the_tutorial_is_small_and_saved_by_its_program():
    text = TUTORIAL.read_text()
    shown = re.findall(r"^!\[.+\]\(pictures/(.+)\)$", text, re.M)
    assert len(shown) == 3
    assert shown == re.findall(r'savefig\("(.+?)"', text)
    assert all((TUTORIAL.parent / "pictures" / name).stat().st_size < 60_000 for name in shown)
