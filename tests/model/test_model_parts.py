"""Numerical vectors, cross and quadratic layers, the wide term and compositions match float64."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dlrm import ops
from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.model.layers.numerical_embedding import PiecewiseLinear
from dlrm.model.layers.packed import mean_of_members

SMALL = DLRMConfig(
    table_sizes=(7, 100, 3, 41),
    num_numerical_features=5,
    embedding_dim=8,
    bottom_mlp_sizes=(16, 8),
    top_mlp_sizes=(32, 16, 1),
)
EDGES = [  # two fields have all bins, one has a single edge, one a single bin
    np.array([-2.0, -0.5, 0.0, 0.25, 3.0]),
    np.array([1.0]),
    np.array([-1.0, 1.0]),
    np.array([0.0, 0.5, 1.0]),
    np.array([-0.125, 0.0, 0.125, 4.0]),
]
BINS = 4


def encoding(values, edges):
    """Equation 1 of Gorishniy et al. (2022), clamped: 1 for lower bins, a share for its own."""
    parts = [
        ((values - low) / (high - low)).clamp(0, 1)
        for low, high in zip(edges[:-1], edges[1:], strict=True)
    ]
    return torch.stack(parts, 1) if parts else values.new_zeros(len(values), 0)


def field_vectors(weights, numerical):
    """Returns float64 vectors of each field, `[samples, fields, dim]`."""
    result = []
    for field, edges in enumerate(EDGES):
        values = numerical[:, field].double()
        weight = weights["weight"][field]
        code = encoding(values, torch.from_numpy(edges))
        result.append(weights["bias"][field] + code @ weight[: code.shape[1]])
    return torch.stack(result, 1)


def crossed(weights, prefix, layers, first):
    """Equation 1 of Wang et al. (2021): x' = x0 * (W x + b) + x, with W = U V for low rank."""
    x = first
    for layer in range(layers):
        matrix = weights[f"{prefix}.layers.{layer}.weights.0"]
        if f"{prefix}.layers.{layer}.weights.1" in weights:
            matrix = weights[f"{prefix}.layers.{layer}.weights.1"] @ matrix
        x = first * (x @ matrix.T + weights[f"{prefix}.layers.{layer}.bias"]) + x
    return x


def quadratic(weights, prefix, config, first):
    """Equation of QNN-alpha (Li et al., 2025): x' = x + sum over r of x * relu(W_r x + b_r)."""
    x = first
    for layer in range(config.quadratic_layers):
        name = f"{prefix}.layers.{layer}.0"
        pairs = [
            weights[f"{name}.{key}"].chunk(config.quadratic_rows) for key in ("weight", "bias")
        ]
        x = x + sum(
            x * torch.relu(x @ matrix.T + bias) for matrix, bias in zip(*pairs, strict=True)
        )
    return x


def member(weights, index, num_members):
    """Returns the weights of one member of a packed ensemble, with its own factors."""
    own = {**weights, "adapters.factors": weights["adapters.factors"].chunk(num_members)[index]}
    for name in ("output.weight", "output.bias"):
        own[name] = weights[name][index : index + 1]
    return own


def alone(config, kind):
    """Returns the configuration of a member of a mixed ensemble."""
    structure = config.cross_structure if "dcn" in kind.split(",") else "stacked"
    changes = {"interaction_op": kind, "cross_structure": structure}
    return dataclasses.replace(config, ensemble=1, **changes)


