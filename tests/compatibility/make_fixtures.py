"""Writes files of the current version that later versions must open.

    python tests/compatibility/make_fixtures.py OUTPUT

OUTPUT, a folder that must not exist yet, receives a dataset of each type, a run of each kind
stopped half-way, and an exported model. `expected.json` and `expected/` hold their rows, their
scores, and the results of the same runs without interruption. All of it is packed beside OUTPUT as
OUTPUT.tar.xz; the archive of version V is kept here as V.tar.xz. The package's own commands write
every file. They run in OUTPUT with relative paths, but checkpoints name the folder of their
dataset: let OUTPUT be in /tmp. A version writes the same bytes every time on the same machine.

The files of a published version are never made again: they must stay as they were. A new version,
or a new kind of file, gets an archive beside the others.

The image network is EfficientNet-B0 with --expand_ratio 1, the smallest that the flags allow:
0.8 million weights. It starts from --init_checkpoint weights in which `ACTIVE` channels of each
layer have a few distinct values and all other channels are zero. A channel whose weights are all
zero has no gradient, so training is real but sparse, and weights, momentum and EMA compress to a
few kilobytes.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from observations import answers, known, read_rows, score, scores_of_rows
from safetensors.torch import save_file

from dlrm.data.verification import MEMORY
from dlrm.train.checkpoints.directory import best_checkpoint, last_checkpoint
from dlrm.vision.efficientnet import EfficientNet

ROOT = Path(__file__).resolve().parents[2]
WORK = "work"  # inputs and uninterrupted runs: not packed
ACTIVE = 6  # nonzero channels of each layer of the image network
CLASSES = 2
NUMERICAL, CATEGORICAL = 3, 5
WORDS = ("who", "saw", "the", "red", "blue", "cat", "dog", "in", "house", "garden", "at", "night")

DLRM = [
    *("--base_device=cpu", "--embedding_dim=4", "--bottom_mlp_sizes=8,4", "--top_mlp_sizes=16,1"),
    *("--batch_size=64", "--test_batch_size=200", "--print_freq=100", "--test_freq=3"),
    *("--warmup_steps=2", "--decay_start_step=6", "--decay_steps=20"),
]
CNN = [
    *("--base_device=cpu", "--model=efficientnet_b0", "--expand_ratio=1", "--image_size=32"),
    *("--norandom_crop", "--centre_crop=1", "--dropout=0", "--mixup_alpha=0.2", "--lr=0.1"),
    *("--batch_size=8", "--test_batch_size=8", "--ema_decay=0.8", "--print_freq=100"),
    *("--epochs=3", "--test_freq=4", "--keep_checkpoints=1"),
]
BERT = [
    *("--base_device=cpu", "--mode=pretrain", "--num_layers=1", "--hidden_size=16"),
    *("--num_heads=2", "--intermediate_size=32", "--attention_dropout=0", "--optimizer=lamb"),
    *("--lr=0.01", "--batch_size=8", "--test_batch_size=16", "--print_freq=100", "--epochs=1"),
    *("--ema_decay=0.8", "--test_freq=4", "--keep_checkpoints=1"),
]
# Run -> command, processes, the last step before it stops, flags; {} is the root folder.
RUNS: dict[str, tuple[str, int, int, list[str]]] = {
    "single": (
        *("main", 1, 9),
        ["--dataset={}/split", *DLRM, "--embedding_optimizer=adam", "--mlp_optimizer=adam"]
        + ["--lr=0.1"],
    ),
    "two_processes": (
        *("main", 2, 7),
        ["--dataset={}/nvidia", *DLRM, "--embedding_optimizer=row_wise_adagrad"]
        + ["--mlp_optimizer=adagrad", "--lr=0.05"],
    ),
    "bf16": (
        *("main", 1, 7),
        ["--dataset={}/split", *DLRM, "--embedding_optimizer=adagrad", "--embedding_dtype=bf16"]
        + ["--shuffle_batch_order", "--lr=0.3"],
    ),
    "csv": ("main", 1, 7, ["--dataset={}/csv", *DLRM, "--lr=2"]),
    "cnn": ("cnn", 1, 5, ["--dataset={}/images", *CNN]),
    "bert": ("bert", 1, 5, ["--dataset={}/shards", "--test_dataset={}/shards", *BERT]),
}
# Dataset -> its kind and the options that read it; see `observations.read_rows`.
DATASETS: dict[str, tuple[str, dict[str, Any]]] = {
    "split": ("clicks", {}),
    "binary": ("clicks", {"dataset_type": "binary", "num_numerical_features": 2}),
    "csv": ("clicks", {}),
    "nvidia": ("clicks", {}),
    "nvidia_2020": ("clicks", {}),
    "synthetic": (
        "clicks",
        {
            "dataset_type": "synthetic_disk",
            "synthetic_dataset_num_entries": 150,
            "synthetic_dataset_table_sizes": [3, 200, 40000],
            "num_numerical_features": 2,
        },
    ),
    "images": ("images", {}),
    "shards": ("text", {}),
    "hdf5": ("text", {}),
}


def main(output: Path) -> None:
    build(output, make)


def build(output: Path, make: Callable[[], dict[str, Any]]) -> None:
    """Makes the folder and its archive.

    Args:
        output: the folder, which must not exist yet.
        make: writes the files in the current folder; returns the content of `expected.json`.
    """
    output.mkdir(parents=True)
    os.chdir(output)
    Path("expected").mkdir()
    Path(WORK).mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        expected = make()
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    os.chdir("..")
    pack(output)


def make() -> dict[str, Any]:
    """Writes all files in the current folder; returns what is expected of them."""
    for one in (make_log, make_nvidia, make_binary, make_csv, make_synthetic, make_images):
        one()
    make_text()
    runs = {name: expect_run(name, run) for name, run in RUNS.items()}
    expected = {"rows": expect_rows(DATASETS), "runs": runs}
    expect_export()
    return expected


def call(*words: object, **environment: str) -> None:
    """Runs Python with arguments, one thread and this repository's package."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **variables, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}:\n{done.stdout}\n{done.stderr}")


