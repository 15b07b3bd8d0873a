"""The main job from end to end: raw click logs -> dataset -> trained model -> how good it is.

make demo                             simulated logs, whose best reachable AUC is known
make demo RAW=/path/with/day_files    your own logs in Criteo's format
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
PREPROC = ROOT / "preproc"


def main() -> None:
    parser = argparse.ArgumentParser("make demo", description=__doc__.splitlines()[0])
    parser.add_argument("--raw", type=Path, help="directory with day_0, day_1, ...")
    parser.add_argument("--output", type=Path, default=ROOT / "demo", help="where all files go")
    parser.add_argument("--rows", type=int, default=700_000, help="rows to simulate, in all")
    parser.add_argument("--days", type=int, default=8, help="days to simulate")
    options = parser.parse_args()
    output, began = options.output.absolute(), time.time()

    raw = options.raw.absolute() if options.raw else simulate(output, options)
    dataset = preprocess(raw, output)
    run = train(dataset, output)
    test(dataset, run)
    judge(dataset, run)
    summarise(raw, dataset, run, time.time() - began)


def simulate(output: Path, options: argparse.Namespace) -> Path:
    raw = output / f"raw-{options.rows}-{options.days}"
    title("1/5", f"simulating {options.rows:,} rows of {options.days} days")
    if (raw / "planted.json").is_file():
        print(f"there already: {raw}")
    else:
        script = [sys.executable, "-m", "dlrm.scripts.simulate_logs", "--output", raw]
        command([*script, "--rows", options.rows, "--days", options.days])
    return raw


def preprocess(raw: Path, output: Path) -> Path:
    title("2/5", f"preprocessing {shown(raw)}")
    environment = {
        **os.environ,
        "INPUT_PATH": str(raw),
        "OUTPUT_PATH": str(output / f"dataset-{raw.name}"),
        "SPARK_LOCAL_DIRS": str(output / "spark-tmp"),
        "PYTHON": sys.executable,
    }
    java = subprocess.run([PREPROC / "check_java.sh"], capture_output=True, text=True, check=False)
    if java.returncode and "ENGINE" not in environment:
        why = java.stderr.removeprefix("error: ").partition(". Install it")[0]
        print(f"{why}: going on with ENGINE=local, without Spark")
        environment["ENGINE"] = "local"
    command([PREPROC / "prepare_dataset.sh"], env=environment)
    return output / f"dataset-{raw.name}" / "binary_dataset"


def train(dataset: Path, output: Path) -> Path:
    title("3/5", "training")
    run = output / time.strftime("run-%Y%m%d-%H%M%S")
    dlrm_main("train", dataset, {"recipe": "auto", "save_checkpoint_path": run / "checkpoints"})
    return run


def test(dataset: Path, run: Path) -> None:
    title("4/5", "testing the best checkpoint, as loaded from disk")
    flags = {"load_checkpoint_path": run / "checkpoints", "log_path": run / "test.json"}
    dlrm_main("test", dataset, {**flags, "test_batch_size": 16384})


def judge(dataset: Path, run: Path) -> None:
    title("5/5", "judging it on rows that no choice has seen")
    words = ["--checkpoint", run / "checkpoints", "--dataset", dataset]
    words += ["--split", "validation", "--importance", "--output", run / "evaluation"]
    command([sys.executable, "-m", "dlrm.scripts.evaluate", *words])


def dlrm_main(mode: str, dataset: Path, flags: dict[str, Any]) -> None:
    words = [f"--{name}={value}" for name, value in flags.items()]
    print(
        f"python -m dlrm.scripts.main --mode={mode} --dataset={shown(dataset)}", *words, flush=True
    )
    command(
        [sys.executable, "-m", "dlrm.scripts.main", f"--mode={mode}", f"--dataset={dataset}"]
        + words
    )


def command(words: list[Any], env: dict[str, str] | None = None) -> None:
    """Runs a command; where it fails, so does the demo, and the command has said why."""
    done = subprocess.run([str(word) for word in words], env=env, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def title(part: str, text: str) -> None:
    print(f"\n== [{part}] {text} ==", flush=True)


def summary_of(log: Path) -> dict[str, float]:
    return json.loads(log.read_text().splitlines()[-1].removeprefix("DLLL "))["data"]


def shown(path: Path) -> str:
    """The path as a person would type it here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def auc_of(value: float | None) -> str:
    return "undefined (one class only)" if value is None else f"{value:.4f}"


def summarise(raw: Path, dataset: Path, run: Path, seconds: float) -> None:
    trained, tested = summary_of(run / "checkpoints/log.json"), summary_of(run / "test.json")
    rows = json.loads((dataset / "manifest.json").read_text())["rows"]
    lines = [
        ("rows", "  ".join(f"{split} {count:,}" for split, count in rows.items())),
        (
            "ROC AUC",
            f"test {auc_of(tested['auc'])} (chosen on)  "
            f"validation {auc_of(trained['validation_auc'])} (never chosen on)",
        ),
    ]
    if (raw / "planted.json").is_file():
        best = json.loads((raw / "planted.json").read_text())
        reachable = "  ".join(f"{s} {best[s]['auc']:.4f}" for s in ("test", "validation"))
        lines.append(("best possible", f"{reachable}  (planted in the simulated logs)"))
    checkpoints = run / "checkpoints"
    curves = checkpoints / "curves.png"
    lines += [
        ("training", f"{trained['average_train_throughput']:,.0f} samples/s"),
        ("whole demo", f"{seconds:.0f} s"),
        ("dataset", shown(dataset)),
        ("checkpoints", shown(checkpoints)),
        ("log", shown(checkpoints / "log.json")),
        ("page", shown(run / "evaluation" / "evaluation.html")),
        ("curves", shown(curves) if curves.exists() else "none"),
    ]
    width = min(shutil.get_terminal_size().columns, 100)
    print("\n" + " dlrm demo ".center(width, "="))
    for name, value in lines:
        print(f"{name:<14} {value}")
    print("=" * width)


if __name__ == "__main__":
    main()
