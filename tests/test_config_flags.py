"""Command lines made from settings: positional arguments, tasks, lists, and their errors."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from dlrm.flags import ConfigFlags, Subcommands, UsageError, run_command
from dlrm.settings import REQUIRED, same_setting, setting


@dataclass(frozen=True, kw_only=True)
class Config:
    """A configuration with a field of each kind."""

    first: str = setting(REQUIRED, "the first", positional=True)
    others: tuple[Path, ...] = setting((), "more of them", positional=True)
    needed: int = setting(REQUIRED, "a number", least=1)
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
        (["a", "--needed=3", "--noreport"], {"report": False}),
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
