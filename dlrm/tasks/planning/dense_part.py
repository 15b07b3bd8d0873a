"""Parameters, operations and values of a DLRM's dense part, counted on a model without memory."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.train.checkpoints.state import Parameters

_SAMPLES = 999_983  # a prime, which divides the sizes that grow with the batch, and no others


@dataclass(frozen=True)
class DensePart:
    """A DLRM without its tables.

    Attributes:
        parameters: number of float32 weights that training changes.
        state_bytes: bytes of everything that a checkpoint holds, buffers included.
        flops: floating-point operations of a sample's forward pass, in matrix products.
        vectors: numbers of a sample that enter the interaction beside the bottom MLP's.
        values: numbers of a sample that layers with weights read and write.
        widest: the most numbers of a sample that one of them writes.
    """

    parameters: int
    state_bytes: int
    flops: int
    vectors: int
    values: int
    widest: int


def dense_part_of(config: DLRMConfig) -> DensePart:
    """Returns the counts of a configuration, each of which is counted once."""
    return _counted(
        replace(
            config,
            table_sizes=(1,) * len(config.table_sizes),
            max_table_size=None,
            placement="balanced",
            embedding_type="joint_fused",
            wide=False,
        )
    )


@cache
@torch.no_grad()
def _counted(config: DLRMConfig) -> DensePart:
    model = DLRM(config, World(device="meta"))
    held = Parameters(model, model.table_parameters()).dense()
    numerical = torch.empty(_SAMPLES, config.num_numerical_features, device="meta")
    columns = [config.table_dims[table] for table in config.tables]
    shape = [sum(columns)] if config.has_narrow_tables else [len(columns), config.embedding_dim]
    vectors = torch.empty(_SAMPLES, *shape, dtype=model.dtype, device="meta")
    with FlopCounterMode(display=False) as operations, _LayerValues() as layers:
        model(numerical, numerical, received=[lambda: vectors])
    entering, _ = model.interaction_widths()
    trained = dict(model.named_parameters()).keys() & held.keys()
    return DensePart(
        parameters=sum(held[name].numel() for name in trained),
        state_bytes=sum(tensor.nbytes for tensor in held.values()),
        flops=operations.get_total_flops() // _SAMPLES,
        vectors=entering - config.embedding_dim,
        values=layers.values,
        widest=layers.widest,
    )


class _LayerValues(TorchDispatchMode):
    """Adds up the numbers of a sample that products with weights read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.values = self.widest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            read = [one.numel() for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            growing = [size for size in read if size % _SAMPLES == 0]
            if len(growing) < len(read):
                written = output.numel() // _SAMPLES
                self.values += sum(growing) // _SAMPLES + written
                self.widest = max(self.widest, written)
        return output
