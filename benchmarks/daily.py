"""Follows a simulated log with drift day by day, and kills the command on the way.

    python benchmarks/daily.py [--rows 1400000] [--days 14] [--kills 30] [flags of dlrm daily]

The log has effects that turn by --drift radians a day, and a share --new_ids of its ids is replaced
each day; the best reachable AUC of each day is planted. `dlrm daily` learns it, and judges beside
the continued model one that is retrained on all days before, and that of the first day. With
--kills, the command runs once more from the beginning and is killed so often, at random times of
an uninterrupted run, half of them aimed at the seconds in which a step ends; the records and the
weights of both are compared.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def write_schema(path: Path, numericals: int, categoricals: int) -> None:
    """Writes a schema of simulated logs as tables."""
    lines = ["label: 0", r'format: {delimiter: "\t"}', "numerical:"]
    lines += [
        f"  - {{column: {i}, type: decimal, transform: log}}" for i in range(1, 1 + numericals)
    ]
    lines += ["categorical:"]
    lines += [
        f"  - {{column: {numericals + i}, type: hexadecimal, frequency_limit: 5}}"
        for i in range(1, 1 + categoricals)
    ]
    path.write_text("\n".join(lines) + "\n")


def dlrm(*words: object) -> subprocess.Popen:
    """Starts a command."""
    command = [sys.executable, "-m", "dlrm", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def seconds_of(chain: Path) -> dict[str, dict[str, float]]:
    """Returns the seconds of each day by step."""
    seconds: dict[str, dict[str, float]] = {}
    for line in (chain / "daily.log").read_text().splitlines():
        if line.startswith('{"day"'):
            step = json.loads(line)
            seconds.setdefault(step["step"], {})[step["day"]] = step["seconds"]
    return seconds


def ratio_of_retraining(seconds: dict[str, dict[str, float]], names: list[str]) -> float:
    """Returns the time of retraining over that of continuing, for models of the same rows.

    The model that judges a day is retrained on all days before it, or continued by the last of
    these. The first day is trained alike by both and left out.
    """
    retrained = sum(seconds["retrain"][name] for name in names[2:])
    continued = sum(seconds[s][name] for s in ("prepare", "train") for name in names[1:-1])
    return retrained / continued


def show(chain: Path, planted: list[dict]) -> None:
    """Prints the metrics of each day and the time of each step."""
    days = json.loads((chain / "daily.json").read_text())["days"]
    models = [m for m in ("continued", "retrained", "frozen") if m in days[-1]["judged"]]
    heads = [f"AUC {model}" for model in models] + ["reachable", "calibration", "alarms"]
    print(f"{'day':<8}" + "".join(f"{head:>15}" for head in heads))
    means: dict[str, list[float]] = {model: [] for model in models}
    for day, best in zip(days[1:], planted[1:], strict=True):
        judged = day["judged"]
        for model in models:
            means[model].append(judged[model]["auc"])
        cells = [f"{judged[model]['auc']:.4f}" for model in models] + [f"{best['auc']:.4f}"]
        cells += [f"{judged['continued']['calibration']:.4f}", str(len(day["alarms"]))]
        print(f"{day['name']:<8}" + "".join(f"{cell:>15}" for cell in cells))
    print("mean    " + "".join(f"{sum(own) / len(own):>15.4f}" for own in means.values()))
    seconds = seconds_of(chain)
    totals = (f"{step} {sum(by_day.values()):.1f}" for step, by_day in seconds.items())
    print("seconds " + ", ".join(totals))
    if "retrain" in seconds:
        ratio = ratio_of_retraining(seconds, [day["name"] for day in days])
        print(f"retraining takes {ratio:.1f} times the time of preparing and continuing")


def learned(chain: Path) -> dict[str, bytes]:
    """Returns the files that a chain leaves, except logs and times."""
    files = {}
    for path in sorted(chain.rglob("*")):
        name = path.relative_to(chain).as_posix()
        if path.is_file() and (name == "daily.json" or name.endswith((".safetensors", ".bin"))):
            files[name] = path.read_bytes()
    return files


def kill(words: list[object], chain: Path, kills: int, whole: float) -> int:
    """Runs a command, and again whenever it was killed; returns the number of kills."""
    draw, done = random.Random(0), 0
    while True:
        process = dlrm(*words, "--output", chain)
        if done == kills:
            code = process.wait()
            assert code in (0, 3), code
            return done
        wait, aimed = draw.uniform(0, whole / kills * 2), done % 2
        log, began = chain / "daily.log", time.monotonic()
        size = log.stat().st_size if log.exists() else 0
        while process.poll() is None and time.monotonic() - began < wait:
            time.sleep(0.005)
            if aimed and log.exists() and log.stat().st_size != size:  # a step has ended
                time.sleep(draw.uniform(0, 0.05))
                break
        if process.poll() is not None:
            assert process.returncode in (0, 3), process.returncode
            return done
        subprocess.run(["pkill", "-KILL", "-g", str(process.pid)], check=False)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_400_000)
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--numericals", type=int, default=13)
    parser.add_argument("--categoricals", type=int, default=26)
    parser.add_argument("--drift", type=float, default=0.05)
    parser.add_argument("--new_ids", type=float, default=0.05)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--compare", default="frozen,retrained")
    options, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shape = ["--num_numerical", options.numericals, "--num_categorical", options.categoricals]
        drift = ["--drift", options.drift, "--new_ids", options.new_ids, "--missing", 0]
        size = ["--rows", options.rows, "--days", options.days]
        assert dlrm("simulate", "--output", root / "raw", *size, *shape, *drift).wait() == 0
        write_schema(root / "schema.yaml", options.numericals, options.categoricals)
        words: list[object] = ["daily", "--days", root / "raw", "--schema", root / "schema.yaml"]
        words += ["--input_format", "csv", "--noheader", "--compare", options.compare]
        words += others
        began = time.monotonic()
        code = dlrm(*words, "--output", root / "chain").wait()
        whole = time.monotonic() - began
        assert code in (0, 3), code
        show(root / "chain", json.loads((root / "raw/planted.json").read_text())["days"])
        if options.kills:
            (root / "chain").rename(root / "whole")  # as checkpoints name their datasets
            kills = kill(words, root / "chain", options.kills, whole)
            files = learned(root / "whole"), learned(root / "chain")
            differ = sorted(n for n in {*files[0], *files[1]} if files[0].get(n) != files[1].get(n))
            print(f"{kills} kills: {len(files[0])} files, {len(differ)} differ {differ[:3]}")


if __name__ == "__main__":
    main()
