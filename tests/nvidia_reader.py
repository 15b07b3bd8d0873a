"""NVIDIA's reader of datasets of 2021 and later, written from its rules as an oracle."""

from pathlib import Path

import numpy as np
import yaml


def read_as_nvidia(directory):
    """Returns split -> (labels, numbers, ids by table); fails where NVIDIA's reader would.

    Rules: the mappings are exactly train and test; the channels are categorical, numerical and
    label, which has one feature; a chunk is `split_binary` with one file; one chunk has the numbers
    in channel order, as float16; each table has its own chunk, and so does the label, as bool; a
    mapping has each feature once.
    """
    directory = Path(directory)
    spec = yaml.safe_load((directory / "feature_spec.yaml").read_text())
    features, channels = spec["feature_spec"], spec["channel_spec"]
    assert spec["source_spec"].keys() == {"train", "test"}
    assert channels.keys() == {"categorical", "numerical", "label"}
    numerical, categorical, (label,) = (channels[c] for c in ("numerical", "categorical", "label"))
    assert sorted([*numerical, *categorical, label]) == sorted(features)
    splits = {}
    for split, chunks in spec["source_spec"].items():
        columns = {}
        for chunk in chunks:
            assert chunk["type"] == "split_binary"
            (name,) = chunk["files"]
            first = chunk["features"][0]
            assert chunk["features"] == (numerical if first in numerical else [first])
            assert first not in columns
            columns[first] = np.fromfile(directory / name, features[first]["dtype"])
        assert columns.keys() == {label, numerical[0], *categorical}
        numbers = columns[numerical[0]].reshape(-1, len(numerical))
        assert numbers.dtype == np.float16
        assert columns[label].dtype == bool
        ids = [columns[name] for name in categorical]
        assert len(numbers) == len(columns[label])
        for name, values in zip(categorical, ids, strict=True):
            assert len(values) == len(numbers)
            assert values.min(initial=0) >= 0
            assert values.max(initial=0) < features[name]["cardinality"]
        splits[split] = columns[label], numbers, ids
    return splits
