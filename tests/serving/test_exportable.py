"""The exported network gives the scores of the trained one, on every platform."""

import numpy as np
import pytest
import torch

from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.model.layers.interaction import INTERACTIONS
from dlrm.serving.network.exportable import Exportable, example_like
from dlrm.serving.network.platforms import PLATFORMS
from dlrm.serving.network.quantize import quantize_tables
from dlrm.serving.rows.inputs import Inputs

pytestmark = pytest.mark.long
SIZES = (50, 1, 7, 300, 20, 4, 9, 30)  # with the dense vector more than one strip of products
LISTS = [None, "weighted", "unweighted"]
MIXED = {"table_poolings": ("mean", None, "sum", "mean") * 2}
# The list of field 0 is attended to by field 1, which shares its table.
ATTENDED = {
    "table_sizes": (50, 50, *SIZES[2:]),
    "field_tables": (0, 0, 1, 2, 3, 4, 5, 6),
    "field_targets": (1, *[None] * 7),
    "table_poolings": ("attention", None, "sum", "mean", *[None] * 4),
}
TOGETHER = {
    **{"wide": True, "numerical_embedding": "piecewise", "numerical_bins": 8, "dropout": 0.1},
    **{"interaction_op": "dot,dcn", "cross_rank": 4, "cross_structure": "parallel"},
    "batch_norm": True,
}
UNEQUAL = {
    **{"ensemble": "dot,quadratic,dcn", "cross_structure": "parallel", "wide": True},
    **{"batch_norm": True, "dropout": 0.1, "numerical_embedding": "piecewise"},
}
PARTS = [  # parts other than dots and MLPs, alone and together
    {"wide": True},
    {"numerical_embedding": "piecewise", "numerical_bins": 5},
    {"interaction_op": "dcn"},
    {"interaction_op": "dcn,dot", "cross_rank": 4},
    {"interaction_op": "dcn", "cross_structure": "parallel"},
    {"interaction_op": "dot,dcn", "cross_structure": "parallel", "top_mlp_sizes": (1,)},
    {"batch_norm": True, "dropout": 0.5},
    {"interaction_op": "quadratic", "batch_norm": True, "dropout": 0.5, "self_ensemble": True},
    {"interaction_op": "quadratic,dot", "quadratic_rows": 3, "wide": True},
    *({"interaction_op": name} for name in INTERACTIONS if name != "cuda_dot"),  # the default
    TOGETHER,
    {"ensemble": 3},
    UNEQUAL,
    {
        **{"ensemble": 2, "interaction_op": "cuda_dot,dcn", "cross_structure": "parallel"},
        **{"cross_rank": 4, "wide": True, "numerical_embedding": "piecewise", "dropout": 0.1},
        "batch_norm": True,
    },
]


def network(**others):
    sizes = {"embedding_dim": 8, "bottom_mlp_sizes": (16, 8), "top_mlp_sizes": (32, 16, 1)}
    config = DLRMConfig(**{"table_sizes": SIZES, "num_numerical_features": 5, **sizes, **others})
    model = DLRM(config, seed=3)
    random = torch.Generator().manual_seed(5)
    if model.wide is not None:
        with torch.no_grad():
            model.wide.weight.copy_(torch.randn(model.wide.weight.shape, generator=random))
    if config.numerical_embedding == "piecewise":
        counts = (6, 1, 2, 3, 4)
        edges = [torch.randn(n, generator=random).sort().values.numpy() for n in counts]
        model.numerical_embedding.set_edges(edges)
    for _ in range(3 * config.batch_norm):  # fills the statistics
        numerical, ids = map(torch.from_numpy, example(50).arrays)
        model(numerical, ids[:, : len(config.table_sizes)])
    return model.eval()


def example(rows=33, seed=0, lists=None, longest=9):
    """Returns rows of an id each, or of lists, many empty; the first row's have the full length."""
    random = np.random.default_rng(seed)
    numerical = random.normal(size=(rows, 5)).astype(np.float32)
    if lists is None:
        return Inputs(numerical, np.stack([random.integers(0, size, rows) for size in SIZES], 1))
    lengths = random.integers(-2, longest, (rows, len(SIZES))).clip(0).astype(np.int32)
    lengths[:1] = longest
    ids = random.integers(0, sizes_of(lengths))
    weights = random.normal(size=len(ids)).astype(np.float32) if lists == "weighted" else None
    return Inputs(numerical, ids, lengths, weights)


def sizes_of(lengths):
    """Returns the size of the table of each id."""
    return np.tile(SIZES, len(lengths)).repeat(lengths.ravel())


def empty(rows, lists):
    inputs = example(rows, 0, lists)
    weights = inputs.weights[:0] if lists == "weighted" else None
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


def assert_close(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"embedding_dtype": "bf16"},
        {"top_mlp_sizes": (1,)},
        {"hash_indices": True, "max_table_size": 20},
        {"table_sizes": SIZES[:1]},
        {"table_sizes": SIZES[:6]},
        *PARTS,
        {**PARTS[-1], "hash_indices": True, "max_table_size": 20},
        {"ensemble": 2, "interaction_op": "dot", "table_sizes": SIZES[:6]},
    ],
)
def test_every_architecture_scores_as_trained(others):
    model = network(**others)
    numerical, ids, *_ = example()
    inputs = Inputs(numerical, ids[:, : len(model.config.table_sizes)])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exported = Exportable(model, quantize_tables(model, "fp32"))
    assert_close(scores(exported, inputs), logits(model, inputs))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("lists", LISTS[1:])
