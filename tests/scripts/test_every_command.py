"""Every command has a help, names the flag that is wrong, and ends in a line after a signal."""

import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import forked
import pytest

from dlrm.files import NOT_PATHS
from dlrm.flags import ConfigFlags, UsageError
from dlrm.published.command import TASKS as SYSTEMS
from dlrm.tasks import start

ROOT = Path(__file__).resolve().parents[2]
URI = "s3://bucket/x"
MESSAGE = f"{URI}: expected a path of this machine, got a URI (s3://); use a local path"
OTHER = "ftp://host/x: expected a URI of s3://, "
TRAININGS = {
    *("dlrm/scripts/main.py", "dlrm/scripts/dist_main.py"),
    *("dlrm/scripts/cnn/__main__.py", "dlrm/scripts/bert/__main__.py"),
}
SIGNALS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
SCRIPTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for folder in ("dlrm", "preproc", "triton")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


COMMANDS = [
    name
    for name, text in SCRIPTS.items()
    if re.search(r'(?m)^if __name__ == "__main__":$', text) and name != "dlrm/__main__.py"
]
RUN_OTHERS = {  # those that have the command line of another one
    name for name in COMMANDS if re.search(r'(?m)^"""Runs `dlrm\.', SCRIPTS[name])
}
DEPLOYMENT = {
    "export": (2, "--checkpoint=x", "--threads=x"),
    "deployer": (2, "-- --model_checkpoint=x", "--threads=x"),
    "client": (2, "--input=x", "--protocol=x"),
    "server": (2, "--model-repository=x", "--cache-gib=x"),
}
# Every command: its exit code, required flags, and a flag with an invalid value.
REFUSED = {
    "dlrm/scripts/main.py": (1, "", "--batch_size=x"),
    "dlrm/scripts/dist_main.py": (1, "", "--lr=x"),
    "dlrm/scripts/cnn/__main__.py": (1, "", "--batch_size=x"),
    "dlrm/scripts/bert/__main__.py": (1, "", "--epochs=x"),
    "dlrm/scripts/transcode.py": (1, "--input=x", "--chunk_size=x"),
    "dlrm/scripts/prepare.py": (1, "--schema=x --input=x --output=x", "--seed=x"),
    "dlrm/scripts/schema.py": (1, "--input=x --label=x --output=x", "--rows=x"),
    "dlrm/scripts/convert.py": (1, "--dataset=x --output=x", "--values=x"),
    "dlrm/scripts/evaluate/__main__.py": (1, "--checkpoint=x", "--bootstrap=x"),
    "dlrm/scripts/tune.py": (2, "--dataset=x --output=x", "--trials=x"),
    "dlrm/scripts/gen_csv.py": (1, "", "--size=x"),
    "dlrm/scripts/split_dataset.py": (1, "", "--batch_size=x"),
    "dlrm/scripts/predict.py": (1, "--checkpoint=x --input=x --output=x", "--explain=x"),
    "dlrm/scripts/prepare_synthetic_dataset.py": (1, "", "--synthetic_dataset_num_entries=x"),
    "dlrm/scripts/checkpoint.py": (2, "inspect x", "--check=x"),
    "dlrm/published/command.py": (2, "run x", "--threads=x"),
    "dlrm/scripts/daily.py": (2, "--days=x --schema=x --output=x", "--keep=x"),
    "dlrm/scripts/demo.py": (1, "", "--rows=x"),
    "dlrm/scripts/doctor.py": (2, "", "--env=x"),
    "dlrm/language/prepare_text.py": (2, "--source=x --output=x --vocab_file=x", "--seed=x"),
    "dlrm/preproc/logs/prepare_logs.py": (2, "", "--seed=x"),
    "dlrm/scripts/simulate_logs/__main__.py": (2, "--output=x", "--rows=x"),
    "preproc/spark_data_utils.py": (2, "", "--memory_gib=x"),
    "preproc/split_dataset.py": (1, "", "--batch_size=x"),
    "preproc/parquet_to_binary.py": (2, "--src_dir=x --dst_dir=x", "--parallel_jobs=x"),
    **{f"dlrm/deployment/{name}.py": wrong for name, wrong in DEPLOYMENT.items()},
    **{f"triton/{name}.py": wrong for name, wrong in DEPLOYMENT.items()},
}


