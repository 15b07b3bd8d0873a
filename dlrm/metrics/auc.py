"""Exact ROC AUC of scores in one process or in many.

Several processes use a sample sort. Every rank sorts its own positives and negatives; samples of
these divide the scores into as many ranges as there are ranks; each rank receives the scores of its
range and counts the pairs there in integers. Scores that very many rows share are counted and not
sent, since no range boundary can divide them.

The weights of rows, if any, are first summed by score, so that no score is frequent.
"""

import math
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.distributed import OtherRankError, World, gather

T = TypeVar("T")

_SAMPLES = 128  # times the square of the ranks: no range exceeds its share by more than 6/128
_NEEDLES = 1 << 14  # looked up at once, so that the searched range stays in the cache


def roc_auc(
    scores: Tensor, labels: Tensor, world: World = World(), weights: Tensor | None = None
) -> float:
    """Returns the exact area under the ROC curve; tied scores count half, as in scikit-learn.

    It is the share of (negative, positive) pairs that the scores put in order. Every rank returns
    the same value as one process would for all rows.

    Args:
        scores: `[n]`, any floating dtype; logits and probabilities give the same.
        labels: `[n]`, 0 or 1.
        world: the processes; each has its own rows, any number of them or none.
        weights: `[n]`, 0 or more, on every rank or on none: a pair counts as the product of its
            weights, which are summed in float64. None is 1 for each row.

    Returns:
        The area, or NaN if there are only positives or only negatives.

    Raises:
        ValueError: shapes differ, a score is NaN, a label is neither 0 nor 1, or a weight is not a
            number of 0 or more. If one rank has such a value, all raise and name that rank.
    """
    if weights is not None:
        return _weighted_auc(scores, labels, weights, world)
    problem, sides = _by_label(scores, labels)
    facts = gather((problem, len(sides[0]), len(sides[1]), sides[0].dtype), world)
    raise_problems("roc_auc", [fact[0] for fact in facts], world.rank)
    num_negatives, num_positives = sum(fact[1] for fact in facts), sum(fact[2] for fact in facts)
    if not num_negatives or not num_positives:
        return math.nan
    if world.size == 1:
        ordered = ordered_pairs(*sides)
    else:
        dtype = max((fact[3] for fact in facts), key=lambda dtype: dtype.itemsize)
        sides[:] = [side.to(dtype) for side in sides]
        ordered = _over_ranks(sides, num_negatives, num_positives, world)
    return ordered / (2 * num_negatives * num_positives)


def raise_problems(operation: str, problems: list[str], rank: int) -> None:
    """Raises ValueError on the first rank that has a problem, OtherRankError on the others.

    Args:
        operation: the operation that is refused.
        problems: problems of the ranks, in their order; "" is none.
    """
    wrong = next((other for other, problem in enumerate(problems) if problem), None)
    if wrong is None:
        return
    if rank != wrong:
        raise OtherRankError(f"rank {wrong} has refused {operation}")
    where = f"rank {wrong}: " if len(problems) > 1 else ""
    raise ValueError(f"{where}{operation}: {problems[wrong]}")


def shape_problem(scores: Tensor, labels: Tensor) -> str:
    """Returns a description of a mismatch between the shapes, or ""."""
    if scores.ndim == 1 and scores.shape == labels.shape:
        return ""
    return f"expected scores and labels [n], got {list(scores.shape)} and {list(labels.shape)}"


def weights_problem(weights: Tensor | None, labels: Tensor) -> str:
    """Returns a description of invalid weights of rows, or ""."""
    if weights is None:
        return ""
    if weights.shape != labels.shape:
        return f"expected weights {list(labels.shape)}, got {list(weights.shape)}"
    return "" if (weights.isfinite() & (weights >= 0)).all() else "expected weights of 0 or more"


