"""The table of metrics: meaning, reporter, unit and better direction of each.

No other module knows the direction of a metric.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

HIGHER, LOWER = math.inf, -math.inf
TESTS, EVALUATE, IMAGES, TEXT = "clicks", "clicks, by `evaluate`", "images", "text"
SPEED = "speed"
TOPS = (0.01, 0.05, 0.1, 0.2)  # shares of the rows, highest scores first


class Metric(NamedTuple):
    """A row of the table.

    Attributes:
        meaning: its definition, in a line.
        ideal: `HIGHER` or `LOWER` if such values are better; otherwise the value that is right.
        of: the tests that report it: `TESTS` of click models, which `evaluate` repeats, `EVALUATE`
            alone, or those of networks for `IMAGES` or `TEXT`; `SPEED` of any run.
        title: its name in sentences and on pages, if it has one.
        greatest: the greatest possible value.
        unit: unit in the log, if it has one.
    """

    meaning: str
    ideal: float
    of: str
    title: str = ""
    greatest: float = math.inf
    unit: str = ""

    @property
    def better(self) -> str:
        """Returns the better direction, such as "lower is better"."""
        named = {HIGHER: "higher is better", LOWER: "lower is better"}
        return named.get(self.ideal, f"{self.ideal:g} is right")

    def cost(self, value: float) -> float:
        """Returns a number that is lower for a better value."""
        if math.isinf(self.ideal):
            return -value if self.ideal == HIGHER else value
        return abs(value - self.ideal)


def at(top: float) -> str:
    """Returns the suffix of the metrics of the rows with the highest scores, such as "@5%"."""
    return f"@{100 * top:g}%"


def _of_tops(name: str, meaning: str, of_share: Callable[[float], float]) -> dict[str, Metric]:
    titles = {top: f"{name} in the top {100 * top:g} %" for top in TOPS}
    return {
        f"{name}{at(top)}": Metric(meaning, HIGHER, EVALUATE, titles[top], of_share(top))
        for top in TOPS
    }


_PAIRS = "share of (negative, positive) pairs in the right order; ties count half"
_ENTROPY = "log loss over that of always predicting the click rate (of use below 1)"
_ECE = "mean gap between predicted and observed click rates over tenths of the rows by score"
_GROUPED = "AUC within groups that have both classes, averaged by their"
_GAIN = "share of the clicks among k % of the rows, those with the highest scores"
_F1 = "SQuAD: F1 of an answer's words, in percent; pairs: F1 of class 1"
METRICS = {
    "auc": Metric(_PAIRS, HIGHER, TESTS, "AUC", 1.0),
    "log_loss": Metric("mean negative log-likelihood, nats", LOWER, TESTS, "log loss"),
    "normalized_entropy": Metric(_ENTROPY, LOWER, TESTS, "normalized entropy"),
    "calibration": Metric("predicted over observed clicks", 1, TESTS, "calibration"),
    "ece": Metric(_ECE, LOWER, EVALUATE, "expected calibration error", 1.0),
    "pr_auc": Metric("average precision", HIGHER, EVALUATE, "area under precision and recall", 1.0),
    "rmse": Metric("of the probabilities", LOWER, EVALUATE, "root mean squared error", 1.0),
    "gauc_by_impressions": Metric(
        f"{_GROUPED} rows", HIGHER, EVALUATE, "AUC within groups, by rows", 1.0
    ),
    "gauc_by_clicks": Metric(
        f"{_GROUPED} clicks", HIGHER, EVALUATE, "AUC within groups, by clicks", 1.0
    ),
    **_of_tops("gain", _GAIN, lambda top: 1.0),
    **_of_tops("lift", "gain over k %, the share in rows taken at random", lambda top: 1 / top),
    "top1": Metric("share of images whose class is the likeliest", HIGHER, IMAGES),
    "top5": Metric("share of images whose class is one of the five likeliest", HIGHER, IMAGES),
    "masked_accuracy": Metric("share of masked tokens that are predicted", HIGHER, TEXT),
    "masked_loss": Metric("mean cross-entropy of masked tokens", LOWER, TEXT),
    "next_sentence_accuracy": Metric("share of pairs whose order is predicted", HIGHER, TEXT),
    "exact_match": Metric("SQuAD: answers that are exactly right, in percent", HIGHER, TEXT),
    "accuracy": Metric("pairs of sentences: share of right classes", HIGHER, TEXT),
    "f1": Metric(_F1, HIGHER, TEXT),
    "accuracy_and_f1": Metric("pairs of sentences: mean of accuracy and F1", HIGHER, TEXT),
    "loss": Metric("mean cross-entropy; in pre-training the sum of both", LOWER, "networks"),
    "throughput": Metric("samples a second", HIGHER, SPEED, unit="samples/s"),
    "latency": Metric("seconds that a batch takes", LOWER, SPEED, unit="s"),
    "step_time": Metric("mean seconds of a training step", LOWER, SPEED, unit="s"),
}
SHOWN = ["auc", "log_loss", "calibration"]  # by summaries of tests
TESTED = [name for name, metric in METRICS.items() if metric.of == TESTS]


def metric_of(key: str) -> Metric | None:
    """Returns the metric of a key of a log, such as `test_auc`; None if it is of none.

    Keys of a batch size end in `_batch_` and that size.
    """
    key = key.partition("_batch_")[0]
    names = [name for name in METRICS if key == name or key.endswith(f"_{name}")]
    return METRICS[max(names, key=len)] if names else None


def unit_of(key: str) -> str:
    """Returns the unit of a key of a log, or "" if it has none."""
    metric = metric_of(key)
    return metric.unit if metric else ""


def cost(key: str, value: float) -> float:
    """Returns a number that is lower for a better value; without a metric the higher is better."""
    metric = metric_of(key)
    return metric.cost(value) if metric else -value


def title(name: str) -> str:
    """Returns the name of a metric in sentences, or the given name if it has none."""
    metric = METRICS.get(name)
    return metric.title or name if metric else name


def line_of(metrics: Mapping[str, float]) -> str:
    """Returns the metrics of a test as the logs and commands print them."""
    return "  ".join(f"{name} {value:.6f}" for name, value in metrics.items())


def metrics_note(keys: Iterable[str]) -> str | None:
    """Returns a line about the lesser-known metrics of a test among keys of a log, or None."""
    keys = list(keys)
    known = [n for n in TESTED if n not in ("auc", "log_loss") and any(k.endswith(n) for k in keys)]
    return "; ".join(f"{n}: {METRICS[n].meaning}, {METRICS[n].better}" for n in known) or None


def one_class_note(metrics: dict[str, float], rows: int, weighted: bool = False) -> str | None:
    """Returns the reason why there is no AUC if all labels are of one class, otherwise None.

    Args:
        metrics: those of `dlrm.metrics.clicks.click_metrics`.
        weighted: the rows have weights, some of which may be 0.
    """
    if not math.isnan(metrics.get("auc", 0.0)) or not rows or math.isnan(metrics["log_loss"]):
        return None
    label = 0 if math.isnan(metrics["calibration"]) else 1
    which = "rows with a weight above 0" if weighted else f"{rows:,} rows"
    return f"note: no AUC can be computed, since all {which} have the label {label}"


def unscored_text(score: float) -> str:
    """Returns a description of a score that is NaN or infinite."""
    return (
        f"expected a finite score, got {score}: the model's weights are not finite, or too large "
        "for the row's numbers"
    )
