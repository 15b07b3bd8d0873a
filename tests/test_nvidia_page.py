"""`docs/reference/nvidia.md` names existing flags and files and the actual defaults."""

import re
import shlex
import subprocess
import sys

import forked
import pytest

from dlrm.scripts.commands import COMMANDS
from dlrm.scripts.common import dlrm_flags
from dlrm.serving.network.platforms import PLATFORMS

# NVIDIA's flags that the page lists as removed or refused.
NOT_OURS = {
    *("fp16", "nofp16", "self_interaction", "synthetic_dataset"),
    *("Adam_embedding_optimizer", "Adam_MLP_optimizer"),
}
# Flags of other programs.
OF_OTHERS = {"use_env", "nproc_per_node", "load-model", "model-control-mode"}
SOURCES = (
    "dlrm/scripts",
    "dlrm/deployment",
    "dlrm/preproc",
    "dlrm/data/clicks",
    "preproc",
    "dlrm/train",
)


@pytest.fixture(scope="module")
def page(root):
    return (root / "docs" / "reference" / "nvidia.md").read_text()


def rows(page, heading):
    """Returns the cells of the table whose header starts with `heading`."""
    lines = page[page.index(f"\n| {heading} |") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_files_and_modules_that_it_names_exist(root, page):
    files = set(re.findall(r"\b(?:preproc|triton)/\w+\.(?:py|sh)\b|\bbind\.sh\b", page))
    modules = set(re.findall(r"\bdlrm\.scripts\.\w+", page))
    assert len(files) > 8
    assert len(modules) > 4
    assert not [name for name in files if not (root / name).is_file()]
    paths = [root / name.replace(".", "/") for name in modules]
    for path in paths:
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    commands = set(re.findall(r"`dlrm ([a-z-]+)", page))
    assert len(commands) > 4
    assert commands <= COMMANDS.keys()
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links
    assert all((root / "docs" / "reference" / link).exists() for link in links)


def test_flags_that_it_names_exist(root, page):
    named = set(re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", page)) - NOT_OURS - OF_OTHERS
    assert len(named) > 60
    paths = [path for folder in SOURCES for path in (root / folder).rglob("*.py")]
    text = "\n".join(path.read_text() for path in [*paths, root / "bind.sh"])
    known = {*dlrm_flags.parse([]), *PLATFORMS}  # the exporter has a flag for each platform
    known |= set(re.findall(r"(?m)^    (\w+): .* = (?:same_)?setting\(", text))
    # Flags of shell scripts have dashes.
    known |= set(re.findall(r'"(?:--)?([\w-]+)"', text)) | set(re.findall(r"--([\w-]+)", text))
    assert not {name.replace("-", "_") for name in named - known} - known


def test_every_flag_of_nvidias_that_behaves_otherwise_is_one(page):
    flags = re.findall(r"`--(\w+)[^`]*`", " ".join(row[0] for row in rows(page, "flag | NVIDIA's")))
    assert len(flags) > 20
    assert not set(flags) - dlrm_flags.parse([]).keys()


def test_its_defaults_are_those_of_the_commands(root, page):
    table = rows(page, "flag | `main`, 2020")
    columns = (
        dlrm_flags.parse([]),
        dlrm_flags.parse([], dlrm_flags.make_flags(dlrm_flags.DIST_MAIN)),
        dlrm_flags.parse([f"--flagfile={root / 'examples' / 'nvidia_2021.flags'}"]),
    )
    named = {row[0].strip("`-") for row in table}
    assert named == dlrm_flags.DIST_MAIN.keys() | columns[2].given
    for flag, *told in table:
        assert told == [str(values[flag.strip("`-")]) for values in columns], flag


def refused(root, command):
    """Runs a command of the page."""
    program, *words = shlex.split(command)
    if program == "python":
        return forked.run(words[1], *words[2:])
    if program == "triton/deployer.py":
        pytest.importorskip("onnxscript", reason="needs dlrm[serve]")
    if program.endswith(".py"):
        return forked.run(root / program, *words)
    command = [root / program, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_it_says_is_refused_is_refused_in_one_line(root, page, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHON", sys.executable)
    table = rows(page, "refused")
    assert len(table) > 8
    for command, _ in table:
        done = refused(root, command.strip("`").replace(" DIR", f" {tmp_path}"))
        assert done.returncode in (1, 2), command
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: "), line
