"""Which process holds which embedding tables."""

from collections.abc import Sequence

PLACEMENTS = ("balanced", "nvidia")
AUTO = "auto"  # as `dlrm.tasks.planning` says


def place_tables(
    table_sizes: Sequence[int],
    num_ranks: int,
    placement: str = "balanced",
    lookups: Sequence[int] | None = None,
) -> list[list[int]]:
    """Returns the tables of each rank, whole tables, in ascending order.

    "balanced" gives a rank no further table once it has its share of the lookups, and the largest
    table that is left to whoever of the others has the fewest rows. "nvidia" is NVIDIA's greedy
    placement, which among more than four ranks leaves rank 0 without tables.

    Args:
        table_sizes: rows of each table.
        num_ranks: 1 or more; those beyond the tables get none.
        placement: one of `PLACEMENTS`.
        lookups: of a sample in each table, in any unit; by default all have the same.
    """
    if placement == "nvidia":
        places = nvidia_order(table_sizes, num_ranks)
    else:
        places = _balanced(table_sizes, num_ranks, lookups or [1] * len(table_sizes))
    return [sorted(tables) for tables in places]


def _balanced(
    table_sizes: Sequence[int], num_ranks: int, lookups: Sequence[int]
) -> list[list[int]]:
    share = sum(lookups) / num_ranks
    places: list[list[int]] = [[] for _ in range(num_ranks)]
    rows, load = [0] * num_ranks, [0] * num_ranks
    for table in _by_rows(table_sizes):
        rank = min((r for r in range(num_ranks) if load[r] < share), key=rows.__getitem__)
        places[rank].append(table)
        rows[rank] += table_sizes[table]
        load[rank] += lookups[table]
    return places


def nvidia_order(table_sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Returns NVIDIA's placement with the order in which its ranks hold their tables.

    Tables go, largest first, to the rank with the fewest rows that has not yet its share of them
    (DeepLearningExamples, PyTorch DLRM, `get_device_mapping`).
    """
    buckets = num_ranks - 1 if num_ranks > 4 else num_ranks
    most = -(-len(table_sizes) // buckets)
    live: list[list[int]] = [[] for _ in range(buckets)]
    full: list[list[int]] = []
    for table in _by_rows(table_sizes):
        live[0].append(table)
        if len(live[0]) == most:
            full.append(live.pop(0))
        live.sort(key=lambda tables: sum(table_sizes[t] for t in tables))
    return [[] for _ in range(num_ranks - buckets)] + full + live


def _by_rows(table_sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(table_sizes)), key=lambda table: -table_sizes[table])
