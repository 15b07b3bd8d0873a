"""The choice of matrix products follows a table, never a measurement during a run."""

import pytest
import torch

from dlrm import ops
from dlrm.model.layers.mlp import mlp
from dlrm.ops import library as products
from dlrm.scripts.doctor import command as doctor


def on(units, monkeypatch, amx=False):
    monkeypatch.setattr(products, "instruction_set", lambda: units)
    monkeypatch.setattr(products, "_has_amx", lambda: amx)


@pytest.mark.parametrize(
    ("units", "amx", "float32", "bfloat16"),
    [
        ("none", False, "torch", "torch"),
        ("generic", False, "torch", "torch"),
        ("avx2", False, "native", "native"),
        ("avx512_bf16", False, "native", "native"),
        ("avx512_bf16", True, "native", "torch"),
    ],
)
def test_the_processors_units_decide(units, amx, float32, bfloat16, monkeypatch):
    on(units, monkeypatch, amx)
    found = [ops.choose_products(t) for t in (torch.float32, torch.bfloat16, torch.float16)]
    assert found == [float32, bfloat16, "torch"]


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


def test_a_file_of_choices_that_an_earlier_version_left_is_not_read(monkeypatch, tmp_path):
    on("avx2", monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".config/dlrm").mkdir(parents=True)
    (tmp_path / ".config/dlrm/products.json").write_text("{")
    assert mlp(13, (8, 4), 0, "mlp").products == "native"


@pytest.mark.parametrize(("units", "by_auto"), [("avx2", "native"), ("none", "torch")])
def test_tuning_prints_the_flag_of_the_faster_and_writes_nothing(
    units, by_auto, native, capsys, monkeypatch, tmp_path
):
    on(units, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tune(monkeypatch, "--layers", "6-8", "5-7-3", "--batch_size", "9") == 0
    *table, float32, bfloat16 = capsys.readouterr().out.splitlines()
    for name, advice in (("float32", float32), ("bfloat16", bfloat16)):
        totals = {"native": 0.0, "torch": 0.0}
        for layers in ("6-8", "5-7-3"):
            (line,) = (one.split() for one in table if one.split()[:2] == [layers, name])
            times = dict(zip(totals, map(float, line[2:4]), strict=True))
            assert times[line[4]] == min(times.values())
            totals = {side: totals[side] + times[side] for side in totals}
        faster = min(totals, key=totals.__getitem__)
        assert advice.startswith(f"{name}: those of {faster} are ")
        flag = "auto, the default" if faster == by_auto else faster
        assert f"--mlp_products {flag}" in advice
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "6"], "--layers 6: expected inputs and outputs of layers, as 368-256-128"),
        (["--layers", "6-x"], "--layers 6-x: expected"),
        (["--batch_size", "0"], "--batch_size=0: 0 is not a positive integer"),
    ],
)
def test_what_cannot_be_tuned_is_named(words, message, native, capsys, monkeypatch):
    assert tune(monkeypatch, *words) not in (0, None)
    assert message in capsys.readouterr().err
