"""Command lines made from settings: positional arguments, lists, files, and their errors."""

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

import dlrm
from dlrm.flags import ConfigFlags, UsageError, run_command
from dlrm.settings import REQUIRED, setting


@dataclass(frozen=True, kw_only=True)
class Config:
    """A configuration with a field of each kind."""

    first: str = setting(REQUIRED, "the first", positional=True)
    others: tuple[Path, ...] = setting((), "more of them", positional=True)
    needed: int = setting(REQUIRED, "a number", least=1)
    most: int | None = setting(9, "a number or none")
    save_dir: Path = setting(Path("here"), "a folder")
    report: bool = setting(True, "write a report", short_name="r")
    conf: tuple[str, ...] = setting((), "a setting", repeated=True)
    sizes: tuple[int, ...] = setting((1, 2), "numbers")
    ensemble: int | str = setting(1, "a number or kinds")
    source: str | None = setting(None, "a file", uri="read")


LINE = ConfigFlags([("Flags", Config)])


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["--needed", "3", "a", "b", "c"], {"others": (Path("b"), Path("c"))}),
        (["a", "--save-dir=x", "--needed=3"], {"save_dir": Path("x")}),
        (["--save_dir", "x", "a", "--needed=3"], {"save_dir": Path("x")}),
        (["a", "--needed=3", "--no-report"], {"report": False}),
        (["a", "--needed=3", "-r=false"], {"report": False}),
        (["a", "--needed=3", "--conf", "x=1,2", "--conf=y=3"], {"conf": ("x=1,2", "y=3")}),
        (["a", "--conf", "1-2", "3-4", "--needed=3"], {"conf": ("1-2", "3-4")}),
        (["--needed=3", "--sizes=", "--", "a", "--b"], {"sizes": (), "others": (Path("--b"),)}),
        (
            ["a", "--needed=3", "--most=None", "--ensemble=dot*3"],
            {"most": None, "ensemble": "dot*3"},
        ),
        (
            ["a", "--needed=3", "--ensemble=4", "--source=s3://b/x"],
            {"ensemble": 4, "source": "s3://b/x"},
        ),
    ],
)
def test_a_command_line_becomes_a_configuration(words, changed):
    assert LINE.parse(words).config(Config) == Config(**{"first": "a", "needed": 3, **changed})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "first: expected a value, got none"),
        (["a"], "--needed: expected a value, got none"),
        (["a", "--needed=0"], "flag --needed=0: 0 is not a positive integer"),
        (["a", "--needed=x"], "flag --needed=x: invalid literal"),
        (["a", "--needed=1", "--conf"], "Missing value for flag --conf"),
        (["a", "--neded=1"], "Unknown command line flag 'neded'. Did you mean: needed ?"),
        (["a", "--far_off=1"], "Unknown command line flag 'far_off'"),
        (["a", "---report"], "Unknown command line flag '-report'"),
        (["a", "--needed=1", "--sizes=x"], "--sizes x: expected int values"),
        (["s3://a", "--needed=1"], "first s3://a: expected a path of this machine, got a URI"),
        (["a", "--config=s3://a/b"], "--config s3://a/b: expected a path of this machine, got a"),
        (["a", "--config=none.yaml"], "--config none.yaml: no such file"),
        (["a", "--needed=1", "--source=ftp://a"], "--source ftp://a: expected a URI of s3://, "),
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
        ("needed: 7\nsave_dir: x", ["a", "--needed=3"], {"save_dir": Path("x")}),
        ("needed: 3\nreport: false", ["a"], {"report": False}),
        ("needed: 3\nreport: false", ["a", "--report"], {}),
        ("needed: 3\nconf: ['x=1,2', y=3]", ["a"], {"conf": ("x=1,2", "y=3")}),
        ("needed: 3\nconf: ['x=1,2', y=3]", ["a", "--conf=z"], {"conf": ("z",)}),
        ("needed: 3\nsave_dir: null", ["a"], {}),
    ],
)
def test_a_file_has_flags_that_the_command_line_lacks(text, words, changed, tmp_path):
    (tmp_path / "flags.yaml").write_text(text)
    values = LINE.parse([*words, f"--config={tmp_path / 'flags.yaml'}"])
    assert values.config(Config) == Config(**{"first": "a", "needed": 3, **changed})
    assert "needed" in values.given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("first: a", "line 1: Unknown command line flag 'first'"),
        ("needed: 3\n# own\nhelp: true", "line 3: Unknown command line flag 'help'"),
        ("save-dir: a", "line 1: Unknown command line flag 'save-dir'. Did you mean: save_dir ?"),
        ("\nneeded: 0", "line 2: flag --needed=0: 0 is not a positive integer"),
        ("needed: [1, 2]", "line 1: --needed [1, 2]: expected a value; "),
        ("needed: 1\nconfig: x", "line 2: Unknown command line flag 'config'"),
        ("save_dir: true", "line 1: --save_dir True: expected a value; a text has quotes"),
        ("sizes: {a: 1}", "line 1: --sizes {'a': 1}: expected a value"),
        ("needed: 1\nsizes: [x]", "line 2: --sizes x: expected int values"),
        ("source: ftp://a", None),
        ("[3]", "expected a map, got [3]"),
        ("a: 1\na: 2", "line 2, column 1: invalid YAML: 'a' is a duplicate key"),
    ],
)
def test_a_wrong_file_of_flags_is_named(text, message, tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        LINE.parse(["a", f"--config={path}"])
    expected = f"{path}: {message}" if message else "--source ftp://a: expected a URI of s3://, "
    assert str(raised.value).startswith(expected)


def test_only_arguments_that_were_given_are_given():
    assert LINE.parse(["a", "--needed=3", "--report"]).given == {"first", "needed", "report"}


@dataclass(frozen=True)
class Server:
    """A configuration of a program that starts another one."""

    needed: int = setting(REQUIRED, "a number")
    others: tuple[str, ...] = setting((), "flags of the other", positional=True)


def test_unknown_flags_may_be_for_another_program():
    line = ConfigFlags([("Flags", Server)], pass_on=True)
    values = line.parse(["--needed=3", "--model-control=poll", "--log", "x"])
    assert values["others"] == ("--model-control=poll", "--log", "x")


def refuse(_):
    raise ValueError("bad data")


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["a", "--needed=2"], 1, "error: bad data"),
        (["a"], 2, "error: --needed: expected a value, got none"),
        (["--sizes=x", "-h"], 0, "  first: the first"),
    ],
)
def test_a_command_ends_with_the_code_of_its_error(words, code, line, capsys):
    assert run_command(LINE, refuse, "Does it.", words, usage=2) == code
    output, errors = capsys.readouterr()
    assert line in (output if code == 0 else errors).splitlines()
    assert ("Does it." in output) == (code == 0)


def test_every_command_has_a_version(capsys):
    assert run_command(LINE, refuse, "Does it.", ["--version", "--neded"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"dlrm {dlrm.__version__} (torch {version('torch')}; native operators: ")
    assert line.endswith(f"; Python {platform.python_version()})\n")
