"""Averages of weights: the EMA over the steps of a run, and one over its saved checkpoints."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """Exponential moving average of weights: a <- decay * a + (1 - decay) * w after every step.

    It starts at the initial weights. Buffers, such as the statistics of batch norm, are averaged as
    well; integer buffers are copied.

    Args:
        decay: in [0, 1).
        weights: the entries of its state to average, by name; None is all.

    Attributes:
        state: the average that checkpoints store: name -> tensor.
    """

    def __init__(self, model: nn.Module, decay: float, weights: Mapping[str, Tensor] | None = None):
        own = model.state_dict(keep_vars=False)  # the same memory as the model's
        self._weights = {n: v for n, v in own.items() if weights is None or n in weights}
        self.state = {name: value.detach().clone() for name, value in self._weights.items()}
        names = [name for name, value in self._weights.items() if value.is_floating_point()]
        self._averages = [self.state[name] for name in names]
        self._latest, self._decay = [self._weights[name] for name in names], decay
        self._copied = self._weights.keys() - set(names)

    @torch.no_grad()
    def update(self) -> None:
        """Adds the weights of a step to the average."""
        torch._foreach_lerp_(self._averages, self._latest, 1 - self._decay)
        for name in self._copied:
            self.state[name].copy_(self._weights[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the model the averaged weights within the block."""
        trained = {name: value.clone() for name, value in self._weights.items()}
        self._set(self.state)
        try:
            yield
        finally:
            self._set(trained)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])


def average_in_order(weights: Iterable[Mapping[str, Tensor]], decay: float) -> dict[str, Tensor]:
    """Returns V = decay * V + (1 - decay) * w over a series of weights; V starts as the first.

    Integer buffers are taken from the last one.

    Raises:
        ValueError: the series is empty.
    """
    average: dict[str, Tensor] = {}
    for values in weights:
        for name, value in values.items():
            if name in average and value.is_floating_point():
                average[name].lerp_(value, 1 - decay)
            else:
                average[name] = value.clone()
    if not average:
        raise ValueError("--weight_avg_exp: expected one checkpoint or more, got none")
    return average
