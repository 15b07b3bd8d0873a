"""`--overlap`: rows looked up a step ahead, and gradients that travel while others are computed."""

import numpy as np
import pytest
import torch
from ranks import Ranks

from dlrm.data.clicks.batch import Batch
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.scripts.checkpoint.comparison import compare
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.checkpoints.directory import last_checkpoint
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig

SIZES = (20, 30)


def differing(one, other):
    return compare(last_checkpoint(one), last_checkpoint(other))["weights"]


def test_stale_rows_repeat_their_bits_and_resume_exactly(command, capsys):
    stale = ["--overlap=stale", "--checkpoint_freq=4"]
    for run in ("one", "same"):
        command("--max_steps=9", *stale, f"--save_checkpoint_path={run}")
    assert "note: --overlap stale: rows are looked up before the update" in capsys.readouterr().out
    command("--max_steps=4", *stale, "--save_checkpoint_path=parts")
    command("--max_steps=9", *stale, "--save_checkpoint_path=parts", "--resume")
    command("--max_steps=9", "--checkpoint_freq=4", "--save_checkpoint_path=none")
    assert not differing("one", "same")
    assert not differing("one", "parts")
    assert differing("one", "none")


def test_stale_rows_lack_the_update_of_the_step_before():
    """Compares with plain SGD that looks up rows from before the last step."""
    config = DLRMConfig(SIZES, 2, 4, (4,), (1,), interaction_op="cat", wide=True)
    task, oracle = Recommendation(config, seed=2), DLRM(config, seed=2, optimized_mlp=False)
    optimizers = task.optimizers(OptimizerConfig("sgd", "sgd"))
    set_learning_rate(optimizers, 0.5)
    random = np.random.default_rng(0)
    batches = [
        Batch(
            torch.from_numpy(random.random((8, 2))).float(),
            torch.from_numpy(np.stack([random.integers(0, n, 8) for n in SIZES], 1)),
            torch.from_numpy(random.integers(0, 2, 8)).float(),
        )
        for _ in range(4)
    ]
    tables = [weight for weight, _ in oracle.table_parameters()]
    before = [weight.detach().clone() for weight in tables]
    for step, batch in enumerate(batches):
        if step + 1 < len(batches):
            task.look_up_ahead(batches[step + 1])
        task.loss(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
        task.model.zero_grad()
        now = [weight.detach().clone() for weight in tables]
        with torch.no_grad():
            for weight, old in zip(tables, before if step else now, strict=True):
                weight.copy_(old)
        flat = batch.categorical + torch.tensor([0, SIZES[0]])
        vectors = torch.nn.functional.embedding(flat, tables[0])
        wide = torch.nn.functional.embedding(flat, tables[1]).sum((1, 2))
        hidden = torch.cat([oracle.bottom_mlp(batch.numerical), vectors.flatten(1)], 1)
        logits = oracle.output(hidden)[:, 0] + wide
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        with torch.no_grad():
            for weight, current in zip(tables, now, strict=True):
                weight.copy_(current)
            for weight in oracle.parameters():
                weight -= 0.5 * weight.grad
                weight.grad = None
        before = now
    for own, expected in zip(task.model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--table_memory=8GB", "--table_store=rows"], "contradicts --table_store rows"),
        (["--gradient_accumulation_steps=2"], "contradicts --gradient_accumulation_steps 2"),
        (["--embedding_l2=0.1"], "contradicts --embedding_l2 0.1 of all rows"),
        (["--cuda_graphs"], "contradicts --cuda_graphs"),
    ],
)
def test_what_needs_rows_of_now_is_refused(command, flags, error):
    with pytest.raises(ValueError, match=f"--overlap stale {error}"):
        command("--overlap=stale", *flags)


def order_of_backward(world):
    """Records when vector gradients are sent and awaited, and the bottom MLP's computed."""
    import torch.distributed as dist

    model = DLRM(DLRMConfig(SIZES, 2, 4, (8, 4), (4, 1)), world)
    batch, seen, begin = 8, [], dist.batch_isend_irecv

    def sending(transfers):
        seen.append("sent")
        pending = begin(transfers)
        work = pending[-1]

        class Noted:
            def wait(self):
                seen.append("awaited")
                return work.wait()

        return [*pending[:-1], Noted()]

    dist.batch_isend_irecv = sending
    try:
        ids = torch.zeros(batch, len(model.fields_by_rank[world.rank]), dtype=torch.int64)
        logits = model(torch.rand(batch // 2, 2), ids)
        seen.clear()
        for weight in model.bottom_mlp.parameters():
            weight.register_post_accumulate_grad_hook(lambda _: seen.append("bottom MLP"))
        logits.sum().backward()
    finally:
        dist.batch_isend_irecv = begin
    return seen


def test_gradients_of_vectors_travel_while_the_bottom_mlp_computes_its_own():
    with Ranks(2) as ranks:
        for seen in ranks.call(order_of_backward):
            assert seen == ["sent", *["bottom MLP"] * 4, "awaited"]
