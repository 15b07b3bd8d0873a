"""Command lines made from settings: positional arguments, tasks, lists, and their errors."""

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

import dlrm
from dlrm.flags import ConfigFlags, Subcommands, UsageError, run_command
from dlrm.settings import REQUIRED, same_setting, setting


@dataclass(frozen=True, kw_only=True)
class Config:
    """A configuration with a field of each kind."""

    first: str = setting(REQUIRED, "the first", positional=True)
    others: tuple[Path, ...] = setting((), "more of them", positional=True)
    needed: int = setting(REQUIRED, "a number, also with --folio", least=1)
    save_dir: Path = setting(Path("here"), "a folder")
    report: bool = setting(True, "write a report", short_name="r")
    conf: tuple[str, ...] = setting((), "a setting", repeated=True)
    layers: tuple[str, ...] = setting((), "sizes", words=True)
    sizes: tuple[int, ...] = setting((1, 2), "numbers")


@dataclass(frozen=True)
class Other:
    """A configuration that shares a setting."""

    needed: int = same_setting(Config, "needed")


LINE = ConfigFlags([("Flags", Config)])
TASKS = Subcommands({"do": ("do it", LINE), "count": ("count it", ConfigFlags([("F", Other)]))})


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["--needed", "3", "a", "b", "c"], {"others": (Path("b"), Path("c"))}),
        (["a", "--save-dir=x", "--needed=3"], {"save_dir": Path("x")}),
        (["--save_dir", "x", "a", "--needed=3"], {"save_dir": Path("x")}),
        (["a", "--needed=3", "--no-report"], {"report": False}),
        (["a", "--needed=3", "-r=false"], {"report": False}),
        (["a", "--needed=3", "--conf", "x=1,2", "--conf=y=3"], {"conf": ("x=1,2", "y=3")}),
        (["a", "--layers", "1-2", "3-4", "--needed=3"], {"layers": ("1-2", "3-4")}),
        (["a", "--layers=1-2", "--layers=3,4", "--needed=3"], {"layers": ("1-2", "3,4")}),
        (["--needed=3", "--sizes=", "--", "a", "--b"], {"sizes": (), "others": (Path("--b"),)}),
    ],
)
def test_a_command_line_becomes_a_configuration(words, changed):
    found = LINE.parse(words).config(Config)
    assert found == Config(**{"first": "a", "needed": 3, **changed})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "arguments: expected first and others, got none"),
        (["a"], "--needed: expected a value, got none"),
        (["a", "--needed=0"], "flag --needed=0: 0 is not a positive integer"),
        (["a", "--needed=1", "--layers"], "Missing value for flag --layers"),
        (["a", "--neded=1"], "Unknown command line flag 'neded'. Did you mean: needed ?"),
        (["a", "--needed=1", "--sizes=x"], "--sizes x: expected integers"),
        (["s3://a", "--needed=1"], "first s3://a: expected a path of this machine, got a URI"),
        (["a", "--needed=1", "--flagfile=none"], "Unable to open flagfile: "),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(words, message):
    with pytest.raises(UsageError) as raised:
        LINE.parse(words)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "words", "changed"),
    [
        ("needed: 3\nsizes: [4, 5]", ["a"], {"sizes": (4, 5)}),
        ("needed: 3\nsizes: 4", ["a"], {"sizes": (4,)}),
        ("needed: 7\nsave-dir: x\nreport: false", ["a", "--needed=3"], {"save_dir": Path("x")}),
        ("needed: 3\nreport: false", ["a", "--report"], {}),
        ("needed: 3\nconf: ['x=1,2', y=3]\nlayers: [1-2]", ["a", "--conf=z"], {"conf": ("z",)}),
        ("needed: 3\nsave_dir: null", ["a"], {}),
    ],
)
def test_a_file_has_flags_that_the_command_line_lacks(text, words, changed, tmp_path):
    (tmp_path / "flags.yaml").write_text(text)
    values = LINE.parse([*words, f"--config={tmp_path / 'flags.yaml'}"])
    others = {"report": "report: false" not in text or "--report" in words}
    others |= {"layers": ("1-2",)} if "layers" in text else {}
    assert values.config(Config) == Config(**{"first": "a", "needed": 3, **others, **changed})
    assert "needed" in values.given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("first: a", "line 1: unknown flag 'first'"),
        ("needed: 3\n# own\nhelp: true", "line 3: unknown flag 'help'"),
        ("numbers: 3", "line 1: unknown flag 'numbers'. Did you mean: sizes ?"),
        ("\nneeded: 0", "line 2: flag --needed=0: 0 is not a positive integer"),
        ("needed: [1, 2]", "line 1: needed: expected one value, got [1, 2]"),
        ("save_dir: true", "line 1: save_dir: expected no switch, got True; a text has quotes"),
        ("sizes: {a: 1}", "line 1: sizes: expected a value or a list, got {'a': 1}"),
        ("needed: 1\nsizes: [x]", "line 2: --sizes x: expected integers"),
        ("save_dir: a\nsave-dir: b", "line 2: 'save-dir' is a duplicate key, as - stands for _"),
        ("[3]", "expected a map, got [3]"),
        ("a: 1\na: 2", "line 2, column 1: invalid YAML: 'a' is a duplicate key"),
    ],
)
def test_a_wrong_file_of_flags_is_named(text, message, tmp_path):
    (tmp_path / "flags.yaml").write_text(text)
    with pytest.raises(UsageError) as raised:
        LINE.parse(["a", f"--config={tmp_path / 'flags.yaml'}"])
    assert str(raised.value) == f"{tmp_path / 'flags.yaml'}: {message}"


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("neded", "needed"),
        ("dir", "save_dir"),
        ("more_of_them", ""),
        ("folder", "save_dir"),
        ("folio", ""),
    ],
)
def test_flags_that_may_be_meant_are_named(name, flags):
    with pytest.raises(UsageError) as raised:
        LINE.parse(["a", f"--{name}=1"])
    asked = f". Did you mean: {flags} ?" if flags else ""
    assert str(raised.value) == f"Unknown command line flag '{name}'{asked}"


