"""Records a function's operators on the CPU as a CUDA graph would record its launches.

Recording changes no memory and refuses operators that wait for the device. A replay runs the same
operators on the same memory with the same numbers: it does not compute host values again.
"""

import contextlib
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_ATEN = torch.ops.aten
_WAITING = {
    _ATEN._local_scalar_dense.default,
    _ATEN._coalesce.default,
    _ATEN._unique2.default,
    _ATEN.unique_consecutive.default,
    _ATEN.unique_dim.default,
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN.equal.default,
}


_READING = ("tolist", "numpy", "item", "cpu", "__bool__", "__float__", "__int__")


def _refuse(name):
    def read(tensor):
        raise RuntimeError(f"{name} waits for the device, which nothing recorded may")

    return read


def _capturing():
    """Returns patches that tell torch's optimizers of a capture."""
    stream = mock.Mock(**{"is_capturing.return_value": True})
    device = torch.device("cuda")
    return (
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=device),
        mock.patch.object(torch.accelerator, "current_stream", return_value=stream),
    )


class OpRecorder:
    """A `dlrm.train.cuda_graph.CudaRecorder`.

    Attributes:
        recordings: number made.
        replays: number of replays.
    """

    def __init__(self):
        self.recordings, self.replays = 0, 0

    def run(self, function):
        return function()

    def record(self, function):
        self.recordings += 1
        refused = [mock.patch.object(torch.Tensor, name, _refuse(name)) for name in _READING]
        with contextlib.ExitStack() as stack:
            for patch in (*refused, *_capturing()):
                stack.enter_context(patch)
            with _Recording() as recording:
                result = function()
        recording.undo()

        def replay():
            self.replays += 1
            recording.replay()

        return replay, result


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self._calls, self._before, self._made = [], {}, set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        masks = op is _ATEN.index.Tensor and any(t.dtype == torch.bool for t in inputs[1:])
        if op in _WAITING or masks:
            raise RuntimeError(f"{op} waits for the device, which nothing recorded may")
        written = list(_written(op, args, kwargs))
        for part in (part for tensor in written for part in _parts(tensor)):
            self._keep(part)
        given = {_memory(part) for t in inputs for part in _parts(t)}
        # An operator replaces the indices and values of a sparse tensor it writes to.
        replaced = {id(t): (t, t._indices(), t._values()) for t in written if t.is_sparse}
        outputs = op(*args, **kwargs)
        self._made |= {_memory(p) for t in _tensors(outputs) for p in _parts(t)} - given
        outcome = list(map(_parts, _tensors(outputs)))
        self._calls.append(lambda: _again(op, args, kwargs, replaced, outcome))
        return outputs

    def _keep(self, tensor):
        memory = _memory(tensor)
        if memory not in self._made and memory not in self._before:
            storage = tensor.untyped_storage()
            self._before[memory] = storage, storage.clone()

    def undo(self):
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    @torch.no_grad()
    def replay(self):
        for call in self._calls:
            call()


def _again(op, args, kwargs, replaced, outputs):
    """Repeats an operator's call and copies its outputs to their old memory."""

    def as_before(value):
        if id(value) not in replaced:
            return value
        tensor, *parts = replaced[id(value)]
        return torch.sparse_coo_tensor(*parts, tensor.shape, check_invariants=False)

    args, kwargs = tree_map(as_before, (args, kwargs))
    for old, new in zip(outputs, _tensors(op(*args, **kwargs)), strict=True):
        for into, value in zip(old, _parts(new), strict=True):
            if _memory(into) != _memory(value):
                into.copy_(value)


def _written(op, args, kwargs):
    """Yields the tensors that an operator writes to by its schema."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name)
            if not argument.kwarg_only and position < len(args):
                value = args[position]
            yield from _tensors(value)


def _tensors(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _parts(tensor):
    """Returns the plain tensors of a tensor."""
    return [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()
