"""--deterministic sets up torch before CUDA starts; nothing runs that torch would refuse."""

import os

import pytest
import small_images
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm.language import command as bert, flags as bert_flags
from dlrm.ops.library import cuda_switches
from dlrm.tasks import start
from dlrm.tasks.config import RESUMABLE
from dlrm.vision import command as cnn, flags as cnn_flags

pytestmark = pytest.mark.long
VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
IMAGES = [
    *("--base_device=cpu", "--mode=train", "--image_size=32", "--num_classes=7"),
    *("--data=generated", "--synthetic_dataset_num_entries=16", "--batch_size=8"),
    *("--test_batch_size=16", "--lr=0.01", "--epochs=1"),
]
TEXTS = [
    *("--base_device=cpu", "--mode=pretrain", "--num_layers=1", "--hidden_size=16"),
    *("--num_heads=2", "--intermediate_size=32", "--lr=1e-3", "--batch_size=4", "--epochs=1"),
    *("--data=generated", "--synthetic_dataset_num_entries=8", "--vocab_size=60"),
    *("--max_seq_length=16", "--max_predictions_per_seq=3", "--test_batch_size=8"),
]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")  # to have it restored
    monkeypatch.delenv(VARIABLE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(params=["main", "resnet50", "efficientnet_b0", "bert"])
def train(request, monkeypatch):
    """A small training run of each command; takes flags."""
    name = request.param
    if name == "main":
        command = request.getfixturevalue("command")
        return lambda *flags: command("--max_steps=4", "--test_freq=4", *flags)
    if name == "bert":
        return lambda *flags: bert.run(bert_flags.parse([*TEXTS, *flags]))
    small_images.shrink(monkeypatch.setitem)
    return lambda *flags: cnn.run(cnn_flags.parse([*IMAGES, f"--model={name}", *flags]))


def is_seen_by_the_kernels():
    return bool(cuda_switches() & 2)  # as in csrc/cuda/runtime.h


def test_torch_and_cublas_are_told_before_cuda_starts(train, monkeypatch):
    found = []

    def join(*arguments):  # where CUDA starts
        found.append((os.environ.get(VARIABLE), is_seen_by_the_kernels()))
        return joined(*arguments)

    joined = start.join
    monkeypatch.setattr(start, "join", join)
    assert train("--deterministic")["training_loss"] > 0
    assert found == [(":4096:8", True)]
    assert is_seen_by_the_kernels()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    train()
    assert not is_seen_by_the_kernels()


def test_a_setting_of_the_users_stays(command, monkeypatch):
    monkeypatch.setenv(VARIABLE, ":16:8")
    command("--max_steps=1", "--deterministic")
    assert os.environ[VARIABLE] == ":16:8"


REFUSED = {  # on CUDA, by the documentation of torch.use_deterministic_algorithms
    *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("adaptive_max_pool2d_backward", "fractional_max_pool2d_backward"),
    *("fractional_max_pool3d_backward", "max_unpool2d", "max_unpool3d"),
    *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
    *("_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward"),
    *("upsample_trilinear3d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward"),
    *("reflection_pad3d_backward", "nll_loss2d_forward", "_ctc_loss_backward", "put_", "histc"),
    *("median", "kthvalue", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
}


class _Refusing(TorchDispatchMode):
    """Refuses what torch refuses on CUDA in deterministic mode."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        floats = name.startswith("cumsum") and args[0].is_floating_point()
        weighted = name == "bincount" and len(args) > 1 and args[1] is not None
        if name in REFUSED or floats or weighted:
            raise RuntimeError(f"{func} has no deterministic kernel for CUDA")
        return func(*args, **(kwargs or {}))


def test_nothing_runs_that_torch_refuses_on_cuda(train):
    with _Refusing():
        train()


def test_what_torch_refuses_would_be_noticed():
    with _Refusing(), pytest.raises(RuntimeError, match="aten.cumsum.default"):
        torch.ones(3).cumsum(0)


def test_resuming_may_change_it():
    for may_change in (RESUMABLE, cnn_flags.FLAGS.resumable, bert_flags.RESUME_MAY_CHANGE):
        assert "deterministic" in may_change