def oracle(config, weights, numerical, ids, lengths=None):
    """Computes the network in float64 from its named weights; shares no code with it.

    A packed ensemble gives one logit per member, `[samples, members]`.
    """
    if config.kinds:
        members = [
            oracle(
                alone(config, kind),
                {name.removeprefix(f"members.{m}."): v for name, v in weights.items()},
                *(numerical, ids, lengths),
            )
            for m, kind in enumerate(config.kinds)
        ]
        return torch.stack(members, 1)
    if config.packed > 1:
        one = dataclasses.replace(config, ensemble=1)
        members = [member(weights, m, config.packed) for m in range(config.packed)]
        return torch.stack([oracle(one, own, numerical, ids, lengths) for own in members], 1)

    def layers(name, x):
        index = 0
        while f"{name}.{index}.weight" in weights:
            x = torch.relu(
                x @ weights[f"{name}.{index}.weight"].T + weights[f"{name}.{index}.bias"]
            )
            index += 2
        return x

    def looked_up(name):
        tables = weights[name].split(list(config.embedding_rows))
        if lengths is None:
            return [table[own] for table, own in zip(tables, ids.T, strict=True)]
        bags = iter(ids.split(lengths.flatten().tolist()))
        pooled = [[tables[t][next(bags).long()].sum(0) for t in range(4)] for _ in lengths]
        return [torch.stack(rows) for rows in zip(*pooled, strict=True)]

    dense = layers("bottom_mlp", numerical.double())
    vectors = [dense]
    if config.numerical_embedding != "none":
        prefix = "numerical_embedding."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        vectors += field_vectors(own, numerical).unbind(1)
    vectors += looked_up("embeddings.weight")
    if "adapters.factors" in weights:
        factors = weights["adapters.factors"].split(config.embedding_dim)
        vectors = [vector * factor for vector, factor in zip(vectors, factors, strict=True)]
        dense = vectors[0]
    everything = torch.cat(vectors, 1)
    names = config.interaction_op.split(",")
    parallel = "dcn" in names and config.cross_structure == "parallel"
    deep = [name for name in names if not (parallel and name == "dcn")] or ["cat"]
    features = []
    for name in deep:
        if name == "cat":
            features.append(everything)
        elif name == "dcn":
            prefix = "interact" if len(deep) == 1 else "interact.parts.dcn"
            features.append(crossed(weights, prefix, config.cross_layers, everything))
        elif name == "quadratic":
            prefix = "interact" if len(deep) == 1 else "interact.parts.quadratic"
            features.append(quadratic(weights, prefix, config, everything))
        else:
            pairs = [
                (vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)
            ]
            features.append(torch.cat([dense, torch.stack(pairs, 1)], 1))
    features = torch.cat(features, 1)
    width = weights.get("top_mlp.0.weight", weights["output.weight"]).shape[1]
    if parallel and config.top_mlp_sizes == (1,):
        width -= everything.shape[1]
    features = F.pad(features, (0, max(width - features.shape[1], 0)))
    hidden = layers("top_mlp", features)
    if parallel:
        hidden = torch.cat([hidden, crossed(weights, "cross", config.cross_layers, everything)], 1)
    logits = (hidden @ weights["output.weight"].T + weights["output.bias"])[:, 0]
    if config.wide:
        logits = logits + sum(looked_up("wide.weight"))[:, 0]
    return logits


def batch(size=33, hotness=None):
    random = torch.Generator().manual_seed(1)
    numerical = torch.randn(size, 5, generator=random) * 2
    numerical[:9] = torch.tensor(EDGES[0][[0, 1, 2, 3, 4, 0, 1, 2, 3]])[:, None]  # on edges
    numerical[9:11] = torch.tensor([[-20.0], [20.0]])  # and beyond them
    if hotness is None:
        ids = [torch.randint(n, (size,), generator=random) for n in SMALL.table_sizes]
        return numerical.half().float(), torch.stack(ids, 1)
    lengths = torch.randint(hotness + 1, (size, 4), generator=random)
    sizes = torch.tensor(SMALL.table_sizes).repeat(size).repeat_interleave(lengths.flatten())
    ids = (torch.rand(len(sizes), generator=random) * sizes).int()
    return numerical.half().float(), ids, lengths


def build(device="cpu", seed=3, **others):
    config = dataclasses.replace(SMALL, numerical_bins=BINS, **others)
    model = DLRM(config, World(device=device), seed=seed)
    if config.numerical_embedding == "piecewise":
        model.numerical_embedding.set_edges(EDGES)
    if model.wide is not None:
        random = torch.Generator().manual_seed(7)
        with torch.no_grad():
            model.wide.weight.copy_(torch.randn(model.wide.weight.shape, generator=random))
    return model


def doubles(model):
    """Returns the model's weights as float64 leaves, by name."""
    named = model.state_dict(keep_vars=True)
    return {k: v.detach().cpu().double().requires_grad_() for k, v in named.items()}


