"""Exported networks with lists give the scores of trained ones on every platform."""

import shutil

import numpy as np
import pytest
import torch

from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.serving.network.compare import compare_tables
from dlrm.serving.network.exportable import example_like, exportable
from dlrm.serving.network.platforms import PLATFORMS
from dlrm.serving.network.quantize import quantize_tables
from dlrm.serving.rows.inputs import Inputs

SIZES = (50, 1, 300, 20)
MIXED = {"table_poolings": ("mean", None, "sum", "mean")}
POOLINGS = [{"pooling": "sum"}, {"pooling": "mean"}, MIXED]


def network(**others):
    sizes = {"embedding_dim": 8, "bottom_mlp_sizes": (16, 8), "top_mlp_sizes": (32, 1)}
    return DLRM(DLRMConfig(SIZES, 5, **{**sizes, **others}), seed=3).eval()


def example(rows=33, weighted=True, seed=0, longest=9):
    """Returns rows of lists, many of them empty; the first row's have the full length."""
    random = np.random.default_rng(seed)
    lengths = random.integers(-2, longest, (rows, len(SIZES))).clip(0).astype(np.int32)
    lengths[:1] = longest
    tables = np.tile(np.arange(len(SIZES)), rows).repeat(lengths.ravel())
    ids = random.integers(0, np.array(SIZES)[tables])
    weights = random.normal(size=len(ids)).astype(np.float32) if weighted else None
    return Inputs(random.normal(size=(rows, 5)).astype(np.float32), ids, lengths, weights)


def empty(rows, weighted=True):
    inputs = example(rows, weighted)
    weights = inputs.weights[:0] if weighted else None
    return Inputs(inputs.numerical, inputs.ids[:0], np.zeros_like(inputs.lengths), weights)


@torch.no_grad()
def logits(model, inputs):
    numerical, ids, lengths, weights = (
        None if array is None else torch.from_numpy(array) for array in inputs
    )
    return model(numerical, ids, lengths, id_weights=weights).numpy()


@torch.no_grad()
def scores(exported, inputs):
    return exported(*map(torch.from_numpy, inputs.arrays)).numpy()[:, 0]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "others",
    [*POOLINGS, {"wide": True, **MIXED}, {"hash_indices": True, "max_table_size": 20, **MIXED}],
)
def test_every_pooling_scores_as_trained(others, weighted):
    model = network(**others)
    for inputs in (example(weighted=weighted), example(1, weighted), empty(3, weighted)):
        if model.wide is not None:
            torch.nn.init.normal_(model.wide.weight)  # they start as zeros
        exported = exportable(model, quantize_tables(model, "fp32"), inputs)
        np.testing.assert_allclose(
            scores(exported, inputs), logits(model, inputs), rtol=1e-5, atol=1e-5
        )


def test_an_id_outside_its_table_is_unknown():
    model, inputs = network(**MIXED), example()
    exported = exportable(model, quantize_tables(model, "fp32"), inputs)
    first = np.zeros_like(inputs.ids)
    first[9:18] = 7  # in a one-row table
    wrong = np.where(first, first, -1)
    np.testing.assert_array_equal(
        scores(exported, inputs._replace(ids=wrong)),
        scores(exported, inputs._replace(ids=first * 0)),
    )


# "python" writes the file of "onnx", and "aot" compiles for a minute.
WRITTEN = [name for name in PLATFORMS if name not in ("python", "aot")]


def write(platform, exported, inputs, directory):
    """Writes and opens a platform's file."""
    for package in PLATFORMS[platform].packages:
        pytest.importorskip(package, reason="needs dlrm[serve]")
    PLATFORMS[platform].write(exported, example_like(inputs), directory)
    return PLATFORMS[platform].open(directory)


@pytest.mark.parametrize("platform", WRITTEN)
@pytest.mark.parametrize(
    ("precision", "weighted"),
    [("fp32", True), ("fp32", False), ("fp16", False), ("int8", True), ("int8", False)],
)
def test_written_files_score_as_the_network(tmp_path, platform, precision, weighted):
    model = network(wide=True, **MIXED)
    torch.nn.init.normal_(model.wide.weight, std=0.1)
    tables = quantize_tables(model, precision)
    score = write(platform, exportable(model, tables, example()), example(2, weighted), tmp_path)
    with torch.no_grad():  # the oracle: the trained network with quantized rows
        model.embeddings.weight.copy_(tables.float())
        if precision != "fp32":
            model.wide.weight.copy_(model.wide.weight.half())
    for inputs in (
        *(example(rows, weighted, seed=1) for rows in (1400, 33, 2, 1)),
        example(2, weighted, longest=2000),
        empty(1, weighted),
        empty(700, weighted),
    ):
        np.testing.assert_allclose(
            score(*inputs.arrays)[:, 0], logits(model, inputs), rtol=1e-4, atol=1e-4
        )


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("weighted", [True, False])
def test_a_compiled_package_scores_as_the_network(tmp_path, weighted):
    model = network(bottom_mlp_sizes=(8,), top_mlp_sizes=(1,), **MIXED)
    inputs = example(weighted=weighted)
    exported = exportable(model, quantize_tables(model, "fp32"), inputs)
    score = write("aot", exported, inputs, tmp_path)
    for inputs in (example(33, weighted, seed=1), example(1, weighted, seed=2)):
        np.testing.assert_allclose(
            score(*inputs.arrays)[:, 0], logits(model, inputs), rtol=1e-5, atol=1e-5
        )


def test_narrow_ids_are_taken(tmp_path):
    model, inputs = network(**MIXED), example()
    narrow = inputs._replace(
        numerical=inputs.numerical.astype(np.float16), ids=inputs.ids.astype(np.int32)
    )
    exported = exportable(model, quantize_tables(model, "fp32"), narrow)
    score = write("onnx", exported, narrow, tmp_path)
    wide = inputs._replace(numerical=narrow.numerical.astype(np.float32))
    np.testing.assert_allclose(
        score(*narrow.arrays)[:, 0], logits(model, wide), rtol=1e-4, atol=1e-4
    )


def test_tables_are_compared_one_by_one():
    model, inputs = network(**MIXED), example(300)
    labels = (np.arange(300) % 3 == 0).astype(np.float32)
    found = compare_tables(model, quantize_tables(model, "int8"), inputs, labels)
    assert [one.greatest_difference > 0 for one in found] == [True, True, True, True]
    full = compare_tables(model, quantize_tables(model, "fp32"), inputs, labels)
    assert [one.greatest_difference for one in full] == [0.0] * 4
