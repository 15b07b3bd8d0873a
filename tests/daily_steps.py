"""`dlrm daily` over steps that write only which days they know, so that a run takes no time."""

import json
from types import SimpleNamespace
from unittest import mock

import jinja2  # noqa: F401  # here, as forks would take a second to import it

from dlrm.data.clicks import feature_spec
from dlrm.files import MANIFEST, atomic_directory
from dlrm.scripts import daily as command
from dlrm.scripts.common.steps import StepError

CLICKS = {"no": 0, "yes": 10}  # by the content of a day's file; 3 of others


def daily(folder, *flags):
    """Runs the command on folder/logs; returns its exit code."""
    (folder / "schema.yaml").write_text("label: click\nnumerical: [price]\n")
    (folder / "small.flags").write_text("--lr=1\n")
    names = {"days": "logs", "schema": "schema.yaml", "output": "chain"}
    words = [f"--{name}={folder / path}" for name, path in names.items()]
    spec = mock.patch.object(feature_spec, "FeatureSpec", SimpleNamespace(load=_load))
    with mock.patch.object(command, "run_step", _step), spec:
        return command.main([*words, f"--train_flags={folder / 'small.flags'}", *flags])


def known(path):
    """Returns the days that a model or a dataset knows, in order."""
    return (path / "known").read_text().split()


def learned(folder):
    """Returns day -> the number of days that its judge knew; None is no judge."""
    records = [json.loads(path.read_text()) for path in folder.glob("chain/days/*/day.json")]
    return {record["name"]: record["judged"]["auc"] for record in records}


def _step(name, flags, log, shown, words=(), held=(), unsaid=""):
    log.write(f"$ dlrm {name}\n")
    if name == "evaluate":
        with atomic_directory(flags["output"]) as made:
            judged = [{"auc": {"value": len(known(flags["checkpoint"]))}}]
            (made / "evaluation.json").write_text(json.dumps({"models": judged}))
    elif name == "prepare":
        if (text := flags["input"].read_text()) == "bad":
            raise StepError(name, 1)
        before = known(flags["extend"]) if flags["extend"] else []
        _write(flags["output"], [*before, flags["input"].stem], CLICKS.get(text, 3))
    else:
        before = known(flags["continue_from"]) if "continue_from" in flags else []
        own = known(flags["dataset"])
        assert own[:-1] == before
        assert ("set_aside" in flags) == (not before) == bool(words)
        if not flags["save_checkpoint_path"].exists():  # as --resume does
            _write(flags["save_checkpoint_path"], own)


def _write(path, days, clicks=3):
    with atomic_directory(path) as made:
        (made / "known").write_text(" ".join(days))
        (made / "clicks").write_text(str(clicks))
        (made / MANIFEST).write_text("{}")


def _load(dataset):
    clicks = int((dataset / "clicks").read_text())
    return SimpleNamespace(num_rows=lambda split: 10, metadata={"clicks": {"train": clicks}})
