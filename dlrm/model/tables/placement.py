"""Assignment of whole embedding tables to processes."""

from collections.abc import Sequence

PLACEMENTS = ("balanced", "nvidia")
AUTO = "auto"


def place_tables(
    table_sizes: Sequence[int],
    num_ranks: int,
    placement: str = "balanced",
    lookups: Sequence[int] | None = None,
) -> list[list[int]]:
    """Returns the tables of each rank, whole tables, in ascending order.

    "balanced" gives the largest remaining table to the rank with the fewest rows, among the ranks
    that do not have their share of the lookups yet. "nvidia" is NVIDIA's greedy placement, which
    leaves rank 0 without tables when there are more than four ranks.

    Args:
        table_sizes: rows of each table.
        num_ranks: 1 or more; ranks beyond the number of tables get none.
        placement: one of `PLACEMENTS`.
        lookups: lookups of a sample in each table, in any unit; by default equal for all.
    """
    if placement == "nvidia":
        places = nvidia_order(table_sizes, num_ranks)
    else:
        places = _balanced(table_sizes, num_ranks, lookups or [1] * len(table_sizes))
    return [sorted(tables) for tables in places]


def larger_than_a_share(table_sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Returns the tables with more rows than each of several processes would have of all rows.

    A table with fewer rows than there are processes is none of them.
    """
    least = max(sum(table_sizes) / num_ranks, num_ranks - 1)
    return [table for table, rows in enumerate(table_sizes) if num_ranks > 1 and rows > least]


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
    """Returns NVIDIA's placement, with the tables of each rank in NVIDIA's order.

    Tables go, largest first, to the rank with the fewest rows among those without their full share
    of tables (DeepLearningExamples, PyTorch DLRM, `get_device_mapping`).
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