def make_log() -> None:
    """Writes a log, and `split` by preprocessing without Java."""
    shape = [f"--num_numerical={NUMERICAL}", f"--num_categorical={CATEGORICAL}"]
    words = ["--rows=1800", "--days=3", "--cardinality_scale=0.01", *shape]
    call("-m", "dlrm.scripts.simulate_logs", f"--output={WORK}/log", *words)
    settings = {"ENGINE": "local", "TOTAL_CORES": "1", "FREQUENCY_LIMIT": "2"}
    paths = {"INPUT_PATH": f"{WORK}/log", "OUTPUT_PATH": f"{WORK}/prepared"}
    script = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    call("-c", script, ROOT / "preproc/prepare_dataset.sh", *shape, **settings, **paths)
    Path(WORK, "prepared/binary_dataset").rename("split")
    lines = Path(WORK, "log/day_2").read_text().splitlines()[:40]
    Path("expected/lines.tsv").write_text("".join(x.split("\t", 1)[1] + "\n" for x in lines))


def make_nvidia() -> None:
    """Writes the rows of `split` as NVIDIA's software does: columns without a manifest.

    The 2021 format has a specification, the 2020 format `model_size.json`.
    """
    for name, description in (("nvidia", "feature_spec.yaml"), ("nvidia_2020", "model_size.json")):
        for file in [Path("split", description), *Path("split").glob("*/*.bin")]:
            target = Path(name, file.relative_to("split"))
            if target.parts[1] in (description, "train", "test", "validation"):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())


