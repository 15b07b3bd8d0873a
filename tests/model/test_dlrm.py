"""DLRM: initial values, ids, bags, hashing and precision; test_model_parts.py has the oracle."""

import contextlib
import copy
import dataclasses

import pytest
import torch

from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM

SMALL = DLRMConfig(
    table_sizes=(7, 100, 3, 41),
    num_numerical_features=5,
    embedding_dim=8,
    bottom_mlp_sizes=(16, 8),
    top_mlp_sizes=(32, 16, 1),
)


def batch(config: DLRMConfig, device: str = "cpu", size: int = 33):
    random = torch.Generator().manual_seed(1)
    numerical = torch.randn(size, config.num_numerical_features, generator=random)
    ids = [torch.randint(n, (size,), generator=random) for n in config.table_sizes]
    return numerical.to(device), torch.stack(ids, dim=1).to(device)


def built(device: str, config: DLRMConfig = SMALL, **options) -> DLRM:
    return DLRM(config, World(device=device), **options)


def bags(config: DLRMConfig, device: str = "cpu", size: int = 33, most: int = 4):
    random = torch.Generator().manual_seed(2)
    lengths = torch.randint(most + 1, (size, len(config.table_sizes)), generator=random)
    sizes = torch.tensor(config.table_sizes).repeat(size).repeat_interleave(lengths.flatten())
    ids = (torch.rand(len(sizes), generator=random) * sizes).int()
    numerical = torch.randn(size, config.num_numerical_features, generator=random)
    return numerical.to(device), ids.to(device), lengths.to(device)


def test_bad_bags_are_named():
    for hash_indices in (False, True):
        config = dataclasses.replace(SMALL, hash_indices=hash_indices)
        model = DLRM(config)
        numerical, ids, lengths = bags(config)
        with pytest.raises(RuntimeError, match=r"embedding\w*: lengths add up to"):
            model(numerical, ids[1:], lengths)
        lengths[20, 2] = -1
        with pytest.raises(RuntimeError, match="length -1 of table 2 in batch row 20"):
            model(numerical, ids, lengths)
        with pytest.raises(RuntimeError, match=r"4|table_offsets \[4\] Long for lengths"):
            model(numerical, ids, lengths[:, :3])
    model = DLRM(SMALL)
    numerical, ids, lengths = bags(SMALL)
    lengths[20, 2] += 1
    position = int(lengths.flatten()[: 20 * 4 + 2].sum())
    ids = torch.cat([ids[:position], torch.tensor([3]), ids[position:]])
    with pytest.raises(RuntimeError, match="id 3 of table 2 in batch row 20.*0 <= id < 3"):
        model(numerical, ids, lengths)


def test_initial_values_follow_the_published_rules():
    config = DLRMConfig(table_sizes=(10_000, 400))
    model = DLRM(config, seed=1)
    for table in model.embeddings.tables():
        bound = len(table) ** -0.5
        assert bound * 0.99 < table.abs().max() <= bound
        assert abs(table.mean()) < bound * 0.02
    hidden = model.top_mlp[1]  # 1024 -> 1024
    assert abs(hidden.weight.std() / (2 / 2048) ** 0.5 - 1) < 0.01
    assert abs(hidden.bias.std() / (1 / 1024) ** 0.5 - 1) < 0.1
    assert model.output.weight.abs().max() <= 1 / 256**0.5
    small = DLRM(dataclasses.replace(SMALL, embedding_init_scale=0.01)).embeddings.tables()[2]
    assert small.abs().max() <= 0.01 / 3**0.5
    width = 128 + 3
    assert model.top_mlp[0].weight.shape[1] == 136
    assert not model.top_mlp[0].weight[:, width:].any()


def test_initial_values_depend_on_seed_and_table_only(device):
    one, other = DLRM(SMALL, seed=1), DLRM(SMALL, seed=2)
    for name, value in built(device, seed=1).state_dict().items():
        assert torch.equal(value.cpu(), one.state_dict()[name])
    assert not torch.equal(one.embeddings.weight, other.embeddings.weight)
    assert not torch.equal(one.bottom_mlp[0].weight, other.bottom_mlp[0].weight)
    fewer = DLRM(dataclasses.replace(SMALL, table_sizes=(7, 100)), seed=1)
    assert torch.equal(fewer.embeddings.tables()[1], one.embeddings.tables()[1])
    torch.manual_seed(99)
    assert torch.equal(DLRM(SMALL, seed=1).output.weight, one.output.weight)


@pytest.mark.parametrize("make", [batch, bags])
def test_hashed_ids_wrap_around_tables_of_limited_size(make, device):
    config = dataclasses.replace(SMALL, hash_indices=True, max_table_size=10)
    model = built(device, config, seed=1)
    assert [len(table) for table in model.embeddings.tables()] == [7, 10, 3, 10]
    numerical, ids, *lengths = make(SMALL, device)
    rows = torch.tensor([7, 10, 3, 10], device=device)
    if lengths:
        rows = rows.repeat(33).repeat_interleave(lengths[0].flatten())
    before = ids.clone()
    logits = model(numerical, ids, *lengths)
    assert torch.equal(ids, before)  # the batch must not change
    assert (ids >= rows).any()
    torch.testing.assert_close(logits, model(numerical, ids % rows, *lengths))