PARTS = [
    {"wide": True, "interaction_op": "dot"},
    {"interaction_op": "cat"},
    {"numerical_embedding": "piecewise"},
    {"interaction_op": "dcn"},
    {"interaction_op": "dcn", "cross_rank": 3, "cross_layers": 2},
    {"interaction_op": "dot,dcn", "cross_rank": 5},
    {"interaction_op": "dcn,cuda_dot,cat"},
    {"interaction_op": "dcn", "cross_structure": "parallel"},
    {"interaction_op": "cuda_dot,dcn", "cross_structure": "parallel", "cross_rank": 3},
    {"interaction_op": "cuda_dot,dcn", "cross_structure": "parallel", "top_mlp_sizes": (1,)},
    {"interaction_op": "dot,dcn", "top_mlp_sizes": (1,)},
    {"interaction_op": "quadratic"},
    {"interaction_op": "quadratic", "quadratic_layers": 3, "quadratic_rows": 1, "wide": True},
    {"interaction_op": "dot,quadratic", "quadratic_rows": 3, "numerical_embedding": "piecewise"},
    {"ensemble": 2, "interaction_op": "quadratic", "quadratic_layers": 1},
    {"ensemble": "dot*2,quadratic", "wide": True, "numerical_embedding": "piecewise"},
    {"ensemble": "cuda_dot,dcn", "cross_structure": "parallel"},
    {"wide": True, "numerical_embedding": "piecewise", "interaction_op": "cuda_dot,dcn"},
    {"wide": True, "numerical_embedding": "piecewise", "interaction_op": "cat"},
    {
        **{"wide": True, "numerical_embedding": "piecewise", "interaction_op": "dot,dcn"},
        **{"cross_structure": "parallel", "cross_rank": 4},
    },
    {"ensemble": 3, "top_mlp_sizes": (1,)},
    {"ensemble": 2, "interaction_op": "dot,dcn", "wide": True, "numerical_embedding": "piecewise"},
    {"ensemble": 4, "interaction_op": "cuda_dot,dcn", "cross_structure": "parallel", "wide": True},
]


@pytest.mark.parametrize("others", PARTS, ids=lambda others: " ".join(map(str, others.values())))
@pytest.mark.parametrize("hotness", [None, 3])
def test_logits_and_gradients_are_those_of_float64(others, hotness, device):
    model = build(device, **others)
    inputs = batch(hotness=hotness)
    weights = doubles(model)
    expected = oracle(model.config, weights, *inputs)
    actual = model(*(tensor.to(device) for tensor in inputs))
    with torch.no_grad():  # where the native network runs in place of the modules
        native = model(*(tensor.to(device) for tensor in inputs))
    for logits in (actual, native):
        torch.testing.assert_close(logits.cpu().double(), expected, rtol=1e-4, atol=1e-4)
    names, parameters = zip(*model.named_parameters(), strict=True)
    weighting = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    found = torch.autograd.grad(actual, parameters, weighting.to(device))
    wanted = torch.autograd.grad(expected, [weights[n] for n in names], weighting.double())
    for name, one, other in zip(names, found, wanted, strict=True):
        one = one.to_dense().cpu().double()
        torch.testing.assert_close(
            one, other, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("others", PARTS, ids=lambda others: " ".join(map(str, others.values())))
def test_half_precision_is_near(others):
    config = build(**others).config
    model = DLRM(config, dtype=torch.bfloat16, seed=3)
    model.load_state_dict(build(**others).state_dict())
    numerical, ids = batch()
    exact = oracle(config, doubles(model), numerical, ids)[11:]
    found = model(numerical, ids)[11:]
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 0.05 * exact.abs().max()
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_default_network_starts_with_the_weights_it_had():
    model = DLRM(DLRMConfig((50, 7, 200), 13, 16, (32, 16), (24, 8, 1)), seed=11)
    state = model.state_dict()
    tables = state.pop("embeddings.weight").numpy()
    assert hashlib.sha256(tables.tobytes()).hexdigest() == (
        "e8f0a979538a3f71f73973ea9f401858ab2ffc15def7736a08e9efce72bd1e83"
    )
    sums = {
        "bottom_mlp.0.weight": -5.1547,
        "bottom_mlp.0.bias": -0.2865,
        "bottom_mlp.2.weight": -3.3893,
        "bottom_mlp.2.bias": 0.873,
        "top_mlp.0.weight": 15.5907,
        "top_mlp.0.bias": 0.9743,
        "top_mlp.2.weight": -0.9341,
        "top_mlp.2.bias": 0.751,
        "output.weight": 1.2343,
        "output.bias": -0.3291,
    }
    assert {name: v.double().sum().item() for name, v in state.items()} == pytest.approx(
        sums, abs=1e-3
    )


def test_wide_weights_start_as_zero_and_follow_hashed_ids():
    numerical, ids = batch()
    plain = DLRM(SMALL, seed=1)
    assert torch.equal(
        DLRM(dataclasses.replace(SMALL, wide=True), seed=1)(numerical, ids), plain(numerical, ids)
    )
    model = build(wide=True, hash_indices=True, max_table_size=10)
    assert [table.shape for table in model.wide.tables()] == [(7, 1), (10, 1), (3, 1), (10, 1)]
    rows = torch.tensor([7, 10, 3, 10])
    torch.testing.assert_close(model(numerical, ids), model(numerical, ids % rows))


def test_a_piecewise_vector_is_what_a_person_computes():
    layer = PiecewiseLinear(1, 2, bins=2, seed=0)
    layer.set_edges([np.array([0.0, 1.0, 3.0])])
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[10.0, 1.0], [20.0, 2.0]]]))
        layer.bias.copy_(torch.tensor([[100.0, 0.0]]))
    values = torch.tensor([[-5.0], [0.0], [0.5], [1.0], [2.0], [3.0], [9.0]])
    first = [100, 100, 105, 110, 120, 130, 130]
    assert layer(values)[:, 0, 0].tolist() == first
    assert layer(values.half())[:, 0, 1].tolist() == [0, 0, 0.5, 1, 2, 3, 3]


