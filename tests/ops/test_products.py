"""The choice of matrix products follows a table, never a measurement during a run."""

import pytest
import torch

from dlrm import ops
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.ops import library as products


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
    model = DLRM(DLRMConfig((5,), 6, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(8, 1)))
    for chosen, ran in (("native", "dlrm::network"), ("torch", "mkldnn::_linear_pointwise")):
        model.products = chosen
        with torch.no_grad(), torch.profiler.profile() as profiler:
            model(torch.randn(5, 6), torch.zeros(5, 1, dtype=torch.int64))
        assert ran in {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize("chosen", ["native", "torch"])
def test_so_it_does_for_layers_that_run_one_by_one(chosen, native):
    model = DLRM(DLRMConfig((5,), 6, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(8, 1), dropout=0.5))
    model.products = chosen
    with torch.profiler.profile() as profiler:
        model(torch.randn(5, 6), torch.zeros(5, 1, dtype=torch.int64)).sum().backward()
    ran = {event.key for event in profiler.key_averages()}
    assert ({"dlrm::linear_relu", "dlrm::linear_relu_backward"} <= ran) == (chosen == "native")
