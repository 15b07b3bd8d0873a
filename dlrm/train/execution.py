"""Stages of a network: recomputed activations, and parts of a pipeline."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_BatchNorm = nn.modules.batchnorm._BatchNorm


def recompute(stages: Mapping[str, nn.Module]) -> None:
    """Makes each stage with weights keep only its input for the backward pass.

    The backward pass recomputes the rest with the same random numbers, and leaves the statistics of
    batch norm as they are.
    """
    for stage in stages.values():
        if any(True for _ in stage.parameters()):
            norms = [module for module in stage.modules() if isinstance(module, _BatchNorm)]
            contexts = partial(lambda norms: (nullcontext(), _statistics_kept(norms)), norms)
            stage.forward = partial(  # type: ignore[method-assign]
                checkpoint, stage.forward, use_reentrant=False, context_fn=contexts
            )


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
    return [{name: stages[name] for name in names[b:e]} for b, e in pairwise(bounds)]
