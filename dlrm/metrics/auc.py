"""Exact ROC AUC of scores in one process or in many.

Every rank sorts its own positives and negatives, receives the scores of the rarer class of all
ranks, and counts its pairs with them in integers. The weights of rows, if any, are first summed by
score.
"""

import math

import numpy as np
import torch
from torch import Tensor

from dlrm.distributed import OtherRankError, World, from_first, gather

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
    dtype = max((fact[3] for fact in facts), key=lambda dtype: dtype.itemsize)
    sides[:] = [side.to(dtype) for side in sides]
    if world.size > 1:
        rarer = int(num_positives < num_negatives)
        sides[rarer] = _sort(_united(sides[rarer], world), runs=True)
    ordered = sum(gather(ordered_pairs(*sides), world))
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


def _united(values: Tensor, world: World) -> Tensor:
    """Returns the rows of all ranks, in the order of the ranks."""
    return torch.cat(gather(values.cpu(), world)).to(values.device)


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
        scores, sums = _by_score(_united(scores, world), _united(sums, world))
    sums = sums.cpu()  # a GPU would sum in a varying order
    below = sums[:, 0].cumsum(0) - sums[:, 0] / 2
    area = float(below @ sums[:, 1]) / (negatives * positives)
    return from_first(area, world)  # whose last bits are those of all


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
