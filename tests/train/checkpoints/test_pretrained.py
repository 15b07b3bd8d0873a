"""`load_weights` names the error in a weight file, whatever its content."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dlrm.train.checkpoints.pretrained import load_weights

BIAS = {"bias": torch.zeros(2)}
QUANTIZED = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
NAN = torch.tensor([[1.0, 2.0], [float("nan"), 4.0]])


def test_weights_with_and_without_module_are_loaded(tmp_path):
    weights = {"weight": torch.arange(4.0).view(2, 2), "bias": torch.tensor([5.0, 6.0])}
    for number, prefix in enumerate(("", "module.")):
        model, path = nn.Linear(2, 2), tmp_path / f"{number}.pt"
        torch.save({"state_dict": {prefix + name: w for name, w in weights.items()}}, path)
        assert load_weights(model, str(path)) == []
        torch.testing.assert_close(dict(model.state_dict()), weights)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_cut_file_is_named(kept, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="a.safetensors: damaged, or no safetensors"):
        load_weights(nn.Linear(2, 2), str(path))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([torch.ones(2, 2)], r"expected names and their weights, got \["),
        (torch.ones(2, 2), "expected names and their weights, got tensor"),
        ({"state_dict": {0: torch.ones(2, 2)}}, "expected names and their weights, got {0: "),
        ({"weight": [1.0, 2.0], **BIAS}, "weight: expected a dense tensor of reals, got list"),
        (
            {"weight": torch.ones(2, 2).to_sparse(), **BIAS},
            "weight: .*, got one of .*torch.sparse_coo",
        ),
        ({"weight": torch.ones(2, 2, device="meta"), **BIAS}, "weight: .*, got one of .* on meta"),
        ({"weight": torch.ones(2, 2) * 1j, **BIAS}, "weight: .*, got one of torch.complex64"),
        ({"weight": torch.ones(2, 2) > 0, **BIAS}, "weight: .*, got one of torch.bool"),
        ({"weight": QUANTIZED, **BIAS}, "weight: .*, got one of torch.qint8"),
        ({"weight": NAN, **BIAS}, "weight: expected finite numbers, got nan"),
        ({"weight": NAN.double().nan_to_num(1e300), **BIAS}, "weight: .* finite numbers, got inf"),
        (
            {"weight": torch.ones(2, 2), "module.weight": torch.zeros(2, 2), **BIAS},
            "weight: expected once, got it as weight and module.weight",
        ),
    ],
)
def test_what_is_no_weight_is_named_and_nothing_is_loaded(content, expected, tmp_path):
    model = nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=f"a.pt: {expected}"):
        load_weights(model, str(tmp_path / "a.pt"))
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_a_head_that_stays_as_it_is_may_be_anything_finite_or_not(tmp_path):
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 3)})
    weights = {name: torch.ones(value.shape) for name, value in model["body"].state_dict().items()}
    content = {f"body.{name}": value for name, value in weights.items()}
    torch.save(content | {"head.weight": NAN}, tmp_path / "a.pt")
    kept = load_weights(model, str(tmp_path / "a.pt"), ("head.",))
    assert kept == ["head.weight", "head.bias"]
