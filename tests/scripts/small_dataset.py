"""A small dataset whose clicks can be learned, and flags of a model and run that fit it."""

import numpy as np

from dlrm.data import layout
from dlrm.data.clicks.feature_spec import FeatureSpec

TABLE_SIZES = (50, 200, 3, 130)
NUM_NUMERICAL = 3
ROWS = {"train": 4000, "test": 1500, "validation": 1501}
MODEL = ["--embedding_dim=4", "--bottom_mlp_sizes=8,4", "--top_mlp_sizes=16,1"]
RUN = [
    *("--batch_size=256", "--test_batch_size=400", "--print_freq=4"),
    *("--lr=0.02", "--warmup_steps=4", "--decay_steps=0"),
    *("--embedding_optimizer=adam", "--mlp_optimizer=adam"),
]


def write_dataset(directory, rows=ROWS, table_sizes=TABLE_SIZES, seed=0):
    """Writes a split-binary dataset whose click odds are a sum of per-value effects."""
    random = np.random.default_rng(1)
    effects = [random.normal(0, 1.2, size) for size in table_sizes]
    random = np.random.default_rng(seed)
    spec = FeatureSpec.default(directory, NUM_NUMERICAL, table_sizes, list(rows))
    for split, count in rows.items():
        (directory / split).mkdir(parents=True)
        ids = [random.integers(0, size, count) for size in table_sizes]
        numerical = random.normal(1, 1, (count, NUM_NUMERICAL)).astype(np.float16)
        logits = numerical[:, 0] + sum(e[i] for e, i in zip(effects, ids, strict=True)) - 1
        labels = random.random(count) < 1 / (1 + np.exp(-logits))
        labels.tofile(spec.file(split, spec.label))
        numerical.tofile(spec.file(split, spec.numerical[0]))
        for name, values in zip(spec.categorical, ids, strict=True):
            values.astype(spec.dtype(name)).tofile(spec.file(split, name))
    spec.save()
    layout.write_model_size(directory, table_sizes)
    layout.write_dataset_manifest(directory, rows, table_sizes, {})
    return directory