class CommandLine(BaseException):
    """Ends a command where it would parse its flags.

    Attributes:
        line: its command line.
    """

    def __init__(self, line):
        super().__init__()
        self.line = line


def command_line(command, *words):
    """Runs a command up to its command line, and returns that."""

    def end(line, _):
        raise CommandLine(line)

    sys.argv = [command, *words, "--"]
    sys.path.insert(0, str((ROOT / command).parent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigFlags, "parse", end)
        try:
            runpy.run_path(str(ROOT / command), run_name="__main__")
        except CommandLine as found:
            return found.line
    raise AssertionError(f"{command} parsed no flags")


def words_of(line):
    """Yields flags and arguments, and words that give each the value "{}" and all it needs."""
    for name in line.settings:
        shown = name if name in line.positional else f"--{name}"
        given = dict.fromkeys(line.required, "1") | {name: "{}"}
        words = [
            given[one] if one in line.positional else f"--{one}={given[one]}"
            for one in line.settings
            if one in given
        ]
        yield shown, words


def answers(command):
    """Returns the error, "" for none, of a URI in each flag of a command that takes any text."""
    found = {}
    for task in [[name] for name in SYSTEMS] if "published" in command else [[]]:
        line = command_line(command, *task)
        for shown, words in words_of(line):
            name = " ".join([*task, shown])
            error = error_of(line.parse, words, URI)
            # Flags for numbers, choices or nothing refuse other texts, too.
            if not error or "got a URI" in error or not error_of(line.parse, words, "x"):
                found[name] = error
                if shown.lstrip("-") in line.uris:
                    found[name] = f"takes: {error or error_of(line.parse, words, 'ftp://host/x')}"
    return found


def error_of(parse, words, value):
    try:
        parse([word.replace("{}", value) for word in words])
    except UsageError as error:
        return f"error: {error}"
    return ""


def ends(command):
    """Returns how a command ends after each signal: its exit code and output."""
    needed = {"dlrm/scripts/bert/__main__.py": ["--mode=pretrain"]}
    words = ["--"] if "deployer" in command else needed.get(command, [])
    return {number: end_of(command, words, number) for number in SIGNALS}


def usages(command):
    """Returns how a command ends that is asked for help, or given a wrong flag."""
    _, needed, bad = REFUSED[command]
    before = ["--"] if "deployer" in command else []
    return {
        what: end_of(command, words)
        for what, words in {
            "--help": [*before, "--help", "--no_such_flag=1"],
            "-h": [*before, "-h", "--no_such_flag=1"],
            "bad value": [*needed.split(), bad],
            "unknown flag": [*needed.split(), "--no_such_flag=1"],
        }.items()
    }


def end_of(command, words, number=None):
    """Runs a command in a fork, and may signal it; returns its exit code, output and errors."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
            code = 99  # of another error
            try:
                if number:
                    get(number, command)
                code = code_of(command, words)
                assert not number or signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        texts = [file.seek(0) or file.read() for file in (output, errors)]
        return os.waitstatus_to_exitcode(status), *texts


def get(number, command):
    """Lets a command get a signal where it begins its work."""

    def signal_self(*_, **__):
        os.kill(os.getpid(), number)
        time.sleep(60)

    start.join = signal_self
    if command not in TRAININGS:
        ConfigFlags.parse = signal_self


def code_of(command, words):
    """Runs a command in this process; returns its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = [command, *words]
    sys.path.insert(0, str((ROOT / command).parent))
    try:
        runpy.run_path(str(ROOT / command), run_name="__main__")
    except SystemExit as ended:
        return ended.code or 0
    return 0


def examine(command):
    own = ({}, {}) if command in RUN_OTHERS else (answers(command), ends(command))
    return *own, usages(command)


def walk(path):
    """Writes the answers and ends of all commands to a file; each is run in forks."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = pool.map(examine, COMMANDS, chunksize=1)
    path.write_text(json.dumps(dict(zip(COMMANDS, found, strict=True))))


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    path = tmp_path_factory.mktemp("walk") / "answers.json"
    process = forked.CONTEXT.Process(target=walk, args=(path,))
    process.start()
    process.join()
    return json.loads(path.read_text())


PATHS = {  # some of the flags that the walk has to find
    "dlrm/preproc/logs/prepare_logs.py": {"--input_folder", "--output_folder", "--model_folder"},
    "dlrm/scripts/checkpoint.py": {"--output"},
    "dlrm/scripts/main.py": {"--save_checkpoint_path", "--table_files", "--dataset"},
    "dlrm/scripts/prepare.py": {"--input", "--output", "--schema"},
    "dlrm/published/command.py": {"run --results", "table --output"},
    "dlrm/deployment/export.py": {"--checkpoint", "--save_dir"},
}


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in RUN_OTHERS])
def test_a_flag_of_a_path_takes_uris_or_says_that_it_does_not(command, walked):
    found, *_ = walked[command]
    for name, error in found.items():
        flag = name.split()[-1]
        if error.startswith("takes: "):
            assert error.startswith(f"takes: error: {flag} {OTHER}"), name
        elif flag.lstrip("-").replace("-", "_") in NOT_PATHS:
            assert not error, name
        else:
            assert error.startswith(f"error: {flag} {MESSAGE}"), name
    assert all(found[name] for name in PATHS.get(command, ()))
    assert not (ROOT / "s3:").exists()


def test_the_walk_meets_every_command_and_exception(walked):
    assert {*COMMANDS} == {*REFUSED}
    accepted = {name for found, *_ in walked.values() for name, error in found.items() if not error}
    assert {"--mlflow", "--master", "--spark_sql", "--label"} <= accepted
    words = {name.split()[-1].lstrip("-").replace("-", "_") for name in accepted}
    assert words == NOT_PATHS


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in RUN_OTHERS])
def test_every_command_ends_in_a_line_after_ctrl_c_and_sigterm(command, walked):
    _, found, _ = walked[command]
    for number, (code, word) in SIGNALS.items():
        ended, output, errors = found[str(int(number))]
        assert ended == code, errors
        assert re.fullmatch(rf"(error: )?{word}(; .*)?\n", output + errors)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_and_names_a_wrong_flag(command, walked):
    expected, _, bad = REFUSED[command]
    *_, found = walked[command]
    for word in ("--help", "-h"):  # whatever else is given
        code, output, errors = found[word]
        assert (code, errors) == (0, ""), errors
        assert output.endswith("Try --helpfull to get a list of all flags.\n")
    named = {"bad value": bad.partition("=")[0].strip("-").replace("-", "_")}
    if "server" not in command:  # it passes others on to tritonserver
        named["unknown flag"] = "no_such_flag"
    for what, flag in named.items():
        code, _, errors = found[what]
        assert (code, errors.count("\n")) == (expected, 1), errors
        assert errors.startswith("error: ")
        assert flag in errors


@pytest.mark.parametrize(
    ("module", "words", "name"),
    [
        ("dlrm.scripts.schema", ("--flagfile", "flags"), "--cache_dir "),
        ("dlrm.published.command", ("table", "002", "--output", URI), "--output "),
        ("dlrm.scripts.demo", ("--output", URI), "--output "),
    ],
)
def test_a_command_ends_before_it_writes(module, words, name, tmp_path):
    (tmp_path / "flags").write_text(f"--input=x\n--label=x\n--cache_dir={URI}\n")
    done = forked.run(module, *words, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(f"error: {name}{MESSAGE}")
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["flags"]


@pytest.mark.parametrize(
    "words", [["--save_checkpoint_path=run-\udcff"], ["--log_path=log-\udcff"]]
)
def test_a_path_that_is_not_in_utf_8_is_refused_before_the_training(words, tmp_path):
    done = forked.run("dlrm.scripts.main", "--dataset=missing", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert re.match(r"error: --\w+ \w+-\\+xff: expected a path in UTF-8; rename it", done.stderr)
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_path_is_not_in_utf_8_saves_nothing(tmp_path):
    folder = tmp_path / "folder-\udcff"
    folder.mkdir()
    flags = ["--dataset_type=synthetic_gpu", "--base_device=cpu", "--max_steps=1"]
    flags += ["--synthetic_dataset_table_sizes=3", "--batch_size=8", "--embedding_dim=4"]
    flags += ["--bottom_mlp_sizes=4", "--top_mlp_sizes=1", "--synthetic_dataset_num_entries=8"]
    done = forked.run("dlrm.scripts.main", *flags, "--save_checkpoint_path=run", cwd=folder)
    assert done.returncode == 1
    assert "xff/run: expected a path in UTF-8" in done.stderr
    assert "loss" not in done.stdout