def test_only_arguments_that_were_given_are_given():
    assert LINE.parse(["a", "--needed=3", "--report"]).given == {"first", "needed", "report"}


def test_unknown_flags_may_be_for_another_program():
    line = ConfigFlags(LINE_OF_SERVER, pass_on=True)
    values = line.parse(["--needed=3", "--model-control=poll", "--log", "x"])
    assert values["others"] == ("--model-control=poll", "--log", "x")


@dataclass(frozen=True)
class Server:
    """A configuration of a program that starts another one."""

    needed: int = setting(REQUIRED, "a number")
    others: tuple[str, ...] = setting((), "flags of the other", positional=True)


LINE_OF_SERVER = [("Flags", Server)]


def test_a_task_has_its_own_flags():
    values = TASKS.parse(["count", "--needed=2"])
    assert (values["task"], values.config(Other)) == ("count", Other(2))
    for words, message in (
        ([], "expected one of do, count, got none"),
        (["undo"], "expected one of do, count, got undo"),
        (["--needed=2"], "Unknown command line flag 'needed'"),
        (["count", "--report"], "Unknown command line flag 'report'"),
    ):
        with pytest.raises(UsageError, match=message):
            TASKS.parse(words)


def refuse(_):
    raise ValueError("bad data")


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["count", "--needed=2"], 1, "error: bad data"),
        (["count"], 2, "error: --needed: expected a value, got none"),
        (["--help"], 0, "  count: count it"),
        (["count", "-h"], 0, "count: count it"),
        (["do", "--sizes=x", "--help"], 0, "  first: the first"),
    ],
)
def test_a_command_ends_with_the_code_of_its_error(words, code, line, capsys):
    assert run_command(TASKS, refuse, "Does it.", words, usage=2) == code
    output, errors = capsys.readouterr()
    assert line in (output if code == 0 else errors).splitlines()
    assert ("Does it." in output) == (code == 0)


@pytest.mark.parametrize("words", [["--version"], ["do", "--version", "--neded"]])
def test_every_command_has_a_version(words, capsys):
    assert run_command(TASKS, refuse, "Does it.", words) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"dlrm {dlrm.__version__} (torch {version('torch')}; native operators: ")
    assert line.endswith(f"; Python {platform.python_version()})\n")
