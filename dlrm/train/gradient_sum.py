"""Sums the gradients of dense parameters over the ranks while the backward pass goes on.

Not torch's DistributedDataParallel: that averages, would have to be told of the tables through a
private function, and lays its buckets out anew after the first step, so that among three ranks or
more a resumed run sums in another order than the run it continues.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.distributed import World, all_sum

_BUCKET_BYTES = 4 << 20  # large enough for the network, small enough to start early


@torch.no_grad()
def average_statistics(model: nn.Module, average: Mapping[str, Tensor], world: World) -> None:
    """Gives every rank the mean of what the ranks have counted, as batch norm's statistics.

    Args:
        model: whose buffers are those.
        average: of its weights and buffers over the steps, by name; may be empty.
        world: the ranks.
    """
    if world.size > 1:
        kept = model.state_dict()
        for name, value in model.named_buffers():
            if name in kept and value.is_floating_point():
                all_sum(value, world).div_(world.size)
                if name in average:
                    all_sum(average[name], world).div_(world.size)


class GradientSum:
    """Sums gradients over the ranks, bucket by bucket, as soon as a bucket has all of its own.

    Every rank has the same parameters in the same order. Buckets are filled from the last parameter
    on, since its gradient comes first, and sent in that order on every rank.

    Args:
        parameters: those whose gradients are summed.
        world: the ranks.
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
            last.add(parameter)
            parameter.register_post_accumulate_grad_hook(self._arrived)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}

    def expect(self) -> None:
        """Announces the last backward pass of a step: its gradients are sent as they come."""
        self._armed, self._next = True, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def wait(self) -> None:
        """Makes every gradient the sum over the ranks; zeros where a rank had none."""
        self._armed = False
        for bucket in self._buckets[self._next :]:
            bucket.send()
        for bucket in self._buckets:
            bucket.receive()

    def _arrived(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        self._bucket_of[id(parameter)].missing -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._buckets[self._next].send()
            self._next += 1


class _Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, dtype: torch.dtype, world: World):
        self.dtype, self._world, self.bytes, self.missing = dtype, world, 0, 0
        self.parameters: list[Tensor] = []

    def add(self, parameter: Tensor) -> None:
        self.parameters.append(parameter)
        self.bytes += parameter.numel() * parameter.element_size()

    def send(self) -> None:
        self._sum = torch.cat([_flat_gradient(parameter) for parameter in self.parameters])
        self._pending = dist.all_reduce(self._sum, group=self._world.group, async_op=True)

    def receive(self) -> None:
        self._pending.wait()
        sums = self._sum.split([parameter.numel() for parameter in self.parameters])
        for parameter, grad in zip(self.parameters, sums, strict=True):
            strides = parameter.stride()  # those of channels-last weights; fused updates need them
            parameter.grad = grad.as_strided(parameter.shape, strides, grad.storage_offset())
        del self._sum, self._pending


def _flat_gradient(parameter: Tensor) -> Tensor:
    """The gradient in the order in which the parameter lies in memory; zeros where it has none."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    if grad.stride() != parameter.stride():
        grad = torch.empty_like(parameter).copy_(grad)
    return grad.as_strided((parameter.numel(),), (1,))