def test_a_cross_layer_is_what_a_person_computes():
    model = build(interaction_op="dcn", cross_layers=1)
    cross = model.interact
    dense, embeddings = torch.ones(1, 8), torch.full((1, 4, 8), 2.0)
    with torch.no_grad():
        cross.layers[0].weights[0].fill_(0.5)
        cross.layers[0].bias.fill_(3.0)
    # The inputs are 8 ones and 32 twos, so W x + b is 0.5 * 72 + 3 = 39.
    assert cross(dense, embeddings).tolist() == [[40.0] * 8 + [80.0] * 32]


@pytest.mark.parametrize(
    ("edges", "problem"),
    [
        (EDGES[:4], "edges: expected those of 5 fields, got 4"),
        ([*EDGES[:4], np.arange(6.0)], "field 4: expected 1 to 5 ascending finite numbers, got 6"),
        ([*EDGES[:4], np.array([])], "field 4: .* got 0"),
        ([np.array([1.0, 1.0]), *EDGES[1:]], r"field 0: .* got 2: \[1.0, 1.0\]"),
        ([np.array([1.0, np.inf]), *EDGES[1:]], r"field 0: .* \[1.0, inf\]"),
    ],
)
def test_edges_that_make_no_bins_are_named(edges, problem):
    model = build(numerical_embedding="piecewise")
    with pytest.raises(ValueError, match=problem):
        model.numerical_embedding.set_edges(edges)


def test_a_packed_ensemble_predicts_the_mean_of_its_members_probabilities():
    model = build(ensemble=3, wide=True, dropout=0.2)
    inputs = batch()
    dropped = model(*inputs)
    assert dropped.shape == (33, 3)
    assert not torch.equal(dropped, model(*inputs))
    members = oracle(model.config, doubles(model), *inputs)
    expected = torch.special.logit(members.sigmoid().mean(1))
    torch.testing.assert_close(model.eval()(*inputs).double(), expected, rtol=1e-4, atol=1e-4)
    assert members.std(1).min() > 0.01


def test_the_mean_of_members_is_finite_where_probabilities_round_to_0_or_1():
    logits = torch.tensor([[200.0, 100.0], [-300.0, -100.0], [80.0, -80.0], [0.5, 0.5]])
    found = mean_of_members(logits)[:, 0]
    two = np.log(2)
    torch.testing.assert_close(found, torch.tensor([100 + two, -100 - two, 0, 0.5]).float())


def test_factors_start_as_signs_by_the_seed_and_heads_as_those_of_one_model():
    model = DLRM(dataclasses.replace(SMALL, ensemble=500), seed=1)
    factors = model.adapters.factors.detach()
    assert factors.unique().tolist() == [-1, 1]
    assert abs(factors.mean()) < 5 / len(factors) ** 0.5
    other = DLRM(dataclasses.replace(SMALL, ensemble=500), seed=2).adapters.factors
    assert 0.4 < (factors == other).float().mean() < 0.6
    assert model.output.weight.abs().max() <= 16**-0.5
    normal = DLRM(
        dataclasses.replace(SMALL, ensemble=500, output_init="normal")
    ).output.requires_grad_(False)
    assert normal.weight.std() == pytest.approx((2 / (16 + 1)) ** 0.5, rel=0.05)
    assert normal.bias.std() == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize(("optimized", "norm"), [(True, False), (False, False), (True, True)])
