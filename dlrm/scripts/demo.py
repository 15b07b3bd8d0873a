"""Goes from raw click logs to a dataset, a trained model and its AUC: dlrm demo

    dlrm demo                             simulated logs, whose best AUC is known
    dlrm demo --raw /path/with/day_files  your own logs in Criteo's format

All files are written to ./demo, and all lines of the commands that it runs to demo/demo.log.
"""

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm.documents import read_json
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.preproc.spark.session import ENGINES
from dlrm.scripts.common.steps import StepError, run_step
from dlrm.settings import setting


@dataclass(frozen=True)
class DemoConfig:
    """The logs, and where files are written; field names are those of the flags."""

    raw: Path | None = setting(None, "directory with day_0, day_1, ...; default: simulated logs")
    output: Path = setting(Path("demo"), "directory for all files")
    rows: int = setting(700_000, "total number of rows to simulate", least=1)
    days: int = setting(8, "number of days to simulate", least=1)
    engine: str = setting(
        "local", "engine that prepares the logs; both write the same bytes", choices=ENGINES
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    return run_command(ConfigFlags([("Flags", DemoConfig)]), _run, __doc__, arguments)


def _run(values: Values) -> int:
    options, began = values.config(DemoConfig), time.time()
    output = options.output.absolute()
    raw = options.raw.absolute() if options.raw else output / f"raw-{options.rows}-{options.days}"
    folder, run = output / f"dataset-{raw.name}", output / time.strftime("run-%Y%m%d-%H%M%S")
    dataset, checkpoints = folder / "binary_dataset", run / "checkpoints"
    output.mkdir(parents=True, exist_ok=True)
    with open(output / "demo.log", "w", encoding="utf-8") as log:
        spark = {"SPARK_LOCAL_DIRS": str(output / "spark-tmp")}

        def step(name: str, shown: str = "", **flags: Any) -> None:
            run_step(name, flags, log, shown, variables=spark)

        try:
            if options.raw is None:
                _title(1, f"simulating {options.rows:,} rows of {options.days} days")
                if (raw / "planted.json").is_file():
                    print(f"exists already: {_shown(raw)}")
                else:
                    days = {"rows": options.rows, "days": options.days}
                    step("simulate", "best reachable", output=raw, **days)
            _title(2, f"preparing {_shown(raw)}")
            shown = "^(note|train|test|validation|tables):|complete"
            folders = {"input_folder": raw, "output_folder": folder}
            step("prepare-logs", shown, **folders, engine=options.engine)
            _title(3, "training")
            step("train", dataset=dataset, recipe="auto", save_checkpoint_path=checkpoints)
            _title(4, "testing the best checkpoint, as loaded from disk")
            loaded = {"load_checkpoint_path": checkpoints, "log_path": run / "test.json"}
            step("test", "", dataset=dataset, **loaded, test_batch_size=16384)
            _title(5, "evaluating it on rows on which nothing was chosen")
            shown = "^(note|page):|^(metric|AUC|log loss|calibration) "
            model = {"checkpoint": checkpoints, "dataset": dataset, "split": "validation"}
            step("evaluate", shown, **model, importance=True, output=run / "evaluation")
        except StepError as failed:
            return failed.code
    _summarize(raw, dataset, run, time.time() - began)
    return 0


def _title(stage: int, text: str) -> None:
    print(f"\n== [{stage}/5] {text} ==", flush=True)


def _summary_of(log: Path) -> dict[str, float]:
    *_, last = log.read_text(encoding="utf-8").splitlines()
    return json.loads(last.removeprefix("DLLL "))["data"]


def _shown(path: Path) -> str:
    """Returns the path as a person would type it here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _summarize(raw: Path, dataset: Path, run: Path, seconds: float) -> None:
    trained, tested = map(_summary_of, (run / "checkpoints/log.json", run / "test.json"))
    rows = read_json(dataset / "manifest.json")["rows"]
    test, validation = (
        "undefined (one class only)" if auc is None else f"{auc:.4f}"
        for auc in (tested["auc"], trained["validation_auc"])
    )
    lines = {
        "rows": "  ".join(f"{split} {count:,}" for split, count in rows.items()),
        "ROC AUC": f"test {test} (selection)  validation {validation} (hold-out)",
    }
    if (raw / "planted.json").is_file():
        best = read_json(raw / "planted.json")
        reachable = "  ".join(f"{s} {best[s]['auc']:.4f}" for s in ("test", "validation"))
        lines["best possible"] = f"{reachable}  (planted in the simulated logs)"
    curves = run / "checkpoints/curves.png"
    lines |= {
        "training": f"{trained['average_train_throughput']:,.0f} samples/s",
        "whole demo": f"{seconds:.0f} s",
        "dataset": _shown(dataset),
        "checkpoints": _shown(run / "checkpoints"),
        "log": _shown(run / "checkpoints/log.json"),
        "page": _shown(run / "evaluation/evaluation.html"),
        "curves": _shown(curves) if curves.exists() else "none",
    }
    width = min(shutil.get_terminal_size().columns, 100)
    print("\n" + " dlrm demo ".center(width, "="))
    for name, value in lines.items():
        print(f"{name:<14} {value}")
    print("=" * width)


if __name__ == "__main__":
    sys.exit(main())
