"""How a network is run: op by op or as a graph, and with activations computed anew in backward."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

EXECUTIONS = ("eager", "graph")
GRAPH_BACKENDS = ("compile", "trace")
_BatchNorm = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class ExecutionConfig:
    """Field names are those of the command line's flags.

    Attributes:
        execution: "eager", or "graph" for a compiled one.
        graph_backend: of "graph": "compile" is torch.compile, "trace" torch.jit.trace.
        recompute: keep the inputs of stages only, and compute the rest anew in the backward pass.

    Raises:
        ValueError: an impossible value; flag and value are named.
    """

    execution: str = "eager"
    graph_backend: str = "compile"
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.execution not in EXECUTIONS:
            raise ValueError(f"--execution {self.execution}: expected one of {EXECUTIONS}")
        if self.graph_backend not in GRAPH_BACKENDS:
            raise ValueError(
                f"--graph_backend {self.graph_backend}: expected one of {GRAPH_BACKENDS}"
            )
        if self.recompute and self.execution == "graph":
            raise ValueError(
                "--recompute contradicts --execution graph: a graph chooses by itself what its "
                "backward pass keeps; use --execution eager"
            )


def executable(model: nn.Module, config: ExecutionConfig) -> Callable[..., Any]:
    """Returns what to call for the model's forward pass; weights and buffers stay the model's.

    A trace is made at the first call in training and at the first in evaluation, and holds for
    inputs of the shapes it was made with; other shapes run op by op.
    """
    if config.execution == "eager":
        return model
    return torch.compile(model) if config.graph_backend == "compile" else _Traced(model)


class _Traced:
    """Traces of a model, one for each mode, input shapes and dtype."""

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
        """Traces without a trace of it: statistics and random state are as before."""
        buffers = {name: value.clone() for name, value in self._model.named_buffers()}
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")  # torch deprecates it; whoever asks for it knows
            trace = torch.jit.trace(self._model, tuple(inputs), check_trace=False)
        with torch.no_grad():
            for name, value in self._model.named_buffers():
                value.copy_(buffers[name])
        return trace


def recompute(stages: Mapping[str, nn.Module]) -> None:
    """Makes each stage with weights keep nothing but its input for the backward pass.

    The rest is computed again there, with the same random numbers. Statistics of batch norm are
    taken once.
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


def partition(stages: Mapping[str, nn.Module], splits: Sequence[str]) -> list[dict[str, nn.Module]]:
    """Cuts a network's stages; each name in `splits` begins a part.

    Raises:
        ValueError: a name that is none of the stages', or not in their order.
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