def test_dropout_is_the_operators_after_each_layer_in_training_alone(optimized, norm):
    config = dataclasses.replace(SMALL, dropout=0.25, batch_norm=norm)
    model = DLRM(config, seed=1, optimized_mlp=optimized)
    whole = DLRM(dataclasses.replace(config, dropout=0.0), seed=1, optimized_mlp=optimized)
    inputs, weights = torch.randn(9, model.interact.width), list(model.top_mlp.parameters())
    linears = [layer for layer in model.top_mlp if isinstance(layer, torch.nn.Linear)]
    torch.manual_seed(3)
    output = model.top_mlp(inputs)
    found = torch.autograd.grad(output.sum(), weights)
    torch.manual_seed(3)  # draws the same masks, as the oracle uses the same operator
    x = inputs
    for linear in linears:
        x = F.linear(x, linear.weight, linear.bias)
        x = ops.dropout(torch.relu(F.batch_norm(x, None, None, training=True) if norm else x), 0.25)
    torch.testing.assert_close(output, x)
    whole.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.eval().top_mlp(inputs), whole.eval().top_mlp(inputs))
    if not norm:
        torch.testing.assert_close(found, torch.autograd.grad(x.sum(), weights))


def test_batch_norm_is_torchs_and_takes_a_batch_of_one():
    model = build(batch_norm=True)
    reference = torch.nn.Sequential(
        *(
            layer
            for linear in [model.top_mlp[0], model.top_mlp[3]]
            for layer in (linear, torch.nn.BatchNorm1d(linear.out_features), torch.nn.ReLU())
        )
    )
    torch.compiler.reset()
    graph = torch.compile(
        build(batch_norm=True).top_mlp, fullgraph=True, backend="aot_eager"
    )  # compiled as in `--execution graph`
    for rows in (20, 20, 5):
        inputs = torch.randn(rows, model.interact.width)
        expected = reference(inputs)
        torch.testing.assert_close(model.top_mlp(inputs), expected)
        torch.testing.assert_close(graph(inputs), expected)
    model.eval()
    reference.eval()
    torch.testing.assert_close(model.top_mlp(inputs[:3]), reference(inputs[:3]))
    model.train()
    torch.testing.assert_close(model.top_mlp(inputs[:1]), reference(inputs[:1]))
    with pytest.raises(ValueError, match="--batch_norm: expected one process, got 2"):
        DLRM(model.config, World(rank=0, size=2))


def test_a_quadratic_layer_is_what_a_person_computes():
    model = build(interaction_op="quadratic", quadratic_layers=1)
    dense, embeddings = torch.ones(1, 8), torch.full((1, 4, 8), 2.0)
    (linear,) = model.interact.layers[0]
    with torch.no_grad():
        linear.weight.fill_(0.5)
        linear.bias[:40] = 3.0  # the first products have factors of 0.5 * 72 + 3
        linear.bias[40:] = -37.0  # and the second ones of 0
    assert model.interact(dense, embeddings).tolist() == [[40.0] * 8 + [80.0] * 32]
    assert not len(model.top_mlp)
    assert model.output.in_features == 40
    beside = build(interaction_op="quadratic,cat")
    assert beside.top_mlp[0].in_features == 80


@pytest.mark.parametrize("batch_norm", [False, True])
def test_quadratic_layers_drop_factors_and_normalize_them(batch_norm):
    options = {"interaction_op": "quadratic", "dropout": 0.4, "batch_norm": batch_norm}
    model = build(**options)
    norms = [torch.nn.BatchNorm1d(80) if batch_norm else torch.nn.Identity() for _ in range(2)]
    dense, embeddings = torch.randn(20, 8), torch.randn(20, 4, 8)
    for training in (True, False):
        [part.train(training) for part in (model, *norms)]
        model.random = torch.Generator().manual_seed(5)
        found = model.interact(dense, embeddings)
        random = torch.Generator().manual_seed(5)  # draws the same masks
        x = torch.cat([dense, embeddings.flatten(1)], 1)
        for layer, norm in zip(model.interact.layers, norms, strict=True):
            hidden = F.relu(norm(F.linear(x, layer[0].weight, layer[0].bias)))
            dropped = ops.dropout(hidden, 0.4, random) if training else hidden
            first, second = dropped.chunk(2, 1)
            x = x + x * first + x * second
        torch.testing.assert_close(found, x)


