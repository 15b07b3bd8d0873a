"""Ends of a run's processes: with the launcher, and their exit codes."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked import is_running

from dlrm.flags import Values
from dlrm.tasks import ending, start
from dlrm.train.log import StoppedError


def test_a_second_sigterm_does_not_kill_a_rank_that_has_stopped():
    before = signal.getsignal(signal.SIGTERM)
    trainer = SimpleNamespace(stop_requested=False)
    try:
        with pytest.raises(StoppedError):
            train_until_stopped(trainer)
        assert trainer.stop_requested
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def train_until_stopped(trainer):
    with ending.stopped_by_sigterm(trainer):
        os.kill(os.getpid(), signal.SIGTERM)
        raise StoppedError("stopped after step 1")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
                "79.11 GiB of which 1.20 GiB is free. Of the allocated memory 70 GiB is allocated "
                "by PyTorch.\nSee the documentation"
            ),
            "error: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "79.11 GiB of which 1.20 GiB is free. A smaller --batch_size needs less, and "
            "--gradient_accumulation_steps computes it in parts; dlrm doctor says what is free",
        ),
        (
            RuntimeError(
                "joint_embedding: dlrm/_ops_cuda.so is compiled for the architectures 80, and this "
                "GPU's is 75: rebuild dlrm with DLRM_CUDA_ARCHS=75 in the environment (no kernel "
                "image)\nException raised from check_cuda"
            ),
            "error: joint_embedding: dlrm/_ops_cuda.so is compiled for the architectures 80, and "
            "this GPU's is 75: rebuild dlrm with DLRM_CUDA_ARCHS=75 in the environment (no kernel "
            "image)",
        ),
    ],
)
def test_what_a_gpu_lacks_is_one_line_that_says_what_to_do(error, line):
    def run():
        raise error

    with pytest.raises(SystemExit) as ended:
        ending.exit_with(run, None)
    assert ended.value.code == line


def test_an_error_of_ours_keeps_its_traceback():
    def run():
        raise RuntimeError("not expected")

    with pytest.raises(RuntimeError, match="not expected"):
        ending.exit_with(run, None)


@pytest.fixture
def group(tmp_path):
    """A process group of this process."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "message", ["the layers are not connected", "the request timed out", "Connection closed"]
)
def test_an_error_of_ours_on_several_ranks_keeps_its_traceback(group, message):
    def run():
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=message):
        ending.exit_with(run, None)


def test_a_rank_that_lost_another_says_so_in_a_line(group):
    place = "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553]"  # as gloo words it

    def run():
        raise RuntimeError(f"{place} Connection closed by peer [127.0.0.1]:1. This is typical")

    with pytest.raises(SystemExit) as ended:
        ending.exit_with(run, None)
    reason = f"{place} Connection closed by peer [127.0.0.1]:1"
    assert ended.value.code == f"rank 0 ends, since another rank has gone: {reason}"


@pytest.mark.parametrize("saved", ["seed-1/step-000000010", None])
def test_an_interrupted_training_of_seeds_names_what_it_saved(tmp_path, capsys, saved):
    def run():
        raise KeyboardInterrupt

    (tmp_path / "seed-2").mkdir()
    for checkpoint in filter(None, (saved, "step-000000020")):  # the latter of earlier seeds
        (tmp_path / checkpoint).mkdir(parents=True)
        (tmp_path / checkpoint / "manifest.json").touch()
    values = Values({"seeds": "1-2", "save_checkpoint_path": str(tmp_path)}, set())
    with pytest.raises(SystemExit) as ended:
        ending.exit_with(run, values)
    assert ended.value.code == 130
    expected = f"--resume continues from {tmp_path / saved}\n" if saved else "nothing was saved"
    assert capsys.readouterr().err.startswith(f"interrupted; {expected}")


def test_a_rank_whose_launcher_was_killed_ends():
    reader, writer = os.pipe()
    launcher = os.fork()
    if not launcher:
        if not os.fork():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # other tests leave theirs
            start.end_with_launcher()
            os.write(writer, str(os.getpid()).encode())
        time.sleep(300)
        os._exit(0)
    rank = int(os.read(reader, 20))
    assert is_running(rank)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    end = time.monotonic() + 100
    while is_running(rank) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(rank)
