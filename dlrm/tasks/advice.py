"""Flags that could make a DLRM's steps faster, by the part of the step that limits them."""

import os
from typing import TYPE_CHECKING

import torch

from dlrm.machine import idle_cores
from dlrm.model.placement import AUTO
from dlrm.step_clock import DATA, EXCHANGE, LOOKUP, PRODUCTS, UPDATE
from dlrm.tasks.recommendation import Recommendation

if TYPE_CHECKING:
    from dlrm.tasks.settle import Config

_SHORT_STEP = 1e9  # operations: some milliseconds of one core


def advice(config: "Config", task: Recommendation, can_be_recorded: bool = False) -> dict[str, str]:
    """Returns a flag to try for each part of a step, if one is left to try.

    Args:
        can_be_recorded: --cuda_graphs would record the steps.
    """
    device, data, model = task.world.device, config.data, task.model.config
    amp = ("--amp", config.precision.dtype(device) == torch.float32)
    narrow = ("--embedding_dtype bf16", model.embedding_dtype == "fp32")
    # Eager steps of a GPU may take as long as their launches do, which no part shows.
    recording = ("--cuda_graphs", can_be_recorded and task.recorder is None)
    crowded = _is_crowded(config, task)
    random = data.dataset_type == "synthetic_gpu" and not device.startswith("cuda")
    flags = {
        DATA: [
            ("--dataset_type synthetic_disk", random),
            ("--verify_data first", data.verify_data == "always"),
            ("reading from a faster disk or with more cores", True),
        ],
        EXCHANGE: [
            ("--placement auto", model.placement != AUTO),
            amp,
            ("a larger --batch_size", True),
        ],
        PRODUCTS: [
            recording,
            ("OMP_NUM_THREADS=1, since other programs use the cores", crowded),
            amp,
        ],
        LOOKUP: [recording, narrow],
        UPDATE: [recording, narrow],
    }
    helping = {part: [flag for flag, helps in of if helps] for part, of in flags.items()}
    return {part: found[0] for part, found in helping.items() if found}


def _is_crowded(config: "Config", task: Recommendation) -> bool:
    """Returns whether steps are so short, and cores so busy, that one thread is no slower."""
    weights = sum(weight.numel() for weight in task.parameter_groups()["dense"])
    short = 6 * weights * config.data.batch_size < _SHORT_STEP
    if not short or task.world.device != "cpu" or torch.get_num_threads() == 1:
        return False
    idle = idle_cores() if os.getloadavg()[0] > 1 else None  # it takes a fifth of a second
    return idle is not None and idle < torch.get_num_threads() - 0.5
