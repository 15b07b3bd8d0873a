"""Operations of the native operators' matrix products, as torch's counter reports them."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dlrm import ops

SCHEMAS = Path(__file__).parents[2] / "csrc/schemas.h"
BATCH, TABLES, DIM = 3, 2, 4
BOTTOM, TOP, LOGIT = 5 * DIM, 8 * 6, 6  # weights of the layers below
DOTS = 2 * BATCH * (TABLES + 1) ** 2 * DIM
# They look up, add, compare or update; torch counts products only.
WITHOUT_PRODUCTS = {
    *("joint_embedding", "joint_embedding_bag"),
    *("joint_embedding_bag_backward", "joint_embedding_bag_sample_weights_backward"),
    *("row_update_", "row_decay_", "dense_adam_"),
    *("piecewise_linear", "piecewise_linear_backward", "logistic_loss", "relu_bias_backward"),
    *("take_cuda_error", "cuda_switches", "cpu_isa"),
    *("attention_weights", "attention_weights_backward"),  # as many as lengths say, not shapes
}
pytestmark = pytest.mark.skipif(not ops.native_available(), reason="the operators are not built")


def operators():
    return set(re.findall(r'm\.def\(\s*"(\w+)\(', SCHEMAS.read_text()))


def leaf(*shape):
    return torch.rand(shape).requires_grad_()


def layers(inputs, outputs):
    return [leaf(outputs, inputs)], [leaf(outputs)]


def dot_interaction():
    ops.dot_interaction(leaf(BATCH, DIM), leaf(BATCH, TABLES, DIM)).sum().backward()


def whole_network(run, *further):
    numerical, embeddings = torch.rand(BATCH, 5), torch.rand(BATCH, TABLES, DIM)
    parts = *layers(5, DIM), *layers(8, 6), leaf(1, 6), leaf(1)
    run(numerical, embeddings, ops.NetworkParameters(*parts), *further)


def network():
    with torch.no_grad():
        whole_network(ops.network)


def network_of_rows():
    rows = ops.Rows(
        torch.rand(9, DIM), torch.ones(BATCH, TABLES).int(), torch.tensor([0, 4, 9]), torch.float32
    )
    with torch.no_grad():
        whole_network(lambda numerical, _, parts: ops.network(numerical, rows, parts))


def network_gradients():
    whole_network(ops.network_gradients, torch.ones(BATCH))


def linear_relu():
    ops.linear_relu(leaf(BATCH, 8), leaf(6, 8), leaf(6), native=True).sum().backward()


ALL = BOTTOM + TOP + LOGIT
COUNTS = {  # a product of weights takes two operations for each of them and each sample
    dot_interaction: {"dot_interaction": DOTS, "dot_interaction_backward": DOTS},
    linear_relu: {
        "linear_relu": 2 * BATCH * TOP,
        "linear_relu_backward": 4 * BATCH * TOP,
    },
    network: {"network": 2 * BATCH * ALL + DOTS},
    network_gradients: {"network_gradients": 2 * BATCH * (3 * ALL - BOTTOM) + 2 * DOTS},
}


def counted(run):
    with FlopCounterMode(display=False) as found:
        run()
    return {str(op).removeprefix("dlrm."): n for op, n in found.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("run", COUNTS, ids=lambda run: run.__name__)
def test_products_are_counted(run):
    assert counted(run) == COUNTS[run]


def test_rows_that_are_looked_up_take_no_product():
    assert counted(network_of_rows) == COUNTS[network]


def test_every_operator_is_counted_or_has_no_products():
    has_products = {name for counts in COUNTS.values() for name in counts}
    assert has_products | WITHOUT_PRODUCTS == operators()
    assert not has_products & WITHOUT_PRODUCTS
