"""Gradients of vectors that travel while others are computed."""

import torch
from ranks import Ranks

from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM

SIZES = (20, 30)


def order_of_backward(world):
    """Records when vector gradients are sent and awaited, and the bottom MLP's computed."""
    import torch.distributed as dist

    model = DLRM(DLRMConfig(SIZES, 2, 4, (8, 4), (4, 1)), world)
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


def test_gradients_of_vectors_travel_while_the_bottom_mlp_computes_its_own():
    with Ranks(2) as ranks:
        for seen in ranks.call(order_of_backward):
            assert seen == ["sent", *["bottom MLP"] * 4, "awaited"]