@pytest.mark.parametrize(
    "others",
    [
        {"pooling": "sum"},
        {"pooling": "mean"},
        MIXED,
        {"wide": True, **MIXED},
        {"hash_indices": True, "max_table_size": 20, **MIXED},
        {"wide": True, **ATTENDED},
        {"hash_indices": True, "max_table_size": 20, "pooling": "mean", **ATTENDED},
    ],
)
def test_every_pooling_scores_as_trained(others, lists):
    model = network(**others)
    for inputs in (example(lists=lists), example(1, lists=lists), empty(3, lists)):
        exported = Exportable(model, quantize_tables(model, "fp32"))
        assert_close(scores(exported, inputs), logits(model, inputs))


def test_probabilities_are_those_of_the_logits():
    model = network()
    exported = Exportable(model, quantize_tables(model, "fp32"), probability=True)
    expected = 1 / (1 + np.exp(-logits(model, example()).astype(np.float64)))
    np.testing.assert_allclose(scores(exported, example()), expected, rtol=1e-5)


@pytest.mark.parametrize("lists", LISTS)
def test_an_id_outside_its_table_is_unknown(lists):
    model, inputs = network(**MIXED if lists else {}), example(lists=lists)
    exported = Exportable(model, quantize_tables(model, "fp32"))
    limits = np.broadcast_to(SIZES, inputs.ids.shape) if not lists else sizes_of(inputs.lengths)
    unknown, wrong = inputs.ids.copy(), inputs.ids.copy()
    unknown.flat[::5] = 0
    wrong.flat[::5] = limits.flat[::5]
    wrong.flat[::10] = -1
    np.testing.assert_array_equal(
        scores(exported, inputs._replace(ids=wrong)), scores(exported, inputs._replace(ids=unknown))
    )


WRITTEN = [name for name in PLATFORMS if name != "python"]  # which writes the file of "onnx"


def write(platform, exported, inputs, directory):
    """Writes and opens a platform's file."""
    for package in PLATFORMS[platform].packages:
        pytest.importorskip(package, reason="needs dlrm[serve]")
    PLATFORMS[platform].write(exported, example_like(inputs), directory)
    return PLATFORMS[platform].open(directory)


@pytest.mark.parametrize("platform", WRITTEN)
@pytest.mark.parametrize(
    ("precision", "lists", "others"),
    [
        *((precision, None, {}) for precision in ("fp32", "fp16")),
        *(("fp32", lists, others) for lists in LISTS[1:] for others in (MIXED, ATTENDED)),
        ("fp16", "unweighted", MIXED),
    ],
)
def test_written_files_score_as_the_network(tmp_path, platform, precision, lists, others):
    model = network(wide=True, **others)
    tables = quantize_tables(model, precision)
    exported = Exportable(model, tables)
    score = write(platform, exported, example(2, lists=lists), tmp_path)
    with torch.no_grad():  # the oracle: the trained network with the quantized rows
        model.embeddings.weight.copy_(tables.float())
        if precision != "fp32":
            model.wide.weight.copy_(model.wide.weight.half())
    given = [example(rows, 1, lists) for rows in (33, 1, 2)]
    if lists:
        given += [example(1400, 1, lists), example(2, 0, lists, longest=2000)]
        given += [empty(1, lists), empty(700, lists)]
    for inputs in given:
        assert_close(score(*inputs.arrays)[:, 0], logits(model, inputs), 1e-4 if lists else 1e-5)


@pytest.mark.parametrize("platform", WRITTEN)
@pytest.mark.parametrize(
    "others",
    [
        *(parts for parts in PARTS if parts not in (TOGETHER, UNEQUAL)),
        *(pytest.param(parts, marks=pytest.mark.slow) for parts in (TOGETHER, UNEQUAL)),
    ],
    ids=lambda others: " ".join(map(str, others.values())),
)
def test_every_part_is_written(tmp_path, platform, others):
    model = network(**others)
    exported = Exportable(model, quantize_tables(model, "fp32"))
    score = write(platform, exported, example(), tmp_path)
    for rows in (33, 1):
        numerical, ids, *_ = example(rows, seed=1)
        numerical[0, 0], numerical[-1, 1] = 1e4, -1e4  # beyond all edges
        inputs = Inputs(numerical, ids)
        assert_close(score(*inputs.arrays)[:, 0], logits(model, inputs), 1e-4)


@pytest.mark.parametrize("platform", WRITTEN)
@pytest.mark.parametrize("lists", [None, "weighted"])
def test_narrow_inputs_are_taken(tmp_path, platform, lists):
    model, inputs = network(**MIXED if lists else {}), example(lists=lists)
    narrow = inputs._replace(
        numerical=inputs.numerical.astype(np.float16), ids=inputs.ids.astype(np.int32)
    )
    exported = Exportable(model, quantize_tables(model, "fp32"))
    score = write(platform, exported, narrow, tmp_path)
    wide = inputs._replace(numerical=narrow.numerical.astype(np.float32))
    assert_close(score(*narrow.arrays)[:, 0], logits(model, wide), 1e-4 if lists else 1e-5)


def test_a_value_beyond_float16_is_named():
    for part, row in (("embeddings", 53), ("wide", 51)):
        model = network(wide=True)
        with torch.no_grad():
            getattr(model, part).weight[row] = 1e6
        with pytest.raises(ValueError, match="table 2: .*beyond float16"):
            quantize_tables(model, "fp16")
