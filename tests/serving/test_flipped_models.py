"""A flipped bit in any file of a recalibrated model or an ensemble is named, not scored with."""

import random
import re

import pytest

import dlrm
from dlrm.serving.recalibration import of_sampling_rate, write_recalibrated
from dlrm.train.checkpoints.directory import find_checkpoint
from dlrm.train.checkpoints.ensemble import write_ensemble

pytestmark = pytest.mark.slow

SEED, FLIPS = 20261125, 100


def write_recalibration(checkpoint, directory):
    write_recalibrated(checkpoint, of_sampling_rate(0.5), directory)


def write_mean(checkpoint, directory):
    """Writes what `--seeds` does: a checkpoint of checkpoints."""
    write_ensemble([checkpoint, checkpoint], directory, 1, {"auc": 0.5})


@pytest.mark.parametrize("write", [write_recalibration, write_mean])
def test_a_hundred_flipped_bits_are_named(trained, tmp_path, write):
    model = tmp_path / "model"
    write(find_checkpoint(trained.checkpoint), model)
    for path in filter(lambda p: p.is_file(), model.rglob("*")):  # hard links become copies
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    dlrm.load(model)
    files = sorted(p for p in model.rglob("*") if p.is_file() and p.stat().st_size)
    draw = random.Random(SEED)
    for number in range(FLIPS):
        path = files[number % len(files)]
        whole = path.read_bytes()
        damaged, place = bytearray(whole), draw.randrange(8 * len(whole))
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises((ValueError, OSError), match=re.escape(path.name)):
            dlrm.load(model)
        path.write_bytes(whole)
    print(f"{FLIPS} flips in {len(files)} files, seed {SEED}: all named")
