"""A recorded step equals the eager one; on the CPU, operators are recorded, not CUDA launches.

See tests/op_recorder.py; with a GPU the same tests record CUDA graphs.
"""

from types import SimpleNamespace

import pytest
import torch
from op_recorder import OpRecorder

from dlrm.data.clicks.batch import Batch, Shard
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.config import TrainConfig
from dlrm.train.cuda_graph import CudaRecorder, GraphedCallable
from dlrm.train.ema import EMA
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.precision import LossScaler
from dlrm.train.trainer import Trainer

pytestmark = pytest.mark.captures

SIZES = (3, 40, 1, 7)
BATCH = 16


@pytest.fixture
def recorder(device):
    return OpRecorder() if device == "cpu" else CudaRecorder(device)


def train(
    world,
    recorder=None,
    tables="sgd",
    mlps="sgd",
    dtype=torch.float32,
    embedding_dtype="fp32",
    scale=None,
    max_grad_norm=None,
    averaged=False,
    parts=None,
    **config,
):
    """Trains two epochs of 12 batches and a short one; returns history, weights, skipped steps."""
    data = DataConfig(
        dataset_type="synthetic_gpu",
        batch_size=BATCH,
        test_batch_size=BATCH,
        num_numerical_features=4,
        synthetic_dataset_table_sizes=SIZES,
        synthetic_dataset_num_entries=BATCH * 12 + 5,
        device=world.device,
    )
    model = DLRMConfig(
        *(SIZES, 4, 8, (16, 8), (16, 8, 1)),
        embedding_dtype=embedding_dtype,
        **{"embedding_init_scale": 9, **(parts or {})},
    )
    torch.manual_seed(0)
    task = Recommendation(model, world, dtype, seed=3, recorder=recorder)
    shard = Shard(world, tuple(task.model.fields_by_rank[world.rank]))
    datasets = open_datasets(data, shard)
    train_set, test_set = datasets.train, datasets.test
    trainer = Trainer(
        task,
        optimizers=task.optimizers(OptimizerConfig(tables, mlps)),
        schedule=lambda step: 0.2 / step,
        config=TrainConfig(epochs=2, print_freq=1, test_freq=9, **config),
        world=world,
        scaler=LossScaler(
            None if scale is None else torch.tensor(scale).to(world.device), max_grad_norm
        ),
        ema=EMA(task.model, 0.9) if averaged else None,
    )
    trainer.log.quiet = True
    trainer.fit(ClickLoader(train_set, world.device), ClickLoader(test_set, world.device))
    weights = {**task.model.state_dict(), **trainer.parameters.average}
    return trainer.progress.history, weights, trainer.scaler.num_skipped()


CASES = [
    {"tables": "sgd", "mlps": "sgd"},
    {"tables": "adagrad", "mlps": "adagrad"},
    {"tables": "row_wise_adagrad", "mlps": "adam", "averaged": True},
    {"tables": "adam", "mlps": "adam", "embedding_dtype": "bf16", "dtype": torch.bfloat16},
    {"tables": "adagrad", "max_grad_norm": 0.01},
    {"tables": "adagrad", "gradient_accumulation_steps": 2},
    {"scale": 1024.0, "dtype": torch.float16, "tables": "adam", "mlps": "adam"},
    {
        **{"tables": "adam", "mlps": "adam"},
        "parts": {"wide": True, "numerical_embedding": "piecewise", "interaction_op": "dot,dcn"},
    },
    {
        **{"tables": "adam", "mlps": "adam", "averaged": True},
        "parts": {"ensemble": 3, "wide": True, "embedding_init_scale": 1},
    },
    {
        "dtype": torch.bfloat16,
        "parts": {
            **{"numerical_embedding": "piecewise", "interaction_op": "dcn", "cross_rank": 3},
            **{"embedding_init_scale": 1, "cross_layers": 1},
        },
    },
    {
        "parts": {
            **{"numerical_embedding": "piecewise", "interaction_op": "cuda_dot,dcn"},
            **{"cross_structure": "parallel", "embedding_init_scale": 1, "cross_layers": 1},
        }
    },
]


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_a_recorded_run_is_the_run(device, recorder, case):
    if device == "cpu" and "gradient_accumulation_steps" in case:
        pytest.skip(
            "on the CPU torch's sum of sparse tensors has as many rows as its values ask for"
        )
    history, weights, _ = train(World(device=device), **case)
    recorded_history, recorded_weights, _ = train(World(device=device), recorder, **case)
    same = 0 if device == "cpu" else 1e-5  # GPUs vary the order of sums
    assert len(history) == len(recorded_history) > 24
    for entry, recorded in zip(history, recorded_history, strict=True):
        assert entry.keys() == recorded.keys()
        assert recorded == pytest.approx(entry, rel=same, abs=same)
    torch.testing.assert_close(recorded_weights, weights, rtol=same, atol=same)
    if device == "cpu":
        assert recorder.recordings == 2, "of steps and of predictions"
        assert recorder.replays > 2 * (12 - 3)


