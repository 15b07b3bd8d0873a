"""The exported network gives the scores of the trained one, on every platform."""

import shutil

import numpy as np
import pytest
import torch

from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.model.ensemble import Ensemble
from dlrm.model.layers.interaction import INTERACTIONS
from dlrm.serving.network.compare import compare_tables
from dlrm.serving.network.exportable import ExportableDLRM, exportable
from dlrm.serving.network.platforms import PLATFORMS
from dlrm.serving.network.quantize import QuantizedTables, quantize_tables
from dlrm.serving.rows.inputs import Inputs

pytestmark = pytest.mark.long
SIZES = (50, 1, 7, 300, 20, 4, 9, 30)  # with the dense vector more than one strip of products


PARTS = [  # parts other than dots and MLPs, alone and together
    {"wide": True},
    {"numerical_embedding": "piecewise", "numerical_bins": 5},
    {"numerical_embedding": "bins", "numerical_bins": 7},
    {"numerical_embedding": "periodic", "numerical_frequencies": 3},
    {"interaction_op": "dcn"},
    {"interaction_op": "dcn,dot", "cross_rank": 4},
    {"interaction_op": "dcn", "cross_structure": "parallel"},
    {"interaction_op": "dot,dcn", "cross_structure": "parallel", "top_mlp_sizes": (1,)},
    {"batch_norm": True, "dropout": 0.5},
    {
        **{"wide": True, "numerical_embedding": "piecewise", "numerical_bins": 8, "dropout": 0.1},
        **{"interaction_op": "dot,dcn", "cross_rank": 4, "cross_structure": "parallel"},
        "batch_norm": True,
    },
    {"ensemble": 3},
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
    if config.numerical_embedding in ("piecewise", "bins"):
        counts = (6, 1, 2, 3, 4)
        edges = [torch.randn(n, generator=random).sort().values.numpy() for n in counts]
        model.numerical_embedding.set_edges(edges)
    for _ in range(3 * config.batch_norm):  # fills the statistics
        numerical, ids = map(torch.from_numpy, example(50).arrays)
        model(numerical, ids[:, : len(config.table_sizes)])
    return model.eval()


def example(rows=33, seed=0):
    random = np.random.default_rng(seed)
    ids = np.stack([random.integers(0, size, rows) for size in SIZES], 1)
    return Inputs(random.normal(size=(rows, 5)).astype(np.float32), ids)


def logits(model, inputs):
    with torch.no_grad():
        return model(*map(torch.from_numpy, inputs.arrays)).numpy()


@pytest.mark.parametrize(
    "others",
    [
        {},
        *({"interaction_op": name} for name in INTERACTIONS),
        {"embedding_type": "multi_table"},
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
    exported = ExportableDLRM(model, quantize_tables(model, "fp32"))
    expected = logits(model, inputs)
    np.testing.assert_allclose(logits(exported, inputs)[:, 0], expected, rtol=1e-5, atol=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_probabilities_are_those_of_the_logits():
    model = network()
    exported = ExportableDLRM(model, quantize_tables(model, "fp32"), probability=True)
    expected = 1 / (1 + np.exp(-logits(model, example()).astype(np.float64)))
    np.testing.assert_allclose(logits(exported, example())[:, 0], expected, rtol=1e-5)


def test_an_id_outside_its_table_is_unknown():
    model = network()
    exported = ExportableDLRM(model, quantize_tables(model, "fp32"))
    numerical, ids, *_ = example()
    unknown, wrong = ids.copy(), ids.copy()
    unknown[3, 0] = unknown[4, 3] = 0
    wrong[3, 0], wrong[4, 3] = SIZES[0], -1
    np.testing.assert_array_equal(
        logits(exported, Inputs(numerical, wrong)), logits(exported, Inputs(numerical, unknown))
    )


# "python" writes the file of "onnx", and "aot" compiles for a minute.
WRITTEN = [name for name in PLATFORMS if name not in ("python", "aot")]


def write(platform, exported, inputs, directory):
    """Writes and opens a platform's file."""
    tensors = tuple(torch.from_numpy(array[:2]) for array in inputs.arrays)
    for package in PLATFORMS[platform].packages:
        pytest.importorskip(package, reason="needs dlrm[serve]")
    PLATFORMS[platform].write(exported, tensors, directory)
    return PLATFORMS[platform].open(directory)


@pytest.mark.parametrize("platform", WRITTEN)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_written_files_score_as_the_network(tmp_path, platform, precision):
    model = network()
    tables = quantize_tables(model, precision)
    exported = ExportableDLRM(model, tables).eval()
    score = write(platform, exported, example(), tmp_path)
    with torch.no_grad():  # the oracle: the trained network with the quantized rows
        model.embeddings.weight.copy_(tables.float())
    for rows in (33, 1, 2):
        inputs = example(rows, seed=1)
        np.testing.assert_allclose(
            score(*inputs.arrays)[:, 0], logits(model, inputs), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("platform", WRITTEN)
@pytest.mark.parametrize("others", PARTS, ids=lambda others: " ".join(map(str, others.values())))
def test_every_part_is_written(tmp_path, platform, others):
    model = network(**others)
    exported = ExportableDLRM(model, quantize_tables(model, "fp32")).eval()
    score = write(platform, exported, example(), tmp_path)
    for rows in (33, 1):
        numerical, ids, *_ = example(rows, seed=1)
        numerical[0, 0], numerical[-1, 1] = 1e4, -1e4  # beyond all edges
        inputs = Inputs(numerical, ids)
        np.testing.assert_allclose(
            score(*inputs.arrays)[:, 0], logits(model, inputs), rtol=1e-4, atol=1e-4
        )


def test_several_packed_ensembles_average_their_logits():
    """Like those of `--seeds` with `--ensemble`."""
    members = [network(ensemble=2, wide=True), network(ensemble=3, wide=True)]
    model = Ensemble(members).eval()
    exported = exportable(model, quantize_tables(model, "fp32"), example())
    expected = (logits(members[0], example()) + logits(members[1], example())) / 2
    np.testing.assert_allclose(logits(model, example()), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits(exported, example())[:, 0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_wide_weights_beside_narrow_tables_are_float16(precision):
    model = network(wide=True)
    tables = quantize_tables(model, precision)
    exported = ExportableDLRM(model, tables).eval()
    with torch.no_grad():
        model.embeddings.weight.copy_(tables.float())
        model.wide.weight.copy_(model.wide.weight.half())
    np.testing.assert_allclose(
        logits(exported, example())[:, 0], logits(model, example()), rtol=1e-5, atol=1e-5
    )
    with torch.no_grad():
        model.wide.weight[51] = 1e5
    with pytest.raises(ValueError, match="table 2: a value is infinite, or beyond float16"):
        quantize_tables(model, precision)


@pytest.mark.parametrize("platform", WRITTEN)
@pytest.mark.parametrize("interaction_op", [name for name in INTERACTIONS if name != "cuda_dot"])
def test_every_interaction_is_written(tmp_path, platform, interaction_op):
    model, inputs = network(interaction_op=interaction_op), example()
    exported = ExportableDLRM(model, quantize_tables(model, "fp32")).eval()
    score = write(platform, exported, inputs, tmp_path)
    np.testing.assert_allclose(
        score(*inputs.arrays)[:, 0], logits(model, inputs), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("platform", WRITTEN)
def test_narrow_inputs_are_taken(tmp_path, platform):
    model = network()
    inputs = example()
    narrow = Inputs(inputs.numerical.astype(np.float16), inputs.ids.astype(np.int32))
    score = write(
        platform, ExportableDLRM(model, quantize_tables(model, "fp32")).eval(), narrow, tmp_path
    )
    np.testing.assert_allclose(
        score(*narrow.arrays)[:, 0], logits(model, narrow), rtol=1e-5, atol=1e-5
    )


def test_int8_rows_are_off_by_half_a_level_at_most():
    model = network()
    with torch.no_grad():
        model.embeddings.weight[0] = 0.123  # all levels of a constant row are the same
        model.embeddings.weight[1] = torch.linspace(-1, 300, 8)
        model.embeddings.weight[2] *= 1e-6
        model.embeddings.weight[3] = 0
    rows = model.embeddings.weight.detach()
    tables = quantize_tables(model, "int8")
    error = (tables.float() - rows).abs()
    # A level is 1/254 of the row's range, or slightly more where float16 rounds the scale or the
    # middle.
    spread = rows.amax(1) - rows.amin(1) + 2**-10 * rows.abs().amax(1)
    assert (error.amax(1) <= spread / 254 / 2 * 1.01 + 2**-24).all()
    assert error[3].max() == 0
    assert tables.num_bytes == len(rows) * (8 + 2 + 2)


def test_a_value_beyond_float16_is_named():
    model = network()
    with torch.no_grad():
        model.embeddings.weight[53] = 1e6
    for precision in ("fp16", "int8"):
        with pytest.raises(ValueError, match="table 2: .*beyond float16"):
            quantize_tables(model, precision)


def test_each_table_is_judged_alone():
    model = network()
    inputs, labels = example(500), (np.arange(500) % 3 == 0).astype(np.float32)
    before = model.embeddings.weight.detach().clone()
    values = before.clone()
    values[50:51] = 5.0  # table 1 is changed, the others are not
    found = compare_tables(model, QuantizedTables(values), inputs, labels)
    assert [agreement.greatest_difference > 0 for agreement in found] == [i == 1 for i in range(8)]
    torch.testing.assert_close(model.embeddings.weight.detach(), before, rtol=0, atol=0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.slow
def test_a_compiled_package_scores_as_the_network(tmp_path):
    model = network(bottom_mlp_sizes=(8,), top_mlp_sizes=(1,))
    exported = ExportableDLRM(model, quantize_tables(model, "fp32")).eval()
    score = write("aot", exported, example(), tmp_path)
    for rows in (33, 1):
        inputs = example(rows, seed=1)
        np.testing.assert_allclose(
            score(*inputs.arrays)[:, 0], logits(model, inputs), rtol=1e-5, atol=1e-5
        )
