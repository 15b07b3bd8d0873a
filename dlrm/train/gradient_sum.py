"""Sums the gradients of dense parameters over the ranks during the backward pass.

torch's DistributedDataParallel does not fit: it averages, it excludes the tables only through a
private function, and it rearranges its buckets after the first step, so that with three or more
ranks a resumed run would sum in another order than the run that it continues.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.distributed import World, all_sum
from dlrm.step_clock import EXCHANGE, part

_BUCKET_BYTES = 4 << 20  # large enough for the network, small enough to start early


@torch.no_grad()
def average_statistics(model: nn.Module, average: Mapping[str, Tensor], world: World) -> None:
    """Gives every rank the mean of the ranks' statistics of batch norm.

    Args:
        model: the model with norms; other buffers, such as edges of bins, are equal on all ranks.
        average: EMA of its weights and buffers, by name; may be empty.
    """
    if world.size == 1:
        return
    for prefix, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            for name, value in module.named_buffers(prefix, recurse=False):
                if value.is_floating_point():
                    all_sum(value, world).div_(world.size)
                    if name in average:
                        all_sum(average[name], world).div_(world.size)


class GradientSum:
    """Sums gradients over the ranks, bucket by bucket, as soon as a bucket is complete.

    Every rank has the same parameters in the same order. Buckets are filled from the last parameter
    on, since its gradient comes first, and sent in that order on every rank. The last bucket waits
    for the end of the backward pass, and carries the other numbers that the update needs from all
    ranks.
    """

    def __init__(self, parameters: Iterable[Tensor], world: World):
        self._armed = False
        self._buckets: list[_Bucket] = []
        if world.size == 1:
            return
        for parameter in reversed(list(parameters)):
            last = self._buckets[-1] if self._buckets else None
            if last is None or last.bytes >= _BUCKET_BYTES or last.dtype != parameter.dtype:
                last = _Bucket(parameter.dtype, world)
                self._buckets.append(last)
            last.parameters.append(parameter)
            last.bytes += parameter.nbytes
            parameter.register_post_accumulate_grad_hook(self._arrived)
        if not self._buckets or self._buckets[-1].dtype != torch.float32:
            self._buckets.append(_Bucket(torch.float32, world))
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}

    def expect(self) -> None:
        """Announces the last backward pass of a step, whose gradients are sent as they arrive."""
        self._armed, self._next = True, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def wait(self, beside: Tensor | None = None) -> Tensor | None:
        """Replaces every gradient by the sum over the ranks; a missing gradient counts as zeros.

        Returns the sums of the numbers `beside`, float32 `[count]`, or None if all ranks have none.
        """
        self._armed, sums = False, beside
        for bucket in self._buckets[self._next :]:
            bucket.send(beside if bucket is self._buckets[-1] else None)
        if self._buckets:
            with part(EXCHANGE):
                for bucket in self._buckets:
                    sums = bucket.receive()
        return sums

    def _arrived(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        self._bucket_of[id(parameter)].missing -= 1
        while self._next < len(self._buckets) - 1 and not self._buckets[self._next].missing:
            self._buckets[self._next].send()
            self._next += 1


class _Bucket:
    """Parameters whose gradients travel together, the last bucket's followed by other numbers."""

    def __init__(self, dtype: torch.dtype, world: World):
        self.dtype, self.bytes, self.missing = dtype, 0, 0
        self._group = world.gradients or world.group
        self.parameters: list[Tensor] = []

    def send(self, beside: Tensor | None = None) -> None:
        parts = [_flat_gradient(parameter) for parameter in self.parameters]
        parts += [] if beside is None else [beside]
        self._sizes = [part.numel() for part in parts]
        if parts:
            self._sum = torch.cat(parts)
            self._pending = dist.all_reduce(self._sum, group=self._group, async_op=True)

    def receive(self) -> Tensor | None:
        """Waits for the sums, sets the gradients, and returns the sums of the rest, if any."""
        if not self._sizes:
            return None
        self._pending.wait()
        sums = self._sum.split(self._sizes)
        for parameter, grad in zip(self.parameters, sums, strict=False):
            strides = parameter.stride()  # of channels-last weights; fused updates need them
            parameter.grad = grad.as_strided(parameter.shape, strides, grad.storage_offset())
        del self._sum, self._pending
        return sums[-1] if len(sums) > len(self.parameters) else None


def _flat_gradient(parameter: Tensor) -> Tensor:
    """Returns the gradient in the parameter's memory order; zeros if it has none."""
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if grad.stride() != parameter.stride():
        grad = torch.empty_like(parameter).copy_(grad)
    return grad.as_strided((parameter.numel(),), (1,))
