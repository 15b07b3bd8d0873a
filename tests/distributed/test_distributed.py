"""Transfers between ranks, placements of tables, and messages of launchers."""

import socket
import sys

import pytest
import torch
import torch.distributed as dist
from forked import CONTEXT
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm import distributed
from dlrm.distributed import OtherRankError, World, agreed, check_same, exchange, launch, part
from dlrm.distributed.placement import Placement
from dlrm.distributed.world import Launch
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM

PLACES = {
    2: [[[0, 3], [1, 2, 4]], [[0, 1, 2, 3, 4], []], [[], [0, 1, 2, 3, 4]]],
    3: [[[4], [0, 2], [1, 3]]],
    4: [[[0], [], [1, 2, 4], [3]]],
}
CASES = [(size, tables) for size, several in PLACES.items() for tables in several]


def exchanged(world, tables_by_rank, batch, dtype, counts):
    """Returns whether vectors and gradients arrive."""
    random = torch.Generator().manual_seed(0)
    vectors, gradient = (torch.randn(batch, 5, 3, generator=random).to(dtype) for _ in range(2))
    own = vectors[:, tables_by_rank[world.rank]].clone().requires_grad_()
    received = exchange(own, tables_by_rank, world, counts)()
    if counts is None:
        mine = world.part(batch)
    else:
        mine = slice(sum(counts[: world.rank]), sum(counts[: world.rank + 1]))
    received.backward(gradient[mine])
    return (
        torch.equal(received, vectors[mine]),
        torch.equal(own.grad, gradient[:, tables_by_rank[world.rank]]),
    )


@pytest.mark.parametrize(
    ("batch", "dtype"),
    [
        (0, torch.float32),
        (1, torch.float64),
        (2, torch.float32),
        (7, torch.bfloat16),
        (64, torch.float16),
    ],
)
@pytest.mark.parametrize(("size", "tables"), CASES, ids=str)
def test_every_rank_gets_the_vectors_of_its_samples_and_the_gradients_of_its_tables(
    ranks, size, tables, batch, dtype
):
    found = ranks(size).call(exchanged, [(tables, batch, dtype, None)] * size)
    assert found == [(True, True)] * size


def test_samples_may_be_dealt_in_any_numbers(ranks):
    found = ranks(3).call(exchanged, [(PLACES[3][0], 9, torch.float32, (5, 0, 4))] * 3)
    assert found == [(True, True)] * 3


def leave(rank, store):
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    pending = dist.all_reduce(torch.zeros(2), async_op=True) if rank == 0 else None
    try:
        if pending is None:
            dist.recv(torch.zeros(2), 0)  # waits for a rank that waits for this one
    finally:
        distributed.shutdown(World(rank, 2), 0.5)
        sys.exit(3)


