"""After a kill anywhere while preparing data, the same command writes the same bytes."""

import shutil
import time

import preprocessing
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from killing import Forks, contents, kill_points, report

from dlrm.data.schema.schema import Schema
from dlrm.scripts.simulate_logs.command import Simulation, simulate

pytestmark = pytest.mark.long
SEED = 20261122


@pytest.fixture(scope="module")
def forks():
    with Forks("preprocessing") as started:
        yield started


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw") / "logs"
    simulate(Simulation(rows=60, days=2, num_numerical=1, num_categorical=2), folder)
    return folder


def of_logs(logs, mode, folder):
    flag = f"--output_folder={folder}" if mode == "prepare" else f"--model_folder={folder / 'fit'}"
    output = folder / ("binary_dataset" if mode == "prepare" else "fit")
    shape = ("--num_numerical=1", "--num_categorical=2", "--frequency_limit=1", "--cores=1")
    return [f"--mode={mode}", f"--input_folder={logs}", flag, "--engine=local", *shape], output


class Campaign:
    """Kills a command and checks the files.

    Args:
        forks: run all calls.
        folder: must not exist; the command writes in it.
        kind: key of `preprocessing.COMMANDS`.
        arguments: the command's.
        output: its output.
        other: an extra argument that changes the output.
        over: whether the other output exists before.
    """

    def __init__(self, forks, folder, kind, arguments, output, other, over):
        self._forks, self._folder, self._output = forks, folder, output
        self._command, self._over, self.faults = (kind, arguments), over, []
        self.older, _ = self._uninterrupted([*arguments, other], {})
        self.whole, self.calls = self._uninterrupted(arguments, self.older if over else {})
        assert self.whole != self.older

    def _uninterrupted(self, arguments, before):
        self._folder.mkdir()
        preprocessing.write(self._folder, before)
        run = preprocessing.command, self._command[0], arguments
        outcome = self._forks.run(*run, below=self._folder)
        assert not outcome.error, outcome.error
        assert self._output.is_dir()
        found = contents(self._folder)
        shutil.rmtree(self._folder)
        return found, outcome.calls

    def kill(self, at, half):
        """Kills the command at a call and checks the files."""
        self._folder.mkdir()
        preprocessing.write(self._folder, self.older if self._over else {})
        kill = {"below": self._folder, "at": at, "half": half}
        outcome = self._forks.run(preprocessing.command, *self._command, **kill)
        assert outcome.killed, outcome.error
        left = (self._folder, self._output, self.whole, self.older)
        place = self._folder.parent
        check = self._forks.run(preprocessing.check, *self._command, *left, below=place)
        if check.error:
            self.faults.append(((at, half), check.error.strip().splitlines()[-1]))
        for folder in (self._folder, self._folder.with_name("as killed")):
            shutil.rmtree(folder, ignore_errors=True)


def run_campaign(campaign, what, every=1, since=0.0):
    """Kills at one place in `every`, after a share of all calls."""
    began = time.monotonic()
    points = kill_points(campaign.calls, every, SEED, 1 + int(since * len(campaign.calls)))
    for point in points:
        campaign.kill(*point)
    report(what, len(points), campaign.faults, began)


@pytest.mark.parametrize("over", [False, True])
def test_some_kills_while_publishing_cost_nothing(forks, logs, tmp_path, over):
    folder = tmp_path / "new"
    command = ("logs", *of_logs(logs, "generate_models", folder), "--frequency_limit=2")
    campaign = Campaign(forks, folder, *command, over)
    run_campaign(campaign, f"generate_models, over another {over}", every=3, since=0.8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "over", "every"),
    [
        *(("prepare", False, 1), ("prepare", True, 4)),
        *(("generate_models", over, 1) for over in (False, True)),
    ],
)
def test_no_kill_of_preprocessing_costs_anything(forks, logs, tmp_path, mode, over, every):
    folder = tmp_path / "new"
    command = ("logs", *of_logs(logs, mode, folder), "--frequency_limit=2")
    campaign = Campaign(forks, folder, *command, over)
    run_campaign(campaign, f"{mode}, over another {over}", every)


def tables(folder):
    rows = {"y": [0, 1] * 40, "x": range(80), "c": [*"abca"] * 20, "d": [*"pqrst"] * 16}
    pq.write_table(pa.table(rows), folder / "rows.parquet", row_group_size=20)
    fields = {"numerical": ["x"], "categorical": ["c", {"column": "d", "max_ids": 2}]}
    schema = {"label": "y", **fields, "crosses": [{"fields": ["c", "d"], "buckets": 5}]}
    Schema.from_dict(schema).save(folder / "schema.yaml")
    source = [f"--schema={folder / 'schema.yaml'}", f"--input={folder / 'rows.parquet'}"]
    return [*source, "--split_bytes=300", "--overwrite", "--noreport", "--cores=1"], "--seed=1"


def text(folder):
    pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    document = "a b c d e\nf g h a\nb b a c d\nh g f\n\n"
    (folder / "text").mkdir()
    (folder / "text" / "documents.txt").write_text(document * 6)
    shape = ["--max_seq_length=16", "--max_predictions_per_seq=3", "--dupe_factor=2"]
    source = [f"--source={folder / 'text'}", f"--vocab_file={folder / 'vocab.txt'}"]
    return [*source, *shape, "--processes=1"], "--seed=1"


@pytest.mark.slow
@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("source", [tables, text])
def test_no_kill_of_another_command_costs_anything(forks, tmp_path, source, over):
    folder = tmp_path / "source"
    folder.mkdir()
    arguments, other = source(folder)
    new = tmp_path / "new"
    arguments.append(f"--output={new / 'dataset'}")
    name = source.__name__
    campaign = Campaign(forks, new, name, arguments, new / "dataset", other, over)
    every = 8 if source is tables else 1
    run_campaign(campaign, f"{name}, over another {over}", every)
