"""A device whose tensors have no values: finds operators that would mix devices on a GPU.

torch's fake tensors can be on any device, and an operator raises, as on a GPU, when its inputs are
on two. Without CUDA in torch, "cuda" tensors have no backward pass. Tensors on "lazy", a device
that nothing else uses, have one, and stand in for GPU tensors.
"""

import contextlib
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from dlrm.distributed import World
from dlrm.ops import library

NAME = "lazy:0"
_ATEN = torch.ops.aten


class FakeDevice(FakeTensorMode):
    """Makes all tensors in the block fake; numbers read from the device are 1.

    Attributes:
        copies: whether tensors may be copied from one device to another.
    """

    avoid_device_init = True  # else torch.tensor allocates on a GPU, if there is one

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self.copies = True

    def place(self, task):
        """Moves a task made on the CPU, with every parameter and buffer of its network."""
        with self:
            task.model.to(NAME)
        task.world = World(device=NAME)
        if hasattr(task.model, "world"):
            task.model.world = task.world
        self.allow_non_fake_inputs = False  # a real tensor from now on was not moved

    def batch(self, batch):
        with self:
            return batch.map(lambda tensor: self.from_tensor(tensor).to(NAME))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _ATEN._local_scalar_dense.default and args[0].device.type != "cpu":
            if args[0].dtype != torch.bool:
                return 1.0 if args[0].is_floating_point() else 1
            return getattr(args[0], "is_not_below", False)  # `0 <= rate`, but not `rate < 0`
        # torch does not check these, which also read scalars on their device.
        fused = func.name().startswith("aten::_fused_")
        if fused or func.namespace == "dlrm":
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            places = {str(tensor.device) for tensor in tensors}
            assert len(places) == 1, f"{func} of tensors on {', '.join(sorted(places))}"
        if fused:  # in place; few have a fake kernel
            return None
        if func is _ATEN._to_copy.default and not self.copies:
            place, to = args[0].device, torch.device(kwargs.get("device") or args[0].device)
            assert place.type == to.type, f"a tensor on {place} is copied to {to}"
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _ATEN.ge.Scalar:
            result.is_not_below = True
        return result


@contextlib.contextmanager
def fake_device():
    """Yields a device that the package and torch's optimizers use as a GPU with our kernels."""
    foreach = torch.utils._foreach_utils
    supported = [*foreach._get_fused_kernels_supported_devices(), "lazy"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_native_devices", library._native_devices | {"lazy"})
        patch.setattr(FakeTensor, "is_cuda", property(lambda t: t.device.type == "lazy"), False)
        patch.setattr(torch, "is_autocast_enabled", lambda *device: False)  # it knows no "lazy"
        for module in (foreach, sys.modules["torch.optim.optimizer"]):
            for kind in ("fused", "foreach"):
                name = f"_get_{kind}_kernels_supported_devices"
                patch.setattr(module, name, lambda: supported, raising=False)
        yield FakeDevice()
