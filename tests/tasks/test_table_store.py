"""Training with rows in a store gives the bits of training with rows in memory."""

import tempfile
import threading
from pathlib import Path

import pytest
from click_runs import Sharded

from dlrm.data.clicks.batch import Shard
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.synthetic import SyntheticDataset
from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.step_clock import DATA, STORE, step_clock
from dlrm.store.config import TableStoreConfig
from dlrm.store.memory import RowKind, least_memory, slots_of
from dlrm.tasks import slots as slots_module
from dlrm.tasks.click_memory import table_store
from dlrm.tasks.click_splits import SplitBatches
from dlrm.tasks.planning.stored import StoredTables
from dlrm.tasks.planning.workload import Workload, kinds_of, table_bytes
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.checkpoints.checkpoint import Parameters, averaged, load_checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory, last_checkpoint
from dlrm.train.checkpoints.saved_model import read_saved
from dlrm.train.checkpoints.stored import start_store
from dlrm.train.config import TrainConfig
from dlrm.train.log import RunLog, StoppedError
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.trainer import Trainer

SIZES, BATCH, STEPS, SLOTS = (400, 7, 900), 8, 30, 110


@pytest.fixture
def tmp_path(tmp_path):
    """Uses memory if possible, since every checkpoint waits for the disk."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class Run:
    """A run of a small model, in memory or with a store of few slots."""

    def __init__(self, folder, stored, hotness=None, slots=SLOTS, keep=2, **changes):
        optimizer = OptimizerConfig(
            changes.pop("optimizer", "adagrad"),
            "sgd",
            **changes.pop("optimizers", {}),
            embedding_l2_mode="looked_up",
            embedding_l2=changes.pop("l2", 0.0),
        )
        self.config = {"test_freq": 7, "checkpoint_freq": 5}
        for name in ("gradient_accumulation_steps", "max_steps"):
            if name in changes:
                self.config[name] = changes.pop(name)
        architecture = DLRMConfig(
            SIZES, 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(8, 1), **changes
        )
        store = None
        if stored:
            workload = Workload.of_run(architecture, 1, optimizer)
            kinds = kinds_of(architecture.placed(1), 0, workload)
            rows = [min(slots, kind.records) for kind in kinds]
            limit = str(least_memory(kinds, rows))
            where = TableStoreConfig(limit, str(folder / "store"))
            store = table_store(where, architecture, optimizer, World(), checkpoints=folder / "run")
            assert store.slots == slots if len(kinds) == 1 else store.slots >= sum(rows)
            assert store.slots < sum(architecture.embedding_rows)
        self.task = Recommendation(architecture, seed=5, store=store)
        self.checkpoints = CheckpointDirectory(folder / "run", keep)
        self.stop_at = None
        self.trainer = Trainer(
            self.task,
            optimizers=self.task.optimizers(optimizer),
            schedule=lambda step: 0.1 / step**0.5,
            accumulate=self.task.accumulate,
            config=TrainConfig(**self.config),
            log=RunLog(quiet=True),
            checkpoints=self.checkpoints,
            run={"flags": {}, "dataset": {"table sizes": list(SIZES)}},
            beat=self._beat,
        )
        spec = FeatureSpec.default(".", 4, list(SIZES))
        train, test = (
            SyntheticDataset(spec, split, rows, BATCH, seed=1, hotness=hotness and [hotness])
            for split, rows in (("train", BATCH * STEPS), ("test", 40))
        )
        self.batches = SplitBatches(
            ClickLoader(train, slots=self.task.slots(trains=True)),
            ClickLoader(test, slots=self.task.slots()),
            None,
        )

    def _beat(self, step):
        self.trainer.stop_requested = step == self.stop_at

    def fit(self, stop_at=None):
        self.stop_at = stop_at
        try:
            return self.trainer.fit(*self.batches)
        except StoppedError:
            return None
        finally:
            self.checkpoints.release()
            if self.task.model.store is not None:
                self.task.model.store.close()


def assert_same(folder, other):
    """Compares the last checkpoints of two runs, bit for bit."""
    one, two = (read_saved(last_checkpoint(path / "run")) for path in (folder, other))
    assert one.progress["history"] == two.progress["history"]
    assert one.dense.keys() == two.dense.keys()
    for name, tensor in one.dense.items():
        assert tensor.equal(two.dense[name]), name
    for a, b in zip(one.tables, two.tables, strict=True):
        assert (a.part(0, a.rows) == b.part(0, b.rows)).all()
    for a, b in zip(one.table_state, two.table_state, strict=True):
        assert a.keys() == b.keys()
        for name, rows in a.items():
            assert (rows.part(0, rows.rows) == b[name].part(0, rows.rows)).all()
    assert [t.get("scalars") for t in one.config["tables"]] == [
        t.get("scalars") for t in two.config["tables"]
    ]


CASES = {
    "sgd": {"optimizer": "sgd"},
    "adagrad": {},
    "row-wise": {"optimizer": "row_wise_adagrad"},
    "adam": {"optimizer": "adam"},
    "bf16": {"optimizer": "adam", "embedding_dtype": "bf16"},
    "l2": {"l2": 0.05},
    "lists": {"hotness": 3, "slots": 200},
    "mean": {"hotness": 3, "pooling": "mean", "slots": 200},
    "wide": {"wide": True},
    "hashed": {"hash_indices": True, "max_table_size": 250},
    "parts": {"gradient_accumulation_steps": 3},
    "parts-adam": {"gradient_accumulation_steps": 2, "optimizer": "adam", "wide": True},
    "parts-lists": {"gradient_accumulation_steps": 4, "hotness": 3, "slots": 200},
    "parts-bf16": {"gradient_accumulation_steps": 3, "embedding_dtype": "bf16"},
    "normal": {"embedding_init": "normal"},
    "widths": {"field_dims": (4, None, 2), "optimizer": "adam"},
    "widths-wide": {
        "field_dims": (4, None, 4),
        "wide": True,
    },
    "widths-parts": {
        **{"field_dims": (2, None, 4), "wide": True, "gradient_accumulation_steps": 3},
        **{"optimizer": "row_wise_adagrad", "hotness": 3, "slots": 300},
    },
    "widths-bf16": {
        **{"field_dims": (None, 3, 4), "embedding_dtype": "bf16", "hotness": 2, "slots": 300},
        **{"table_poolings": ("mean", None, None), "hash_indices": True, "max_table_size": 350},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_memory(case, tmp_path):
    folders = [tmp_path / "memory", tmp_path / "stored"]
    results = []
    for folder in folders:
        changes = dict(CASES[case])
        run = Run(folder, folder.name == "stored", **changes)
        results.append(run.fit())
    assert_same(*folders)
    for name in ("best_auc", "training_loss"):
        assert results[0].get(name) == results[1].get(name)


@pytest.mark.parametrize(
    ("case", "first", "then"),
    [
        *((case, True, True) for case in ("adagrad", "bf16", "wide", "widths-wide")),
        ("adagrad", False, True),
        ("adagrad", True, False),
        ("widths", False, True),
        ("widths", True, False),
    ],
)
def test_a_stopped_run_resumes_exactly_in_a_store_and_moves_into_and_out_of_it(
    case, first, then, tmp_path
):
    changes = CASES[case]
    Run(tmp_path / "whole", False, **changes).fit()
    Run(tmp_path / "parts", first, **changes).fit(stop_at=13)
    run = Run(tmp_path / "parts", then, **changes)
    run.trainer.resume(last_checkpoint(tmp_path / "parts" / "run"))
    run.fit()
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("case", ["adagrad", "widths"])
def test_a_checkpoint_is_tested_with_few_rows_in_memory(case, tmp_path):
    Run(tmp_path, True, **CASES[case]).fit()
    path = last_checkpoint(tmp_path / "run")
    losses = []
    for stored in (False, True):
        run = Run(tmp_path / f"again-{stored}", stored, **CASES[case])
        parameters = averaged(Parameters(run.task.model, run.task.table_parameters()))
        load_checkpoint(path, parameters)
        losses.append(run.task.evaluate(run.batches.chooses))
    assert losses[0] == losses[1]
    assert not (tmp_path / "again-True" / "store").exists()


REFUSED = {
    "cuda": ({}, {}, World(device="cuda"), "expected --base_device cpu, got cuda"),
    "plain": ({"embedding_type": "joint_sparse"}, {}, World(), "needs --embedding_type joint_f"),
    "l2": ({}, {"embedding_l2": 0.1}, World(), "use --embedding_l2_mode looked_up"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_store_cannot_do_is_refused(case, tmp_path):
    architecture, optimizers, world, expected = REFUSED[case]
    config = DLRMConfig(SIZES, 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(8, 1), **architecture)
    where = TableStoreConfig("20MB", str(tmp_path))
    with pytest.raises(ValueError, match=expected):
        table_store(where, config, OptimizerConfig("adagrad", **optimizers), world)


def test_slow_batches_are_no_wait_for_the_store(tmp_path, monkeypatch):
    now = [0.0]  # passes while a batch is made, and never else
    monkeypatch.setattr("dlrm.step_clock.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("dlrm.tasks.slots.perf_counter", lambda: now[0])
    awaited, wait = threading.Semaphore(0), slots_module.wait

    def wait_for_batch(futures):
        awaited.release()
        wait(futures)

    monkeypatch.setattr(slots_module, "wait", wait_for_batch)
    run = Run(tmp_path, True)
    start_store(Parameters(run.task.model, run.task.table_parameters()), World())
    slots, found = run.task.slots(), run.batches.train.dataset.batch(0)

    def slow():
        for _ in range(4):
            awaited.acquire(timeout=60)
            now[0] += 1.0
            yield found

    clock = step_clock("cpu", 1)
    clock.resume()
    clock.next_step()
    for _ in slots.ahead(slow()):
        clock.next_step()
    clock.pause()
    seconds = clock.lap()
    run.task.model.store.close()
    assert seconds[DATA] == 4.0
    assert seconds[STORE] == run.task.model.store.waited == 0.0


def test_less_memory_than_a_row_needs_is_named(tmp_path):
    config = DLRMConfig(SIZES, 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(8, 1))
    where = TableStoreConfig("1MB", str(tmp_path))
    with pytest.raises(ValueError, match="1MB: expected at least 17MB for buffers, a bit"):
        table_store(where, config, OptimizerConfig("adagrad"), World())


def test_less_memory_than_a_batch_needs_is_named(tmp_path):
    run = Run(tmp_path, True, slots=12)
    with pytest.raises(ValueError, match=r"--table_memory .*: 12 rows are in memory, but a batch"):
        run.fit()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_planned_memory_of_a_store_of_several_widths_is_that_of_its_slots(tmp_path, optimizer):
    sizes, parts = (40_000, 30, 900), {"field_dims": (4, None, 2), "wide": True}
    mlps = {"bottom_mlp_sizes": (8,), "top_mlp_sizes": (8, 1)}
    config, chosen = DLRMConfig(sizes, 4, 8, **mlps, **parts), OptimizerConfig(optimizer, "sgd")
    store = table_store(TableStoreConfig("51.5MB", str(tmp_path)), config, chosen, World())
    task = Recommendation(config, store=store)
    (tables, *_) = task.optimizers(chosen)
    weights = [weight for weight, _ in task.table_parameters()]
    states = [s for w in weights for s in tables.state[w].values() if s.ndim]
    workload = Workload.of_run(config, 64, chosen, table_memory="51.5MB")
    (planned,) = table_bytes(config.placed(1), workload)
    assert 1000 < store.slots < 20_000
    assert planned.weights == sum(weight.nbytes for weight in weights)
    assert planned.state == sum(state.nbytes for state in states)
    assert sum(planned) <= 51.5e6


def test_a_batch_of_several_widths_that_is_too_large_is_named():
    kinds = RowKind(4, {0: 5000}, 16), RowKind(8, {1: 20, 2: 9000}, 32)
    least = least_memory(kinds, [400, 420])
    assert slots_of(kinds, least) == [400, 420]
    assert slots_of(kinds, least - 1) == [399, 419]
    stored = StoredTables(kinds, str(least))
    stored.check_batch("--batch_size", 190, 190)
    with pytest.raises(
        ValueError, match=r"420 rows of width 8 .* may need 422; .*--batch_size 189"
    ):
        stored.check_batch("--batch_size", 191, 191)


def losses_of(world, folder, stored):
    """Trains tables of three widths for some steps; returns the losses of this rank."""
    parts = {"field_dims": (4, None, 2), "wide": True}
    mlps = {"bottom_mlp_sizes": (8,), "top_mlp_sizes": (8, 1)}
    config, chosen = DLRMConfig(SIZES, 4, 8, **mlps, **parts), OptimizerConfig("adagrad", "sgd")
    where = TableStoreConfig("60MB", str(folder))
    store = table_store(where, config, chosen, world) if stored else None
    task = Recommendation(config, world, seed=5, store=store)
    optimizers, slots = task.optimizers(chosen), task.slots(trains=True)
    start_store(Parameters(task.model, task.table_parameters(), optimizers), world)
    set_learning_rate(optimizers, 0.1)
    shard = Shard(world, tuple(task.model.fields_by_rank[world.rank]))
    data = SyntheticDataset(FeatureSpec.default(".", 4, list(SIZES)), "train", 60, 9, seed=1)
    losses = []
    for index in range(5):
        batch, tickets = Sharded(data, shard).batch(index), ()
        if slots is not None:
            batch, tickets = slots.now(batch)
            store.mark(tickets)
        losses.append(task.loss(batch))
        losses[-1].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if slots is not None:
            store.release(tickets)
    if store is not None:
        assert len(store.parts) == len(
            {piece.width for piece in config.placed(2).of_rank(world.rank)}
        )
        store.close()
    return [loss.item() for loss in losses]


def test_ranks_have_stores_of_their_widths(ranks, tmp_path):
    memory, stored = (
        ranks(2).call(losses_of, [(tmp_path, stored)] * 2) for stored in (False, True)
    )
    assert memory == stored
    assert memory[0][0] != memory[0][4]
