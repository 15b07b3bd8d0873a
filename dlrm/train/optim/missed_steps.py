"""The optimizer steps that rows of a weight have missed because no batch looked them up."""

import torch
from torch import Tensor


class MissedSteps:
    """Counts the steps since all rows of a weight were up to date, and those that each row has had.

    Args:
        columns: numbers per step.
        dtype: dtype of these numbers.

    Attributes:
        done: number of steps that each row has had, `[rows]` int32.
    """

    bytes_of_row = 4

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device):
        self.done = torch.zeros(rows, dtype=torch.int32, device=device)
        self._numbers = torch.empty(64, columns, dtype=dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def numbers(self) -> Tensor:
        """The numbers of the steps, `[steps, columns]` on the CPU; see `dlrm.ops.row_rules`."""
        return self._numbers[: self._count]

    def add(self, numbers: tuple[float, ...], rows: Tensor) -> None:
        """Adds a step, which the rows of its batch have already had."""
        if self._count == len(self._numbers):
            self._numbers = torch.cat([self._numbers, torch.empty_like(self._numbers)])
        self._numbers[self._count] = torch.tensor(numbers, dtype=self._numbers.dtype)
        self._count += 1
        self.done[rows] = self._count

    def forget(self) -> None:
        """Restarts the count: all rows are up to date."""
        if self._count:
            self.done.zero_()
            self._count = 0
