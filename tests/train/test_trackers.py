"""Trackers: what they receive; a failing or slow one neither stops nor delays a run."""

import sys
import threading
from types import SimpleNamespace

import pytest

from dlrm.train.log import RunLog, StoppedError
from dlrm.train.reports import trackers
from dlrm.train.reports.trackers import MLflow, TensorBoard, Tracker, open_trackers
from dlrm.vision.tfrecord import find_records, read_record


class Kept:
    """An adapter that records its calls; the call with index `fails_at` raises."""

    def __init__(self, fails_at=None, gate=None):
        self.calls, self._fails_at, self._gate = [], fails_at, gate

    def __getattr__(self, method):
        def call(*arguments):
            if self._gate:
                self._gate.wait(60)
            if len(self.calls) == self._fails_at:
                raise OSError("no room\nmore")
            self.calls.append((method, *arguments))

        return call


def report(tracker, path, steps=3):
    log = RunLog(quiet=True)
    log.trackers = [tracker]
    with log:
        log.parameters({"lr": 0.1})
        for step in range(1, steps + 1):
            log.step(0, step - 1, {"loss": 1.0 / step}, step)
        log.file(path)


def test_a_tracker_gets_flags_values_and_files_in_order(tmp_path):
    kept, said = Kept(), []
    report(Tracker("kept", lambda: kept, said.append), tmp_path)
    values = [("scalars", step, {"loss": 1.0 / step}) for step in (1, 2, 3)]
    assert kept.calls == [
        ("flags", {"lr": 0.1}),
        *values,
        ("file", tmp_path),
        ("close", "finished"),
    ]
    assert not said


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("diverged"), "failed"),
        (StoppedError("stopped after step 3"), "killed"),
        (KeyboardInterrupt(), "killed"),
    ],
)
def test_a_tracker_is_told_how_a_run_ended(error, outcome):
    kept, log = Kept(), RunLog(quiet=True)
    log.trackers = [Tracker("kept", lambda: kept, print)]
    with pytest.raises(type(error)), log:
        raise error
    assert kept.calls == [("close", outcome)]


@pytest.mark.parametrize("fails_at", [0, 2, 5])
def test_one_that_fails_is_named_once(tmp_path, fails_at):
    said = []
    report(Tracker("kept", lambda: Kept(fails_at), said.append), tmp_path)
    assert said == ["note: kept: no room; the run continues without it"]


def test_no_step_waits_for_a_tracker(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "_PATIENCE", 60)
    gate = threading.Event()
    slow, log = Kept(gate=gate), RunLog(quiet=True)
    log.trackers = [Tracker("slow", lambda: slow, print)]
    with log:
        for step in range(100):
            log.step(0, step, {"loss": 1.0}, step)
        log.file(tmp_path)
        assert not slow.calls  # it holds the first until now
        gate.set()
    assert len(slow.calls) == 102


def test_the_end_of_a_run_waits_for_a_tracker_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "_PATIENCE", 0.05)
    gate, said = threading.Event(), []
    slow = Tracker("slow", lambda: Kept(fails_at=0, gate=gate), said.append)
    report(slow, tmp_path)
    gate.set()
    slow.join(60)  # fails after it was named
    assert said == [
        "note: slow: it has not taken everything within 0.05 s; the run continues without it"
    ]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    for module in ("tensorboardX", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    said = []
    for tracker in open_trackers(str(tmp_path / "t"), "http://127.0.0.1:9", "run", said.append):
        tracker.close("finished")
    assert "pip install 'tensorboardX>=2.6' installs it" in "".join(said)
    assert "pip install 'mlflow-skinny>=3' installs it" in "".join(said)
    assert not (tmp_path / "t").exists()


def test_tensorboard_has_scalars_flags_and_curves(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    picture = tmp_path / "curves.png"
    picture.write_bytes(b"\x89PNG some bytes")
    (tmp_path / "MODEL.md").write_text("# card")
    writer = TensorBoard(str(tmp_path / "events"))
    writer.flags({"lr": 0.1})
    writer.scalars(7, {"loss": 0.25})
    writer.file(picture)
    writer.file(tmp_path / "MODEL.md")
    writer.close()
    (events,) = (tmp_path / "events").iterdir()
    values = {}
    for place in find_records(events):
        for value in event_pb2.Event.FromString(read_record(events, place)).summary.value:
            values[value.tag] = value
    assert values["loss"].simple_value == 0.25
    assert values["curves"].image.encoded_image_string == picture.read_bytes()
    assert b"--lr=0.1" in values["flags/text_summary"].tensor.string_val[0]
    assert b"# card" in values["MODEL.md/text_summary"].tensor.string_val[0]


class Client:
    """Methods of MLflow's client that the adapter calls."""

    entries: list = []

    def __init__(self, tracking_uri):
        self.entries.append(("uri", tracking_uri))

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return "3"

    def create_run(self, number, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{number}/{run_name}"))

    def log_param(self, *entry):
        self.entries.append(entry)

    def log_metric(self, *entry, step):
        self.entries.append((*entry, step))

    def log_artifact(self, *entry):
        self.entries.append(entry)

    def set_terminated(self, *entry):
        self.entries.append(entry)


def test_mlflow_gets_parameters_metrics_and_artifacts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    Client.entries = []
    tracker = MLflow(str(tmp_path), "run-1")
    tracker.flags({"sizes": "9" * 9999})
    tracker.scalars(5, {"loss": 0.5})
    tracker.file(tmp_path / "MODEL.md")
    tracker.close()
    run = "3/run-1"
    assert Client.entries == [
        ("uri", str(tmp_path)),
        (run, "sizes", "9" * 500),
        (run, "loss", 0.5, 5),
        (run, str(tmp_path / "MODEL.md")),
        (run, "FINISHED"),
    ]
    MLflow(str(tmp_path), "run-2").close("failed")
    assert Client.entries[-1] == ("3/run-2", "FAILED")


def test_the_real_mlflow_keeps_a_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages
    (tmp_path / "MODEL.md").write_text("# card")
    uri = (tmp_path / "store").as_uri()
    tracker = MLflow(uri, "run-1")
    tracker.flags({"lr": 0.1})
    tracker.scalars(5, {"loss": 0.5})
    tracker.file(tmp_path / "MODEL.md")
    tracker.close("killed")
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("dlrm")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.data.params, run.data.metrics) == ({"lr": "0.1"}, {"loss": 0.5})
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["MODEL.md"]
    assert (run.info.run_name, run.info.status) == ("run-1", "KILLED")
