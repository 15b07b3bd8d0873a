"""Trains tasks of image and language networks for a few steps."""

import math

import torch

from dlrm.train.optim.base import set_learning_rate


def losses_of(task, batches, optimizer, lr, parts=1):
    """Returns the losses of a step for each batch, with gradients summed over its parts."""
    torch.manual_seed(0)
    (made,) = task.optimizers(optimizer)
    set_learning_rate([made], lr)
    losses = []
    for batch in batches:
        pieces = [task.loss(piece) for piece in task.split(batch, parts)]
        sum(pieces).backward()
        made.step()
        made.zero_grad()
        losses.append(sum(pieces).item())
    return losses


def learns(task, batch, optimizer, lr):
    """Checks that steps on one batch lower the loss; returns the scaler's report."""
    (made,) = task.optimizers(optimizer)
    set_learning_rate([made], lr)
    scaler, losses = task.scaler(), []
    for _ in range(6):
        loss = task.loss(batch)
        scaler.backward(loss)
        scaler.step([made])
        made.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(map(math.isfinite, losses))
    return scaler.report()
