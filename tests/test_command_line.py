"""The ends of commands, and the lines of their tables."""

import contextlib
import errno
import gc
import io
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import forked
import numpy as np
import pytest

from dlrm.command_line import (
    aligned,
    exit_code_of,
    free_name,
    importing,
    say,
    say_error,
    shell_line,
)
from dlrm.documents import cell, printable
from dlrm.files import atomic_directory, atomic_file, errors_named
from dlrm.pages import Section, document, table
from dlrm.train.log import RunLog

HOSTILE = (
    "a\nerror: all rows are bad",
    "\x1b[2Jcleared\x07\r",
    "right\u202eto left\u2028next\x9b1m",
    "\ud800 half of a pair",
    "x" * 5000 + "\n",
)


def test_no_value_prints_a_line_of_its_own_or_controls_the_terminal():
    rows = [[value, "1", value] for value in HOSTILE]
    lines = aligned(["head\n", *"bc"], rows)
    assert len(lines) == len(HOSTILE) + 1
    assert all(line.isprintable() for line in lines)
    assert len({len(line) for line in lines}) == 1
    assert max(map(len, lines)) < 250
    assert "a\\nerror: all rows are bad" in lines[1]
    assert "xx... (5,001 characters) ...xx" in lines[-1]


def test_no_path_prints_a_line_of_its_own_or_controls_the_terminal(capsys):
    with RunLog(None) as log:
        for value in HOSTILE:
            say(f"page: {value}")
            log.line(f"checkpoints: {value}")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(HOSTILE)
    assert all(line.isprintable() for line in lines)
    assert lines[0] == "page: a\\nerror: all rows are bad"


def test_a_shell_reads_the_words_of_a_printed_command():
    words = ["plain", "a b", "it's", "Zürich"]
    line = shell_line(words)
    assert shlex.split(line) == words
    assert shell_line(["a\x1b[31m\n", "\udcff"]) == "'a\\x1b[31m\\n' '\\udcff'"


def test_no_value_controls_the_text_of_a_page():
    content = table([("", ["\u202ename"])], [["a\x00\r\nb"]], "rows")
    text = document("title\x1b", [], [], [Section("part", [content])])
    assert all(line.isprintable() for line in text.split("\n"))
    assert "<title>title\\x1b</title>" in text
    assert "\\u202ename" in text


def test_ordinary_values_are_kept():
    for value in ("", "Zürich, 東京", "a b", "x" * 60, "back\\slash"):
        assert cell(value) == printable(value) == value
    assert aligned(["name", "n"], [["é", "10"]]) == ["name   n", "é     10"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown_on_terminal(monkeypatch, act):
    """Returns the lines that an act shows on a terminal of 40 columns."""
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
        act()
    return terminal.getvalue().splitlines()


def test_prose_on_a_terminal_ends_between_words_and_marks_are_colored(monkeypatch, capsys):
    def act():
        say("note: " + "word " * 9)
        say("warning: few")
        say("word " * 9)
        say_error("wrong", 1)

    assert shown_on_terminal(monkeypatch, act) == [
        "\x1b[33mnote:\x1b[0m " + "word " * 9,
        "\x1b[33mwarning:\x1b[0m few",
        "word " * 9,
        "\x1b[31merror:\x1b[0m wrong",
    ]
    act()  # not on a terminal
    told = capsys.readouterr()
    assert told.out == f"note: {'word ' * 9}\nwarning: few\n{'word ' * 9}\n"
    assert told.err == "error: wrong\n"


def test_a_suggested_name_is_free(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        names.append(free_name("run"))
        Path(names[-1]).touch()
    assert names == ["run", "run2", "run3"]


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("--x: wrong\nerror: two"), "error: --x: wrong\\nerror: two\n"),
        (OSError(errno.ENOSPC, "full", "a/b"), "error: [Errno 28] full: 'a/b'\n"),
        (KeyboardInterrupt(), "error: interrupted; resume\n"),
    ],
)
def test_a_command_ends_in_a_line(error, line, capsys):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    code = exit_code_of(lambda: fail(error), code=2, hint="resume")
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert capsys.readouterr().err == line
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def test_sigterm_removes_what_was_being_written_even_if_it_comes_twice(tmp_path, capsys):
    def act():
        with atomic_directory(tmp_path / "new") as staging:
            (staging / "half").touch()
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                (staging / "more").touch()

    before = signal.getsignal(signal.SIGTERM)
    assert exit_code_of(act) == 143
    assert capsys.readouterr().err == "error: terminated\n"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def print_result():
    print("result")


def print_result_at_once():
    with errors_named("dataset"):
        print("result", flush=True)


def print_to_full_disk(act, path):
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), path.open("w", buffering=1)
    sys.exit(exit_code_of(act))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("act", [print_result, print_result_at_once])
def test_output_that_cannot_be_printed_is_an_error(act, tmp_path):
    process = forked.CONTEXT.Process(target=print_to_full_disk, args=(act, tmp_path / "line"))
    process.start()
    process.join()
    assert process.exitcode == 1
    line = "error: [Errno 28] No space left on device: 'standard output'\n"
    assert (tmp_path / "line").read_text() == line


def write_full():
    with open("/dev/full", "w") as file:
        file.write("x")


def write_array():
    with open("/dev/full", "wb") as file:
        np.zeros(1000).tofile(file)


def write_table():
    raise OSError(errno.ENOSPC, "Error writing bytes to file")  # as Arrow does


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("write", [write_full, write_array, write_table])
@pytest.mark.parametrize("staged", [errors_named, atomic_file, atomic_directory])
def test_a_full_disk_is_an_oserror_with_a_path(write, staged, tmp_path):
    path = tmp_path / "new"
    with pytest.raises(OSError, match=str(path)) as raised, staged(path):  # noqa: PT012
        write()
    if write is not write_array:  # NumPy's has no number
        assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(path))
    assert not path.exists()


def test_a_copied_tree_names_a_file_and_no_list(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/gone").symlink_to("nothing")
    with pytest.raises(OSError, match="a/gone") as raised, errors_named(tmp_path / "b"):
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert "[(" not in str(raised.value)


def test_errors_that_have_their_path_or_are_of_reading_are_kept(tmp_path):
    for error in (
        FileNotFoundError("data: no such directory"),
        OSError(errno.ENOENT, "Failed to open 'data'"),
        OSError(errno.ENOSPC, "full", "other"),
    ):
        with pytest.raises(type(error)) as raised, errors_named(tmp_path):
            raise error
        assert raised.value is error


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_a_command_is_imported_is_handled_afterward(number, code, capsys):
    done = []

    def act():
        with importing():
            os.kill(os.getpid(), number)
            done.append("imported")
        done.append("run")

    assert exit_code_of(act) == code
    assert done == ["imported"]
    assert capsys.readouterr().err in ("error: terminated\n", "error: interrupted\n")


def test_an_error_of_a_library_in_the_place_of_a_signal_is_none(capsys):
    def act():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            raise RuntimeError("export failed") from None

    assert exit_code_of(act) == 143
    assert capsys.readouterr().err == "error: terminated\n"


def test_nothing_is_collected_while_a_command_is_imported():
    assert gc.isenabled()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()