def test_tables_start_as_the_normal_that_is_asked_for():
    for dtype in ("fp32", "bf16"):
        config = DLRMConfig(
            (10_000, 400), embedding_init="normal", embedding_init_std=1e-4, embedding_dtype=dtype
        )
        for table in DLRM(config, seed=1).embeddings.tables():
            values = table.numel()
            assert abs(table.std() / 1e-4 - 1) < 5 / (2 * values) ** 0.5
            assert abs(table.mean()) < 5e-4 / values**0.5


WRONG = {
    "--bottom_mlp_sizes 16,8.*--embedding_dim 16": {"embedding_dim": 16},
    "--top_mlp_sizes 16,2.*must be 1": {"top_mlp_sizes": (16, 2)},
    "--top_mlp_sizes": {"top_mlp_sizes": ()},
    "--bottom_mlp_sizes 0,8": {"bottom_mlp_sizes": (0, 8)},
    "--max_table_size 5 needs --hash_indices": {"max_table_size": 5},
    "--max_table_size 0": {"max_table_size": 0, "hash_indices": True},
    "--embedding_type hash": {"embedding_type": "hash"},
    "--pooling max": {"pooling": "max"},
    "--embedding_dtype fp16": {"embedding_dtype": "fp16"},
    "--cross_rank 4 is for": {"interaction_op": "dot", "cross_rank": 4},
    "--cross_structure parallel is for --interaction_op dcn": {"cross_structure": "parallel"},
    "--cross_layers 0: expected 1 or more": {"interaction_op": "dcn", "cross_layers": 0},
    "--interaction_op sum: expected": {"interaction_op": "sum"},
    "--quadratic_rows 3 is for": {"ensemble": "dot*2,dcn", "quadratic_rows": 3},
    "--quadratic_rows 0: expected": {"interaction_op": "quadratic", "quadratic_rows": 0},
    "--self_ensemble: expected --dropout above 0": {"self_ensemble": True},
    "--numerical_embedding x: expected one of": {"numerical_embedding": "x"},
    "--numerical_embedding p.*: there are no numerical features": {
        **{"numerical_embedding": "piecewise", "num_numerical_features": 0},
    },
    "--numerical_bins 257: expected 2 or more, 256 at most": {"numerical_bins": 257},
    "--embedding_init_std nan: expected a number above 0": {"embedding_init_std": float("nan")},
    "--dropout 1.0: expected 0 or more, less than 1": {"dropout": 1.0},
    "--dropout 0.5 is for hidden layers": {"dropout": 0.5, "top_mlp_sizes": (1,)},
    "--batch_norm is for hidden layers": {"batch_norm": True, "top_mlp_sizes": (1,)},
    "--ensemble 0: expected 1 or more": {"ensemble": 0},
    "--ensemble dot: expected two members or more, got one": {"ensemble": "dot"},
    "--ensemble dot.0,cat: expected a number of members": {"ensemble": "dot*0,cat"},
    "--ensemble dot,sum: expected cuda_dot, dot,.* got 'sum'": {"ensemble": "dot,sum"},
    "--interaction_op cat: .*--ensemble dot.2": {"interaction_op": "cat", "ensemble": "dot*2"},
    "table_poolings: expected one of .* for each of 4 tables": {"table_poolings": ("sum",)},
    "table_poolings: .* got .*'max'": {"table_poolings": ("sum", "max", None, None)},
    "--attention_hidden 9 is for lists with pooling: attention": {"attention_hidden": 9},
    "field_targets: field 1: .* table 1, which is not attended, got None": {
        "table_poolings": (None, "attention", None, None)
    },
    "field_targets: field 1: .* got 0": {
        **{"table_poolings": (None, "attention", None, None)},
        "field_targets": (None, 0, None, None),  # of another table
    },
}


@pytest.mark.parametrize("problem", WRONG)
def test_flags_that_are_impossible_are_named(problem):
    with pytest.raises(ValueError, match=problem):
        dataclasses.replace(SMALL, **WRONG[problem])