def test_a_failed_rank_leaves_although_a_collective_has_begun(tmp_path):
    store = (tmp_path / "store").as_uri()
    processes = [CONTEXT.Process(target=leave, args=(rank, store)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [3, 3]


class Copies(TorchDispatchMode):
    """Records the operators that create or copy data that only the host knows."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket.__name__ in ("arange", "_to_copy", "sort", "index_put_"):
            self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def moved_by_passes(world, tables_by_rank):
    """Returns the copies of three passes: the first, one of equal sizes, one of other sizes."""
    found = []
    for batch in (23, 23, 27):
        with Copies() as copies:
            exchanged(world, tables_by_rank, batch, torch.float32, None)
        found.append(copies.seen)
    return found


def test_the_order_of_vectors_is_computed_once_for_each_batch_size(ranks):
    for first, again, other in ranks(2).call(moved_by_passes, [(PLACES[2][0],)] * 2):
        assert first
        assert other
        assert not again, "this waits for a GPU at every step"


def test_one_rank_exchanges_nothing():
    vectors = torch.randn(4, 2, 3)
    assert exchange(vectors, [[0, 1]], World())() is vectors


def order_of_backward(world):
    """Records when vector gradients are sent and awaited, and the bottom MLP's computed."""
    model = DLRM(DLRMConfig((20, 30), 2, 4, (8, 4), (4, 1)), world)
    batch, seen, begin = 8, [], dist.all_to_all_single

    class Noted:
        def __init__(self, work):
            self.work = work

        def wait(self):
            seen.append("awaited")
            return self.work.wait()

    def sending(*transfer, **options):
        seen.append("sent")
        return Noted(begin(*transfer, **options))

    dist.all_to_all_single = sending
    try:
        ids = torch.zeros(batch, len(model.fields_by_rank[world.rank]), dtype=torch.int64)
        logits = model(torch.rand(batch // 2, 2), ids)
        seen.clear()
        for weight in model.bottom_mlp.parameters():
            weight.register_post_accumulate_grad_hook(lambda _: seen.append("bottom MLP"))
        logits.sum().backward()
    finally:
        dist.all_to_all_single = begin
    return seen


def test_gradients_of_vectors_travel_while_the_bottom_mlp_computes_its_own(ranks):
    for seen in ranks(2).call(order_of_backward):
        assert seen == ["sent", *["bottom MLP"] * 4, "awaited"]


@given(st.integers(2, 5), st.lists(st.integers(5, 30), min_size=1, max_size=4), st.data())
def test_tables_are_whole_or_equally_split(ranks, rows, data):
    split = data.draw(st.sets(st.sampled_from(range(len(rows)))))
    whole = [table for table in range(len(rows)) if table not in split]
    placement = Placement.of_tables(rows, 4, [whole, *[[]] * (ranks - 1)], split)
    assert placement.is_whole == (not split)
    assert placement.tables_by_rank() == [[*range(len(rows))], *[sorted(split)] * (ranks - 1)]
    for table, expected in enumerate(rows):
        shards = [shard for shard in placement.shards if shard.table == table]
        edges = [shard.rows for shard in shards]
        assert [begin for begin, _ in edges] == [0, *(end for _, end in edges[:-1])]
        assert edges[-1][1] == expected
        assert [shard.rank for shard in shards] == ([*range(ranks)] if table in split else [0])
        counts = [shard.num_rows for shard in shards]
        assert 0 < max(counts) - min(counts) + 1 <= 2
    fields = placement.fields_by_rank([0, *range(len(rows)), 0])
    assert fields[0] == [*range(len(rows) + 2)]
    assert [0 in own for own in fields] == [len(rows) + 1 in own for own in fields]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_parts_are_the_whole_and_even(size, count):
    parts = [range(count)[part(count, rank, size)] for rank in range(size)]
    assert [i for own in parts for i in own] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def failing(world, who):
    with agreed(world, ValueError):
        if world.rank in who:
            raise UnicodeDecodeError("ascii", b"x", 0, 1, "no letter")
    return "passed"


@pytest.mark.parametrize(
    ("who", "lowest", "says"),
    [((1,), 1, "rank 1: "), ((1, 2), 1, "ranks 1, 2: "), ((0, 1, 2), 0, "'ascii' codec")],
)
def test_an_error_of_some_ranks_ends_all_and_is_said_once(ranks, who, lowest, says):
    results = ranks(3).call(failing, [(who,)] * 3)
    for rank, result in enumerate(results):
        assert isinstance(result, ValueError if rank == lowest else OtherRankError)
    assert str(results[lowest]).startswith(says)
    assert "no letter" in str(results[lowest])


def elsewhere(world, function, given):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"node{world.rank}")
        function(world, given)


def test_hosts_are_named_where_there_are_several(ranks):
    _, lowest, _ = ranks(3).call(elsewhere, [(failing, (1, 2))] * 3)
    assert str(lowest).startswith("ranks 1 (node1), 2 (node2): 'ascii' codec")
    first, _ = ranks(2).call(elsewhere, [(same, {"a": 1}), (same, {"a": 2})])
    assert "a: 1 on rank 0 (node0), 2 on 1 (node1)" in str(first)


def test_agreeing_on_nothing_passes(ranks):
    assert ranks(2).call(failing, [((),)] * 2) == ["passed"] * 2


def same(world, values):
    check_same(values, world)


def test_what_differs_is_named_with_who_has_it(ranks):
    given = [({"--lr": 1.0, "a": 2},), ({"--lr": 1.0, "a": 3},), ({"--lr": 2.0, "a": 2, "b": 0},)]
    first, *others = ranks(3).call(same, given)
    lines = str(first).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "a: 2 on rank 0, 3 on 1",
        "--lr: 1.0 on rank 0, 2.0 on 2",
        "b: none on rank 0, 0 on 2",
    ]
    assert all(isinstance(other, OtherRankError) for other in others)
    assert ranks(3).call(same, [({"--lr": 1.0},)] * 3) == [None] * 3


TORCHRUN = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "here", "MASTER_PORT": "1"},
}


def test_launchers_are_understood():
    assert launch({}) == Launch(0, 1, 0, 1)
    assert launch(TORCHRUN) == Launch(3, 4, 1, 2)
    assert launch({**TASK, **TORCHRUN}) == Launch(3, 4, 1, 2)


TASK = {"SLURM_PROCID": "5", "SLURM_NTASKS": "7"}


@pytest.mark.parametrize(
    "variables",
    [
        TASK,
        {**TASK, "ENVIRONMENT": "BATCH", "SLURM_STEP_ID": "2"},  # srun within the script of sbatch
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_SIZE": "2"},
    ],
)
def test_processes_without_a_launcher_are_refused(variables):
    with pytest.raises(ValueError, match="=[27]: .* srun --ntasks-per-node 1 torchrun"):
        launch(variables)


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_NTASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun -n 1 within a job of 7
        {"ENVIRONMENT": "BATCH"},  # the script of sbatch
        {"SLURM_PROCID": ""},
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_one_process_of_a_job_is_alone(change):
    variables = {k: v for k, v in {**TASK, **change}.items() if v}
    assert launch(variables) == Launch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "RANK=4 contradicts WORLD_SIZE=4: expected less"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 contradicts WORLD_SIZE=4"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE=-1: expected a number"),
        ({"WORLD_SIZE": "0"}, "RANK=3 contradicts WORLD_SIZE=0"),
        ({"RANK": None}, "RANK: not set, though WORLD_SIZE=4"),
        ({"MASTER_PORT": None}, "MASTER_PORT: not set"),
    ],
)
def test_contradictions_of_a_launcher_are_named(change, message):
    variables = {k: v for k, v in {**TORCHRUN, **change}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        launch(variables)


def test_one_process_makes_the_gpu_it_is_given_the_current_one(monkeypatch):
    """Generators, streams and waits of torch.cuda use the current device."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    assert [distributed.join_world(device) for device in ("cpu", "cuda", "cuda:1")] == [
        World(device="cpu"),
        World(device="cuda"),
        World(device="cuda:1"),
    ]
    assert chosen == ["cuda:1"]
