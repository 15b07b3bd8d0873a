"""Assignment of embedding tables to processes."""

from collections.abc import Container, Sequence

PLACEMENTS = ("balanced", "nvidia")
AUTO = "auto"


def place_tables(
    table_sizes: Sequence[int], num_ranks: int, placement: str = "balanced"
) -> list[list[int]]:
    """Returns the tables of each rank, whole tables, in ascending order.

    Tables go, largest first, to the rank with the fewest rows among those without their full share
    of tables (DeepLearningExamples, PyTorch DLRM, `get_device_mapping`). "nvidia" leaves rank 0
    without tables, as NVIDIA's program does, when there are more than four ranks.

    Args:
        table_sizes: rows of each table.
        num_ranks: 1 or more; ranks beyond the number of tables get none.
        placement: one of `PLACEMENTS`.
    """
    without = 1 if placement == "nvidia" and num_ranks > 4 else 0
    most = -(-len(table_sizes) // (num_ranks - without))
    live: list[list[int]] = [[] for _ in range(num_ranks - without)]
    full: list[list[int]] = []
    for table in sorted(range(len(table_sizes)), key=lambda table: -table_sizes[table]):
        live[0].append(table)
        if len(live[0]) == most:
            full.append(live.pop(0))
        live.sort(key=lambda tables: sum(table_sizes[t] for t in tables))
    empty: list[list[int]] = [[]] * without
    return [sorted(tables) for tables in empty + full + live]


def larger_than_a_share(table_sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Returns the tables with more rows than each of several processes would have of all rows.

    A table with fewer rows than there are processes is none of them.
    """
    least = max(sum(table_sizes) / num_ranks, num_ranks - 1)
    return [table for table, rows in enumerate(table_sizes) if num_ranks > 1 and rows > least]


def divide_tables(
    table_sizes: Sequence[int], num_ranks: int, placement: str, kept_whole: Container[int] = ()
) -> tuple[list[list[int]], list[int]]:
    """Returns the whole tables of each rank, and the tables of which every rank has a shard.

    Args:
        placement: one of `PLACEMENTS`, or `AUTO`, for which tables larger than a rank's share have
            shards.
        kept_whole: tables without shards.
    """
    larger = larger_than_a_share(table_sizes, num_ranks) if placement == AUTO else []
    sharded = [table for table in larger if table not in kept_whole]
    whole = [table for table in range(len(table_sizes)) if table not in sharded]
    places = place_tables([table_sizes[table] for table in whole], num_ranks, placement)
    return [[whole[place] for place in own] for own in places], sharded