def test_bags_of_one_id_are_ids_of_any_width(device):
    model, (numerical, ids) = built(device, seed=5), batch(SMALL, device)
    lengths, expected = torch.ones_like(ids).int(), model(numerical, ids)
    torch.testing.assert_close(model(numerical, ids.flatten(), lengths), expected)
    torch.testing.assert_close(model(numerical, ids.int()), expected)
    assert model(numerical[:0], ids[:0].flatten(), lengths[:0]).shape == (0,)


@torch.no_grad()
@pytest.mark.parametrize("bad", [-1, 3])
def test_an_id_beyond_its_table_is_named(bad):
    model = DLRM(SMALL).eval()
    numerical, categorical = batch(SMALL)
    categorical[20, 2] = bad
    for block in (contextlib.nullcontext, model.weights_unchanged):
        with block(), pytest.raises(RuntimeError, match=f"id {bad} of table 2 in batch row 20"):
            model(numerical, categorical)


@pytest.mark.parametrize(("tables", "numericals"), [((), 5), ((7, 3), 0)])
def test_a_model_of_one_kind_of_feature_works(tables, numericals, device):
    config = dataclasses.replace(SMALL, table_sizes=tables, num_numerical_features=numericals)
    ids = torch.ones(4, len(tables), dtype=torch.int64, device=device)
    logits = built(device, config)(torch.ones(4, numericals, device=device), ids)
    assert logits.shape == (4,)
    logits.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_tables_are_float32_ones_rounded(dtype, device):
    numerical, categorical = batch(SMALL, device)
    config = dataclasses.replace(SMALL, embedding_dtype="bf16")
    narrow = built(device, config, dtype=dtype, seed=1)
    full = built(device, dtype=dtype, seed=1)
    assert all(map(torch.equal, narrow.embeddings.tables(), full.embeddings.tables()))
    with torch.no_grad():
        full.embeddings.weight.copy_(narrow.embeddings.weight)
    assert not torch.equal(narrow.embeddings.tables()[0], full.embeddings.tables()[0])
    assert torch.equal(narrow(numerical, categorical), full(numerical, categorical))


@torch.no_grad()
@pytest.mark.parametrize(
    "changes", [{}, {"wide": True}, {"hash_indices": True}, {"numerical_embedding": "piecewise"}]
)
def test_a_block_of_unchanged_weights_scores_alike_and_ends(changes):
    config = DLRMConfig((9, 5), 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(16, 1), **changes)
    model, called = DLRM(config).eval(), []
    given = torch.rand(3, 4), torch.tensor([[0, 1], [8, 4], [3, 3]])
    if config.hash_indices:
        given[1][1, 0] = 35
    expected = model(*given)
    with model.weights_unchanged():
        assert torch.equal(model(*given), expected)
    model.output.weight.zero_()
    model.output.bias.fill_(0.5)
    assert torch.equal(model(*given), torch.full((3,), 0.5))
    for layer in (model.top_mlp[0], model.embeddings):
        layer.register_forward_hook(lambda *given: called.append(given[0]))
    with model.weights_unchanged():
        model(*given)
    assert called == [model.embeddings, model.top_mlp[0]]


@torch.no_grad()
def test_a_copy_made_in_a_block_of_unchanged_weights_is_as_any():
    config = DLRMConfig((9, 5), 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(16, 1))
    model, called = DLRM(config, dtype=torch.bfloat16).eval(), []
    given = torch.rand(3, 4), torch.tensor([[0, 1], [8, 4], [3, 3]])
    with model.weights_unchanged():
        copied = copy.deepcopy(model)
    for parameter in [*model.parameters(), *copied.parameters()]:
        parameter.mul_(3)
    assert torch.equal(copied(*given), model(*given))
    copied.top_mlp[0].register_forward_hook(lambda *given: called.append(1))
    copied(*given)
    assert called == [1]


@torch.no_grad()
def test_hashed_ids_of_other_columns_are_refused():
    config = DLRMConfig((9, 5), 4, 8, (8,), (16, 1), hash_indices=True)
    with pytest.raises(RuntimeError, match=r"expected ids \[batch, 2\], got \[3, 1\]"):
        DLRM(config)(torch.rand(3, 4), torch.zeros(3, 1, dtype=torch.int64))


@torch.no_grad()
def test_lists_of_one_item_are_attended_in_a_block_of_unchanged_weights():
    attended = {"field_tables": (0, 0), "field_targets": (1, None)}
    config = DLRMConfig((9, 9), 4, 8, (8,), (16, 1), table_poolings=("attention", None), **attended)
    model, numerical = DLRM(config).eval(), torch.rand(3, 4)
    for parameter in model.parameters():
        parameter.normal_()
    ids = torch.tensor([[0, 1], [8, 4], [3, 3]])
    expected = model(numerical, ids.flatten(), torch.ones_like(ids))
    with model.weights_unchanged():
        torch.testing.assert_close(model(numerical, ids), expected)


@torch.no_grad()
def test_dropout_begins_in_a_block_of_unchanged_weights():
    config = DLRMConfig(
        (9,), 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(64, 1), dropout=0.5, output_init="normal"
    )
    model, given = DLRM(config).eval(), (torch.rand(3, 4), torch.tensor([[0], [8], [3]]))
    with model.weights_unchanged():
        expected = model(*given)
        assert not torch.equal(model.train()(*given), expected)


@torch.no_grad()
def test_parameters_of_other_dtypes_take_the_modules():
    model, given = DLRM(SMALL).eval(), batch(SMALL)
    expected = model(*given)
    model.top_mlp[1].to(torch.bfloat16)
    assert model.native_parameters(given[0]) is None
    torch.testing.assert_close(model(*given), expected, rtol=0.01, atol=0.01)