def test_steps_that_overflow_change_nothing(device, recorder):
    """Scaled gradients are near the largest number of float16."""
    half = {"dtype": torch.float16, "scale": 22000.0, "max_grad_norm": 1.0}
    history, weights, skipped = train(World(device=device), **half)
    recorded_history, recorded_weights, recorded_skipped = train(
        World(device=device), recorder, **half
    )
    assert 3 < skipped < 23
    if device == "cpu":
        assert (recorded_history, recorded_skipped) == (history, skipped)
        torch.testing.assert_close(recorded_weights, weights, rtol=0, atol=0)


def numbers(count, device="cpu", value=1.0):
    ids = torch.arange(count, dtype=torch.int32, device=device)[:, None]
    return Batch(
        torch.full((count, 2), value, device=device), ids, torch.zeros(count, device=device)
    )


def test_each_shape_that_keeps_coming_is_recorded(device, recorder):
    calls = []

    def function(batch):
        calls.append(len(batch.numerical))
        return batch.numerical.sum(dim=1) + batch.categorical[:, 0]

    graphed = GraphedCallable(function, recorder)
    for size in [4, 4, 4, 3, 4, 4, 4, 4, 4, 3, 5, 5, 5, 5, 4, 3, 5]:
        batch = numbers(size, device, value=float(len(calls)))
        expected = batch.numerical.sum(dim=1) + batch.categorical[:, 0]
        assert torch.equal(graphed(batch), expected)
    assert calls == [4, 4, 4, 3, 4, 4, 4, 4, 3, 5, 5, 5, 5, 3]


def test_the_short_last_batch_of_an_epoch_is_not_recorded(device, recorder):
    calls = []

    def function(batch):
        calls.append(len(batch.numerical))
        return batch.numerical

    graphed = GraphedCallable(function, recorder)
    for size in [4, 4, 4, 4, 4, 3] * 6:
        graphed(numbers(size, device))
    assert calls == [4, 4, 4, 4, 3, 3, 3, 3, 3, 3]


def test_results_are_the_callers_own(device, recorder):
    graphed = GraphedCallable(lambda batch: batch.numerical.sum(dim=1), recorder)
    results = [graphed(numbers(2, device, value=float(i))) for i in range(6)]
    assert [result.tolist() for result in results] == [[2.0 * i] * 2 for i in range(6)]


def test_recording_what_waits_for_the_device_fails(device, recorder):
    graphed = GraphedCallable(
        lambda batch: batch.numerical * batch.numerical.sum().item(), recorder
    )
    for _ in range(3):
        graphed(numbers(2, device))
    with pytest.raises(RuntimeError, match="waits for the device|captur"):
        graphed(numbers(2, device))


class Streams:
    """Streams of a simulated GPU whose capture cannot end, as after a wait for the device.

    Attributes:
        current: the stream that launches would use.
    """

    def __init__(self, monkeypatch):
        self.current = SimpleNamespace(device=torch.device("cuda:0"), name="the caller's")
        side = SimpleNamespace(device=torch.device("cuda:0"), name="the recorder's")
        graph = SimpleNamespace(capture_begin=lambda *_, **__: None, capture_end=self._end)
        for name, value in {
            "Stream": lambda device: side,
            "CUDAGraph": lambda: graph,
            "graph_pool_handle": lambda: (0, 0),
            "current_stream": lambda device=None: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "_get_device_index": lambda *_: 0,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)

    def _end(self):
        raise RuntimeError("operation failed due to a previous error during capture")


def test_a_failed_recording_gives_the_stream_back(monkeypatch):
    streams = Streams(monkeypatch)
    recorder = CudaRecorder("cuda:0")
    outside, within = streams.current, []
    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorder.record(lambda: within.append(streams.current))
    assert [stream.name for stream in within] == ["the recorder's"]
    assert streams.current is outside
