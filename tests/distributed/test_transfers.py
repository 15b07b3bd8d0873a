"""Files that ranks send each other."""

from pathlib import Path

import pytest

from dlrm.distributed import OtherRankError, transfers
from dlrm.distributed.transfers import Route, Sent, leaders, read_block, transfer_files, write_block

SIZES = {"empty": 0, "a/small": 1, "a/large": 1001, "exact": 300}


def content(rank, name):
    return bytes((rank + 7 * i + len(name)) % 251 for i in range(SIZES[name]))


def sent(world, folder, pairs, unit, faulty):
    """Sends the files of SIZES on the routes, of which the first rank of each pair has them."""
    own, beats = Path(folder, str(world.rank)), []
    for name in SIZES:
        path = own / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(world.rank, name))

    def read(block, data):
        assert block.begin % unit == 0
        read_block(own / block.name, block, data)

    def write(block, data):
        if world.rank == faulty and block.begin:
            raise OSError(28, "No space left on device", block.name)
        write_block(own / f"from {block.source}" / block.name, block, data)

    routes = [
        Route(*pair, {name: Sent(size, unit) for name, size in SIZES.items()}) for pair in pairs
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "_BYTES", 320)
        transfer_files(routes, read, write, world, lambda: beats.append(1))
    return len(beats)


@pytest.mark.parametrize("unit", [1, 24, 500])
@pytest.mark.parametrize("pairs", [[(1, 0)], [(1, 0), (2, 0)], [(0, 1), (0, 2)], []], ids=str)
def test_files_arrive_as_they_are(ranks, tmp_path, pairs, unit):
    beats = ranks(3).call(sent, [(tmp_path, pairs, unit, None)] * 3)
    assert len({*beats}) == 1
    for source, target in pairs:
        for name in SIZES:
            arrived = tmp_path / str(target) / f"from {source}" / name
            assert arrived.read_bytes() == content(source, name)
    assert len([*tmp_path.rglob("empty")]) == 3 + len(pairs)


def test_a_full_disk_ends_all_ranks(ranks, tmp_path):
    results = ranks(3).call(sent, [(tmp_path, [(1, 0), (2, 0)], 1, 0)] * 3)
    assert isinstance(results[0], OSError)
    assert "No space left on device" in str(results[0])
    assert all(isinstance(other, OtherRankError) for other in results[1:])
    again = ranks(3).call(sent, [(tmp_path, [(1, 0), (2, 0)], 1, None)] * 3)
    assert again[0], "nothing of the failed transfer is on its way"


def led(world, folder, nodes, asked):
    return leaders(Path(folder, str(nodes[world.rank])), asked, world)


def test_ranks_of_a_node_are_those_that_see_one_folder(ranks, tmp_path):
    nodes = (0, 1, 0, 1)
    assert ranks(4).call(led, [(tmp_path, nodes, range(4))] * 4) == [{0: 0, 1: 1, 2: 0, 3: 1}] * 4
    assert ranks(4).call(led, [(tmp_path, nodes, [2, 3])] * 4) == [{2: 2, 3: 3}] * 4
    assert not [*tmp_path.glob("*/.*")]
