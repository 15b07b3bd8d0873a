"""Commands that prepare data, and checks of the files after a kill; run in forks, see killing.py.

Tasks run in the process itself: tests/preproc/test_resume.py kills pool tasks.
"""

import multiprocessing.resource_tracker
import os
import shutil
from contextlib import contextmanager

from inline_engine import InlineEngine
from killing import contents, difference

from dlrm.language import prepare_text
from dlrm.preproc.logs import command as logs, prepare_logs
from dlrm.scripts import prepare as tables

multiprocessing.resource_tracker.ensure_running()  # the shim allows no new programs
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@contextmanager
def inline_engine(*_):
    yield InlineEngine()


logs.open_engine = tables.open_engine = inline_engine
COMMANDS = {
    "tables": tables.main,
    "logs": prepare_logs.main,
    "text": prepare_text.main,
}


def command(kind, arguments):
    """Runs a command; raises AssertionError unless its exit status is 0."""
    status = COMMANDS[kind](arguments)
    assert status == 0, f"ended with {status}"


def check(kind, arguments, folder, output, whole, older):
    """Raises AssertionError unless rerunning completes a killed command, from any `output`.

    Args:
        kind, arguments: the command that was killed.
        folder: its folder, as the kill left it.
        output: the command's output in `folder`.
        whole: contents of `folder` after an uninterrupted run.
        older: the same for another command.
    """
    standing, name = contents(output), output.relative_to(folder).as_posix()
    assert standing in ({}, _within(whole, name), _within(older, name)), "a part stands there"
    killed = folder.with_name("as killed")
    folder.rename(killed)
    for case in ("kept", "deleted", "another")[: 3 if standing else 1]:
        shutil.copytree(killed, folder)
        if case != "kept":
            shutil.rmtree(output, ignore_errors=True)
        if case == "another":
            write(folder, older)
        try:
            command(kind, arguments)
        except AssertionError as error:
            raise AssertionError(f"output {case}: {error}") from None
        wrong = difference(contents(folder), whole)
        assert not wrong, f"output {case}: it says complete, but otherwise are {wrong[:3]}"
        shutil.rmtree(folder)
    shutil.rmtree(killed)


def write(folder, files):
    """Writes files that `contents` read."""
    for name, content in files.items():
        path = folder / name
        (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)


def _within(files, folder):
    return {n.removeprefix(f"{folder}/"): v for n, v in files.items() if n.startswith(f"{folder}/")}
