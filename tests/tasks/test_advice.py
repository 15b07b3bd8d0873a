"""The configuration of a training on clicks advises flags that fit the model and the machine."""

import pytest
import torch

from dlrm.data.clicks.config import DataConfig
from dlrm.model.config import DLRMConfig
from dlrm.step_clock import PRODUCTS
from dlrm.tasks import advice
from dlrm.tasks.recommendation import Recommendation
from dlrm.tasks.settle import Config
from dlrm.train.config import PrecisionConfig, TrainConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.schedule import ScheduleConfig

SIZES = 10, 20


def advice_for_products(batch_size, can_be_recorded=False):
    data = DataConfig(
        dataset_type="synthetic_gpu",
        synthetic_dataset_table_sizes=SIZES,
        synthetic_dataset_num_entries=4 * batch_size,
        batch_size=batch_size,
        device="cpu",
    )
    chosen = Config(
        data=data,
        train=TrainConfig(),
        schedule=ScheduleConfig(),
        optimizers=OptimizerConfig(),
        precision=PrecisionConfig(),
    )
    config = DLRMConfig(SIZES, embedding_dim=8, bottom_mlp_sizes=(16, 8), top_mlp_sizes=(32, 1))
    task = Recommendation(config)
    return advice.advice(chosen, task, can_be_recorded)[PRODUCTS]


@pytest.mark.parametrize(
    ("batch_size", "threads", "idle", "advised"),
    [
        (64, 2, 0.2, True),
        (64, 2, 1.9, False),  # a high load average may be this package's own
        (64, 2, None, False),
        (64, 1, 0.2, False),
        (400_000, 2, 0.2, False),  # long steps gain from all threads
    ],
)
def test_one_thread_is_advised_for_short_steps_on_busy_cores(
    batch_size, threads, idle, advised, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(advice, "idle_cores", lambda: idle)
    monkeypatch.setattr(advice.os, "getloadavg", lambda: (5.0, 5.0, 5.0))
    told = advice_for_products(batch_size)
    assert ("OMP_NUM_THREADS=1, since other programs use the cores" in told) == advised


def test_graphs_are_advised_where_they_can_be_recorded():
    assert advice_for_products(64, can_be_recorded=True) == "--cuda_graphs"
    assert "--cuda_graphs" not in advice_for_products(64)
