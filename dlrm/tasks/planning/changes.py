"""The smallest change of a setting with which tables would fit in memory, as flags."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from dlrm.distributed.placement import Placement
from dlrm.model.config import FUSED_TYPES
from dlrm.store.config import shown
from dlrm.tasks.planning.workload import Workload, least_of_batch
from dlrm.train.optim.row_optimizers import TABLE_OPTIMIZERS

Fits = Callable[[Workload], bool]


def smaller_dim(workload: Workload, fits: Fits) -> Iterator[str]:
    """Yields the greatest power of two of columns, at least 4."""
    config = workload.config
    if config.has_narrow_tables:
        return  # whose columns are those of the schema
    for dim in (2**k for k in range((config.embedding_dim - 1).bit_length() - 1, 1, -1)):
        bottom = (*config.bottom_mlp_sizes[:-1], dim)
        smaller = replace(config, embedding_dim=dim, bottom_mlp_sizes=bottom)
        if fits(replace(workload, config=smaller)):
            yield f"--embedding_dim {dim} --bottom_mlp_sizes {','.join(map(str, bottom))}"
            return


def smaller_optimizer(workload: Workload, fits: Fits) -> Iterator[str]:
    """Yields the optimizer of the tables with the most state."""
    fused = workload.config.embedding_type in FUSED_TYPES
    usable = [kind for kind, one in TABLE_OPTIMIZERS.items() if fused or one.sparse is not None]
    changed = [replace(workload, optimizer=kind) for kind in usable if workload.optimizer]
    for smaller in sorted(changed, key=lambda one: -one.row_bytes):
        if smaller.row_bytes < workload.row_bytes and fits(smaller):
            yield f"--embedding_optimizer {smaller.optimizer}"
            return


def smaller_tables(workload: Workload, fits: Fits) -> Iterator[str]:
    """Yields the greatest cap of two digits on the rows of a table."""
    largest = max(workload.config.embedding_rows)
    caps = [n * 10**k for k in range(len(str(largest))) for n in range(10, 100)]
    caps = [cap for cap in caps if cap < largest]
    low, high = 0, len(caps)
    while low < high:
        middle = (low + high) // 2
        capped = replace(workload.config, hash_indices=True, max_table_size=caps[middle])
        low, high = (middle + 1, high) if fits(replace(workload, config=capped)) else (low, middle)
    if low:
        yield f"--hash_indices --max_table_size {caps[low - 1]}"


def smaller_batch(workload: Workload, fits: Fits, least: int) -> Iterator[str]:
    """Yields the first half of the batch size, half of that and so on, down to `least`."""
    batch_size = workload.batch_size // 2
    while batch_size >= least and not fits(replace(workload, batch_size=batch_size)):
        batch_size //= 2
    if batch_size >= least:
        yield f"--batch_size {batch_size}"


def stored(workload: Workload, placement: Placement, memory: int) -> Iterator[str]:
    """Yields a store with this memory for the tables of each rank, if a batch needs no more."""
    config = workload.config
    if config.embedding_type not in FUSED_TYPES:
        return
    if not placement.is_whole:
        return
    needed = max(least_of_batch(placement, rank, workload) for rank in range(placement.num_ranks))
    if memory >= needed:
        yield f"--table_memory {shown(memory, round_up=False)} --table_store DIR"
