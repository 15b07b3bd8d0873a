"""The choice of matrix products follows tables, never a measurement during a run."""

import json

import pytest
import torch

from dlrm import ops
from dlrm.model.layers.mlp import mlp
from dlrm.ops import products
from dlrm.scripts.doctor import command as doctor


@pytest.fixture(autouse=True)
def config(monkeypatch, tmp_path):
    """Returns the folder of the user's settings, empty at first."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".config"


@pytest.fixture
def damaged(config, monkeypatch):
    """Returns the user's table, damaged, on a processor for which it is read."""
    on("avx2", monkeypatch)
    path = config / "dlrm" / "products.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    return path


def on(units, monkeypatch, flags=()):
    monkeypatch.setattr(products, "instruction_set", lambda: units)
    monkeypatch.setattr(products, "_flags", lambda: set(flags))


@pytest.mark.parametrize(
    ("units", "flags", "float32", "bfloat16"),
    [
        ("none", [], "torch", "torch"),
        ("generic", [], "torch", "torch"),
        ("avx2", [], "native", "native"),
        ("avx512_bf16", ["avx512f"], "native", "native"),
        ("avx512_bf16", ["amx_bf16"], "native", "torch"),
    ],
)
def test_the_processors_units_decide(units, flags, float32, bfloat16, monkeypatch):
    on(units, monkeypatch, flags)
    found = [ops.choose_products(t) for t in (torch.float32, torch.bfloat16, torch.float16)]
    assert found == [float32, bfloat16, "torch"]


def test_the_users_table_decides_first_and_only_for_its_layers(monkeypatch):
    on("avx2", monkeypatch)
    products.add_to_user_table(torch.float32, [13, 8, 4], "torch")
    products.add_to_user_table(torch.bfloat16, [13, 8, 4], "native")
    assert ops.choose_products(torch.float32, [13, 8, 4]) == "torch"
    assert ops.choose_products(torch.float32, [13, 8, 5]) == "native"
    assert ops.choose_products(torch.bfloat16, [13, 8, 4]) == "native"
    assert mlp(13, (8, 4), 0, "one").products == "torch"
    assert mlp(13, (8, 5), 0, "other").products == "native"
    monkeypatch.setattr(products, "processor", lambda: "another")
    assert ops.choose_products(torch.float32, [13, 8, 4]) == "native"


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": {"float32": {"13-8": "mkl"}}}', '{"a": 1}'])
def test_a_damaged_table_is_named(text, config, monkeypatch):
    on("avx2", monkeypatch)
    path = config / "dlrm" / "products.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"products\.json: expected processor.*--tune"):
        ops.choose_products(torch.float32, [13, 8])


def test_a_damaged_table_is_not_read_where_products_are_given(damaged):
    network = mlp(13, (8,), 0, "mlp")
    network.products = "torch"
    assert network.products == "torch"
    with pytest.raises(ValueError, match=r"products\.json: expected processor"):
        mlp(13, (8,), 0, "mlp").products  # noqa: B018


def test_tuning_keeps_a_damaged_table_aside_and_writes_another(
    damaged, native, capsys, monkeypatch
):
    assert tune(monkeypatch, "--layers", "6-8", "--batch_size", "9") == 0
    assert "products.json is damaged: kept as products.json.damaged" in capsys.readouterr().out
    assert damaged.with_suffix(".json.damaged").read_text() == "{"
    (of_processor,) = json.loads(damaged.read_text()).values()
    assert of_processor.keys() == {"float32", "bfloat16"}


def test_the_choice_decides_what_runs(native):
    network = mlp(6, (8,), 0, "mlp")
    for chosen, ran in (("native", "dlrm::mlp"), ("torch", "mkldnn::_linear_pointwise")):
        network.products = chosen
        with torch.profiler.profile() as profiler:
            network(torch.randn(5, 6))
        assert ran in {event.key for event in profiler.key_averages()}


def tune(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["doctor", "--tune", *words])
    return doctor.main()


def test_tuning_notes_the_faster(config, native, capsys, monkeypatch):
    assert tune(monkeypatch, "--layers", "6-8", "5-7-3", "--batch_size", "9") == 0
    printed = capsys.readouterr().out
    (of_processor,) = json.loads((config / "dlrm" / "products.json").read_text()).values()
    assert of_processor.keys() == {"float32", "bfloat16"}
    for name, layers in of_processor.items():
        assert layers.keys() == {"6-8", "5-7-3"}
        for key, chosen in layers.items():
            (line,) = (one for one in printed.splitlines() if one.split()[:2] == [key, name])
            assert line.split()[-1] == chosen
            times = dict(zip(("native", "torch"), map(float, line.split()[2:4]), strict=True))
            assert times[chosen] == min(times.values())
            assert ops.choose_products(getattr(torch, name), [*map(int, key.split("-"))]) == chosen
    assert str(config / "dlrm" / "products.json") in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "6"], "--layers 6: expected inputs and outputs of layers, as 368-256-128"),
        (["--layers", "6-x"], "--layers 6-x: expected"),
        (["--batch_size", "0"], "--batch_size 0: expected 1 or more"),
    ],
)
def test_what_cannot_be_tuned_is_named(words, message, native, capsys, monkeypatch):
    with pytest.raises(SystemExit) as exit:
        tune(monkeypatch, *words)
    assert exit.value.code not in (0, None)
    assert message in capsys.readouterr().err