def sample_stride(num_scores: int, num_ranks: int) -> int:
    """Returns the stride at which a rank samples its scores for the others."""
    return -(-num_scores // (_SAMPLES * num_ranks**2))


def ordered_pairs(negatives: Tensor, positives: Tensor) -> int:
    """Returns twice the number of pairs with the positive above the negative, plus ties once.

    Args:
        negatives: scores of the negatives, sorted.
        positives: scores of the positives, sorted.
    """
    if len(positives) > len(negatives):
        return 2 * len(negatives) * len(positives) - ordered_pairs(positives, negatives)
    ordered = 0
    for needles in positives.split(1 << 24 if positives.is_cuda else _NEEDLES):
        if not len(needles):
            break
        begin = int(torch.searchsorted(negatives, needles[0]))
        near = negatives[begin : int(torch.searchsorted(negatives, needles[-1], right=True))]
        below = torch.searchsorted(near, needles).sum()
        not_above = torch.searchsorted(near, needles, right=True).sum()
        ordered += 2 * begin * len(needles) + int(below) + int(not_above)
    return ordered


def frequent_pairs(
    negatives: list[list[int]], positives: list[list[int]], num_positives: int
) -> int:
    """Returns `ordered_pairs` of the pairs in which a frequent score occurs.

    Args:
        negatives: for each frequent score, ascending: the number of negatives below it, and the
            number not above it.
        positives: the same numbers for positives.
        num_positives: number of all positives.
    """
    ordered, frequent_above = 0, 0
    for (below, not_above), (positives_below, positives_not_above) in zip(
        reversed(negatives), reversed(positives), strict=True
    ):
        here = positives_not_above - positives_below
        above = num_positives - positives_not_above - frequent_above
        ordered += here * (below + not_above) + 2 * (not_above - below) * above
        frequent_above += here
    return ordered


def _by_label(scores: Tensor, labels: Tensor) -> tuple[str, list[Tensor]]:
    """Returns a problem, or "", and the sorted scores of negatives and of positives."""
    nothing = [torch.empty(0), torch.empty(0)]
    if problem := shape_problem(scores, labels) or _labels_problem(labels):
        return problem, nothing
    positive, scores = labels == 1, _sortable(scores)
    if scores.is_cuda:
        sides = [scores[~positive], scores[positive]]
    else:  # numpy selects and sorts several times as fast
        values, chosen = scores.numpy(), positive.numpy()
        sides = [torch.from_numpy(np.compress(c, values)) for c in (~chosen, chosen)]
    sides = [_sort(side) for side in sides]
    if any(len(side) and side[-1].isnan() for side in sides):  # NaN sorts last
        return "a score is NaN", nothing
    return "", sides


def _labels_problem(labels: Tensor) -> str:
    return "" if ((labels == 1) | (labels == 0)).all() else "expected labels 0 and 1"


def _sortable(scores: Tensor) -> Tensor:
    scores = scores.detach()
    return scores if scores.dtype == torch.float64 else scores.float()


def _sort(scores: Tensor, runs: bool = False) -> Tensor:
    """Sorts, in place on the CPU; with `runs` the scores consist of a few sorted runs."""
    if scores.is_cuda:
        return scores.sort().values
    scores.numpy().sort(kind="stable" if runs else None)  # stable merges runs, None is vectorized
    return scores


def _over_ranks(sides: list[Tensor], num_negatives: int, num_positives: int, world: World) -> int:
    """Returns `ordered_pairs` of all ranks' sides; frees this rank's as soon as they are sent."""
    stride = sample_stride(num_negatives + num_positives, world.size)
    frequent = _frequent(sides, stride, world)
    counts = _take_out(sides, frequent, world)
    cuts = _cuts(sides, stride, world)
    for i in range(len(sides)):
        sides[i] = _exchange(sides[i], cuts, world)
    ordered, below = frequent_pairs(*counts, num_positives), 0
    mine = (len(sides[0]), len(sides[1]), ordered_pairs(*sides))
    for range_negatives, range_positives, range_ordered in gather(mine, world):
        ordered += range_ordered + 2 * below * range_positives
        below += range_negatives
    return ordered


def _frequent(sides: list[Tensor], stride: int, world: World) -> Tensor:
    """Returns, ascending, the scores that some rank sampled twice on one side."""
    samples = [side[stride - 1 :: stride] for side in sides]
    twice = [sample[1:][sample[1:] == sample[:-1]] for sample in samples]
    return _united(torch.cat(twice).unique(), world).unique()


def _take_out(
    sides: list[Tensor], values: Tensor, world: World
) -> tuple[list[list[int]], list[list[int]]]:
    """Removes values from the sides; returns the arguments of `frequent_pairs`."""
    if not len(values):
        return [], []
    bounds = []
    for i, side in enumerate(sides):
        begins, ends = (torch.searchsorted(side, values, right=right) for right in (False, True))
        bounds.append(torch.stack([begins, ends], dim=1).cpu())
        kept = zip([0, *ends.tolist()], [*begins.tolist(), len(side)], strict=True)
        sides[i] = torch.cat([side[begin:end] for begin, end in kept])
    everyones = gather(torch.stack(bounds), world)
    negatives, positives = torch.stack(everyones).sum(0).tolist()
    return negatives, positives


def _cuts(sides: list[Tensor], stride: int, world: World) -> Tensor:
    """Returns the last score of each rank's range except the last rank's."""
    samples = _united(torch.cat([side[stride - 1 :: stride] for side in sides]), world)
    ends = [len(samples) * (rank + 1) // world.size - 1 for rank in range(world.size - 1)]
    if not len(samples):
        return samples
    return samples.sort().values[[max(end, 0) for end in ends]]


def _united(values: Tensor, world: World) -> Tensor:
    return torch.cat(gather(values.cpu(), world)).to(values.device)


def _exchange(side: Tensor, cuts: Tensor, world: World) -> Tensor:
    """Sends every rank the scores of its range; returns those of this rank's range, sorted."""
    (received,) = _dealt([side], _places(side, cuts), world)
    return _sort(received, runs=True)


def _places(scores: Tensor, cuts: Tensor) -> list[int]:
    """Returns the start of each rank's range among sorted scores, and the end of the last one."""
    return [0, *torch.searchsorted(scores, cuts, right=True).tolist(), len(scores)]


def _dealt(columns: list[Tensor], places: list[int], world: World) -> list[Tensor]:
    """Sends each rank its rows of some columns, `[n, ...]`; returns the rows of this rank."""
    sent = [end - begin for begin, end in pairwise(places)]
    sent += [0] * (world.size - len(sent))  # without samples, rank 0 receives the few scores
    received = [sizes[world.rank] for sizes in gather(sent, world)]
    results = []
    for column in columns:
        result = column.new_empty(sum(received), *column.shape[1:])
        dist.all_to_all_single(result, column, received, sent, group=world.group)
        results.append(result)
    return results


def _weighted_auc(scores: Tensor, labels: Tensor, weights: Tensor, world: World) -> float:
    """Returns `roc_auc` of weighted rows."""
    problem, scores, sums = _added_up(scores, labels, weights)
    facts = gather((problem, sums.sum(0).tolist(), len(scores), scores.dtype), world)
    raise_problems("roc_auc", [fact[0] for fact in facts], world.rank)
    negatives, positives = (math.fsum(fact[1][side] for fact in facts) for side in (0, 1))
    if not negatives or not positives:
        return math.nan
    if world.size > 1:
        scores = scores.to(max((fact[3] for fact in facts), key=lambda dtype: dtype.itemsize))
        stride = sample_stride(sum(fact[2] for fact in facts), world.size)
        places = _places(scores, _cuts([scores], stride, world))
        _, sums = _by_score(*_dealt([scores, sums], places, world))
    sums = sums.cpu()  # a GPU would sum in a varying order
    below = sums[:, 0].cumsum(0) - sums[:, 0] / 2
    mine = (*sums.sum(0).tolist(), float(below @ sums[:, 1]))
    ordered = begin = 0.0
    for range_negatives, range_positives, range_ordered in gather(mine, world):
        ordered += range_ordered + begin * range_positives
        begin += range_negatives
    return ordered / (negatives * positives)


def _added_up(scores: Tensor, labels: Tensor, weights: Tensor) -> tuple[str, Tensor, Tensor]:
    """Returns a problem, or "", and `_by_score` of the weights of rows."""
    nothing = torch.empty(0), torch.empty(0, 2, dtype=torch.float64)
    problem = shape_problem(scores, labels) or _labels_problem(labels)
    if problem := problem or weights_problem(weights, labels):
        return problem, *nothing
    scores = _sortable(scores)
    if scores.isnan().any():
        return "a score is NaN", *nothing
    weight, positive = weights.double(), labels == 1
    of_sides = torch.stack([weight.where(~positive, 0), weight.where(positive, 0)], dim=1)
    return "", *_by_score(scores, of_sides)


def _by_score(scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distinct scores, ascending, and the sums of their weights, `[scores, 2]`."""
    different, places = scores.unique(return_inverse=True)
    return different, weights.new_zeros(len(different), 2).index_add_(0, places, weights)