def make_binary() -> None:
    """Writes a Parquet file and converts it to `binary`, rows of 4-byte words."""
    import pyarrow
    import pyarrow.parquet

    random = np.random.default_rng(0)
    columns = {"label": random.integers(0, 2, 300)}
    columns |= {f"n{i}": random.normal(0, 1, 300).astype(np.float16) for i in range(2)}
    columns |= {f"c{i}": random.integers(0, size, 300) for i, size in enumerate((7, 300, 40000))}
    columns = {
        name: values.astype(np.float32) if values.dtype == np.float16 else values
        for name, values in columns.items()
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), f"{WORK}/rows.parquet")
    words = [f"--source={WORK}/rows.parquet", "--output=binary", "--output_format=binary"]
    call(ROOT / "preproc/convert_to_binary.py", *words)


def make_csv() -> None:
    """Writes a CSV with missing values and makes `csv` from it."""
    random = np.random.default_rng(1)
    lines = ["city,clicked,age,income"]
    for _ in range(1200):
        age, city = random.integers(18, 90), random.choice(["Oslo", "São Paulo", "", "Ulm"])
        income = "" if random.random() < 0.1 else f"{random.integers(0, 9000) / 8:g}"
        odds = 1 / (1 + np.exp((54 - age) / 15 + 1.5 * (city == "Ulm")))
        lines.append(f"{city},{['no', 'yes'][int(random.random() < odds)]},{age},{income}")
    Path(WORK, "rows.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    table = [line.split(",") for line in lines[1:41]]
    columns = {"city": [row[0] for row in table], "age": [int(row[2]) for row in table]}
    columns["income"] = [row[3] for row in table]
    Path("expected/columns.json").write_text(json.dumps(columns) + "\n")
    words = [f"--input={WORK}/rows.csv", "--output=csv", "--label=clicked", "--positive=yes"]
    words += ["--numerical=age,income", "--categorical=city", "--numeric_transform=standardise"]
    call("-m", "dlrm.scripts.transcode", *words)


def make_synthetic() -> None:
    words = ["--synthetic_dataset_dir=synthetic", "--synthetic_dataset_table_sizes=3,200,40000"]
    words += ["--num_numerical_features=2", "--synthetic_dataset_num_entries=150"]
    call("-m", "dlrm.scripts.prepare_synthetic_dataset", *words)


def make_images() -> None:
    """Writes patterned images and makes `images` from them."""
    from PIL import Image

    rows, columns = np.mgrid[:32, :32]
    for number in range(40):
        label = number % CLASSES
        pattern = (rows * (1 + label) + columns * (number % 5) + 9 * number) % 64 // 8 * 32
        pixels = np.stack([pattern, pattern[::-1], np.full_like(pattern, 60 + 90 * label)], 2)
        file = Path(WORK, "pictures", f"class {label}", f"{number:02}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(file)
    words = [f"--source={WORK}/pictures", "--output=images", "--size=32", "--test_fraction=0.2"]
    call(ROOT / "preproc/prepare_images.py", *words, "--shard_images=24", "--cores=1")


def make_text() -> None:
    """Writes documents of a dozen words; makes `shards` and `hdf5` from them."""
    random = np.random.default_rng(2)
    tokens = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, ".")
    Path(WORK, "vocab.txt").write_text("\n".join(tokens) + "\n")
    documents = [
        "\n".join(" ".join(random.choice(WORDS, 6)) + " ." for _ in range(12)) for _ in range(24)
    ]
    Path(WORK, "text.txt").write_text("\n\n".join(documents) + "\n")
    words = [f"--source={WORK}/text.txt", f"--vocab_file={WORK}/vocab.txt", "--processes=1"]
    words += ["--max_seq_length=32", "--max_predictions_per_seq=5", "--dupe_factor=1"]
    script = ROOT / "preproc/prepare_text.py"
    call(script, *words, "--output=shards", "--num_shards=2")
    call(script, *words, "--output=hdf5", "--output_format=hdf5", "--num_shards=1")


def sparse_weights() -> dict[str, torch.Tensor]:
    """Returns weights with few nonzero channels, which hold few values."""
    network = EfficientNet(num_classes=CLASSES, expand_ratio=1)
    weights = {}
    for index, (name, tensor) in enumerate(network.state_dict().items()):
        value = torch.zeros_like(tensor)
        part = value[:ACTIVE] if value.dim() else value
        if value.dim() > 1:
            part = part[:, :ACTIVE]
            places = torch.arange(part.numel()).view(part.shape)
            steps = (places * (2 * index + 3) + places // 5 + index) % 7 - 3  # -3, -2, ..., 3
            part.copy_(steps / (2 * part[0].numel() ** 0.5))
        elif name.endswith("running_var"):
            value.fill_(1)
        elif name.endswith("weight"):
            part.fill_(1)
        weights[name] = value
    return weights


def expect_rows(datasets: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, tuple]:
    """Stores all rows of datasets as `DATASETS` describes them; returns these."""
    for name, (kind, options) in datasets.items():
        np.savez(f"expected/{name}.npz", **read_rows(kind, Path(name), options))
    return datasets


def expect_run(name: str, run: tuple[str, int, int, list[str]]) -> dict:
    """Makes a run of `RUNS` stopped half-way; returns its results and the uninterrupted run's."""
    command, processes, stop, flags = run
    here = [flag.format(".") for flag in flags]
    launcher = ["torch.distributed.run", f"--nproc_per_node={processes}", "--standalone", "-m"]
    module = [*(launcher if processes > 1 else ()), f"dlrm.scripts.{command}"]
    if command == "cnn":
        save_file(sparse_weights(), f"{WORK}/initial.safetensors")
        here.append(f"--init_checkpoint={WORK}/initial.safetensors")

    def train(directory: str, *others: str) -> dict[str, float]:
        log = Path(WORK, f"{Path(directory).name}.json")
        log.unlink(missing_ok=True)
        own = [f"--save_checkpoint_path={directory}", f"--log_path={log}"]
        call("-m", *module, *here, *own, *others, **{"MASTER_ADDR": "127.0.0.1"})
        return known(json.loads(log.read_text().splitlines()[-1][5:])["data"])

    directory, whole = Path("runs", name), Path(WORK, "whole", name)
    train(str(directory), f"--max_steps={stop}")
    expected = {"command": command, "processes": processes, "step": stop, "flags": flags}
    expected["final_metrics"] = train(str(whole))
    expected["final_step"] = _step(last_checkpoint(whole))
    expected["tested"] = score(command, flags, directory, Path("."))
    expected["final_tested"] = score(command, flags, whole, Path("."))
    expected["best_step"] = _step(best_checkpoint(directory))
    if command == "main":
        scores = scores_of_rows(Path("."), flags, directory)
        scores["final"] = scores_of_rows(Path("."), flags, whole)["last"]
        np.savez(f"expected/scores-{name}.npz", **scores)
    return expected


def _step(checkpoint: Path | None) -> int:
    assert checkpoint is not None
    return int(checkpoint.name.removeprefix("step-"))


def expect_export() -> None:
    """Exports the best checkpoint of `single`; stores its responses."""
    best = best_checkpoint("runs/single")
    assert best is not None
    assert best != last_checkpoint("runs/single"), "expected a run whose best is not its last"
    flags = [f"--checkpoint=runs/single/{best.name}", "--save-dir=models"]
    call(ROOT / "triton/export.py", *flags, "--dataset=split", "--python")
    np.savez("expected/answers.npz", **answers(Path("models/model/1"), Path(), "split"))


def pack(output: Path) -> None:
    """Packs all files but the inputs and memories of checks, sorted, without owners or times."""
    archive = output.with_name(f"{output.name}.tar.xz")
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in sorted(output.rglob("*")):
            name = path.relative_to(output)
            if path.is_file() and name.parts[0] != WORK and name.name != MEMORY:
                entry = tarfile.TarInfo(name.as_posix())  # hard links become separate files
                entry.size, entry.mode = path.stat().st_size, 0o644
                with open(path, "rb") as file:
                    tar.addfile(entry, file)
    print(f"{archive}: {archive.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).absolute())
