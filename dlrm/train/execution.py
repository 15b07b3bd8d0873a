"""Execution of a network: op by op or as a graph, and with recomputed activations."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlrm.train.config import ExecutionConfig as ExecutionConfig

_BatchNorm = nn.modules.batchnorm._BatchNorm


def executable(model: nn.Module, config: ExecutionConfig) -> Callable[..., Any]:
    """Returns the callable of the model's forward pass; weights and buffers stay the model's.

    With "trace", the first call in training and the first in evaluation make a trace for inputs of
    their shapes; other shapes run op by op.
    """
    if config.execution == "eager":
        return model
    return torch.compile(model) if config.graph_backend == "compile" else _Traced(model)


_graph = functools.partial(torch.compile, fullgraph=True)  # fails if it needs several graphs
MODULE_EXECUTIONS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "eager": lambda module: module,
    "graph": _graph,
    "lazy": _graph,  # the name of Habana's mode
}


class _Traced:
    """Traces of a model, one for each mode, with the shapes and dtypes of its first inputs."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._shapes: dict[bool, tuple] = {}
        self._traces: dict[bool, Callable[..., Any]] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        training = self._model.training
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if training not in self._traces:
            self._shapes[training] = shapes
            self._traces[training] = self._trace(inputs)
        if self._shapes[training] != shapes:
            return self._model(*inputs)
        return self._traces[training](*inputs)

    def _trace(self, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Traces without side effects: statistics and random state are as before."""
        buffers = {name: value.clone() for name, value in self._model.named_buffers()}
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")  # torch deprecates tracing; its users know
            trace = torch.jit.trace(self._model, tuple(inputs), check_trace=False)
        with torch.no_grad():
            for name, value in self._model.named_buffers():
                value.copy_(buffers[name])
        return trace


def recompute(stages: Mapping[str, nn.Module]) -> None:
    """Makes each stage with weights keep only its input for the backward pass.

    The backward pass recomputes the rest with the same random numbers, and leaves the statistics of
    batch norm as they are.
    """
    for stage in stages.values():
        if any(True for _ in stage.parameters()):
            norms = [module for module in stage.modules() if isinstance(module, _BatchNorm)]
            stage.forward = functools.partial(  # type: ignore[method-assign]
                checkpoint,
                stage.forward,
                use_reentrant=False,
                context_fn=functools.partial(_contexts, norms),
            )


def _contexts(norms: Iterable[_BatchNorm]):
    return nullcontext(), _statistics_kept(norms)


@contextmanager
def _statistics_kept(norms: Iterable[_BatchNorm]) -> Iterator[None]:
    buffers = [(norm, dict(norm._buffers)) for norm in norms]
    for norm, kept in buffers:
        norm._buffers.update({k: v if v is None else v.clone() for k, v in kept.items()})
    try:
        yield
    finally:
        for norm, kept in buffers:
            norm._buffers.update(kept)


def keep_only(model: nn.Module, stages: Iterable[nn.Module], shared: Iterable[Tensor] = ()) -> None:
    """Drops the weights and buffers of a model that none of the given stages has.

    Args:
        model: its modules stay; dropped entries become None, and are missing in the state.
        stages: modules of the model.
        shared: weights of other stages that are kept as well.
    """
    kept = {id(tensor) for tensor in shared}
    for stage in stages:
        kept.update(id(tensor) for tensor in (*stage.parameters(), *stage.buffers()))
    for module in model.modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in own:
            if id(tensor) not in kept:
                setattr(module, name, None)


def partition(stages: Mapping[str, nn.Module], splits: Sequence[str]) -> list[dict[str, nn.Module]]:
    """Divides a network's stages; each name in `splits` begins a part.

    Raises:
        ValueError: a name is not a stage's, or the names are not in the order of the stages.
    """
    names = list(stages)
    if unknown := [name for name in splits if name not in stages]:
        raise ValueError(
            f"--pipeline_splits {unknown[0]}: no such stage; expected of {', '.join(names)}"
        )
    starts = [names.index(name) for name in splits]
    if starts != sorted(set(starts)) or 0 in starts:
        raise ValueError(
            f"--pipeline_splits {','.join(splits)}: expected each name once, in the order of the "
            f"stages, and not the first, {names[0]}"
        )
    bounds = [0, *starts, len(names)]
    return [
        {name: stages[name] for name in names[begin:end]}
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]
