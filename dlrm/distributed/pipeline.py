"""Runs each part of a network in a process of its own, on several micro-batches at once.

The order of the work is that of torch.distributed.pipelining.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.distributed.collectives import gather
from dlrm.distributed.world import World

# A part: the output of the previous part, or None, and its input from a batch -> its own output.
Run = Callable[[Tensor | None, Any], Any]


def bubble_fraction(schedule: str, parts: int, micro_batches: int) -> float:
    """Returns the share of a step in which a process of a pipeline waits for the others.

    It is (S - 1) / (M + S - 1) for S parts that take the same time and M micro-batches (Huang et
    al., 2019). With one micro-batch at a time, it is (S - 1) / S.
    """
    together = 1 if schedule == "sequential" else micro_batches
    return (parts - 1) / (together + parts - 1)


class Pipeline:
    """One process's part of a network; all processes of the pipeline call the same methods.

    Args:
        run: the part. All parts except the last return one tensor, whose shape depends only on the
            shape of the batch.
        parts: the processes of the pipeline, in the order of the parts.
        schedule: "gpipe" computes all forward passes before the
            backward passes; "1f1b" alternates, and keeps the activations of at most as many
            micro-batches as there are parts; "sequential" finishes a micro-batch before the next.
        shared: weights that both the first and the last part hold.
    """

    def __init__(
        self,
        run: Run,
        parts: World,
        schedule: str = "gpipe",
        shared: Sequence[nn.Parameter] = (),
    ):
        assert schedule in ("gpipe", "1f1b", "sequential"), schedule
        self.parts, self.shared, self._run, self._kind = parts, shared, run, schedule
        self._is_first, self._is_last = parts.rank == 0, parts.rank == parts.size - 1
        self._schedules: dict[int, Any] = {}  # number of micro-batches -> torch's schedule
        self._batches: Sequence[Any] = ()
        self._loss: Callable[[Any, int], Tensor]

    @torch.no_grad()
    def output(self, batch: Any) -> Any:
        """Returns the last part's output of a batch on every rank; computes no gradients."""
        _, output = self._forward(batch)
        last = self.parts.size - 1
        shapes = gather([(t.shape, t.dtype) for t in _tuple(output)], self.parts)[last]
        results = _tuple(output) if self._is_last else [self._empty(*shape) for shape in shapes]
        for result in results:
            dist.broadcast(result, group=self.parts.group, group_src=last)
        return results[0] if len(results) == 1 else tuple(results)

    def prepare(self, batches: Sequence[Any]) -> None:
        """Determines the shapes of the parts' messages, once for each number of micro-batches.

        Call it in evaluation mode. torch's own inference of shapes would run the part in training
        mode and count a micro-batch twice in the statistics of batch norm.
        """
        if len(batches) in self._schedules:
            return
        from torch.distributed import pipelining  # imported here, since it takes a second

        with torch.no_grad():
            received, output = self._forward(batches[0])
        stage = pipelining.PipelineStage(
            _Part(self._run_numbered),
            self.parts.rank,
            self.parts.size,
            torch.device(self.parts.device),
            input_args=torch.zeros(1, dtype=torch.int64) if received is None else _leaf(received),
            output_args=tuple(_leaf(tensor) for tensor in _tuple(output)),
            group=self.parts.group,
        )
        together = 1 if self._kind == "sequential" else len(batches)
        kind = pipelining.Schedule1F1B if self._kind == "1f1b" else pipelining.ScheduleGPipe
        schedule = kind(stage, together, self._judge, scale_grads=False)
        self._schedules[len(batches)] = schedule

    def backward(self, batches: Sequence[Any], loss: Callable[[Any, int], Tensor]) -> None:
        """Adds the gradients of the losses of all micro-batches to those of the part's weights.

        Args:
            batches: micro-batches with the shapes given to `prepare`, the same on all ranks of the
                pipeline.
            loss: the last part's output and the micro-batch's number -> loss; called on the last
                rank only.
        """
        self._batches, self._loss = batches, loss
        schedule = self._schedules[len(batches)]
        together = 1 if self._kind == "sequential" else len(batches)
        for numbers in torch.arange(len(batches)).split(together):
            first = (numbers,) if self._is_first else ()
            schedule.step(*first, number=numbers, target=numbers, return_outputs=False)
        self._batches = ()
        if self._is_first or self._is_last:
            for weight in self.shared:
                self._sum_gradient(weight)

    def _run_numbered(self, received: Tensor, number: Tensor) -> Any:
        """Runs the part on a micro-batch: torch's schedules pass its number on."""
        hidden = None if self._is_first else received.clone()  # layers may work in place
        output = self._run(hidden, self._batches[int(number)])
        return output if self._is_last else output.contiguous()

    def _judge(self, output: Any, number: Tensor) -> Tensor:
        return self._loss(output, int(number))

    def _forward(self, batch: Any) -> tuple[Tensor | None, Any]:
        """Runs a batch through all parts; returns the input and the output of this one."""
        rank, group = self.parts.rank, self.parts.group
        received, hidden = None, None
        if not self._is_first:
            shape: list[Any] = [None]
            dist.recv_object_list(shape, group=group, group_src=rank - 1)
            received = self._empty(*shape[0])
            dist.recv(received, group=group, group_src=rank - 1)
            hidden = received.clone()
        output = self._run(hidden, batch)
        if not self._is_last:
            output = output.contiguous()
            shape = [(output.shape, output.dtype)]
            dist.send_object_list(shape, group=group, group_dst=rank + 1)
            dist.send(output, group=group, group_dst=rank + 1)
        return received, output

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.parts.device)

    def _sum_gradient(self, weight: nn.Parameter) -> None:
        """Adds the gradients of the first and the last part, on both."""
        assert weight.grad is not None
        peer = self.parts.size - 1 if self._is_first else 0
        theirs = torch.empty_like(weight.grad)
        transfers = [
            dist.P2POp(way, gradient, group=self.parts.group, group_peer=peer)
            for way, gradient in ((dist.isend, weight.grad), (dist.irecv, theirs))
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        weight.grad += theirs


class _Part(nn.Module):
    """A function as a module, which torch's stages require; its weights stay in place."""

    def __init__(self, run: Callable[..., Any]):
        super().__init__()
        self._run = run

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        return self._run(*received, number)


def _tuple(output: Any) -> tuple[Tensor, ...]:
    outputs = output if isinstance(output, tuple) else (output,)
    return tuple(tensor.contiguous() for tensor in outputs)


def _leaf(tensor: Tensor) -> Tensor:
    """Returns an example of a tensor that travels with gradients."""
    return torch.empty_like(tensor).requires_grad_()
