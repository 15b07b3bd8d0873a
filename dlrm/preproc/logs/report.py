"""The facts of the report on raw logs."""

from collections.abc import Sequence
from typing import Any

from dlrm.data.clicks import layout
from dlrm.data.transform.numbers import Fitted
from dlrm.data.transform.transform import Transform
from dlrm.preproc.logs.raw_log import Split
from dlrm.preproc.stages.column_statistics import Statistics, number_of_bin
from dlrm.preproc.stages.report import QUANTILES, Counted, Histogram, share
from dlrm.preproc.stages.stage import QUARANTINE, Run


def log_facts(
    run: Run, splits: Sequence[Split], fitted: Transform, totals: dict[str, dict[str, int]]
) -> dict[str, Any]:
    """Returns the report on raw logs after all rows are transformed."""
    folder = run.work.folder("transform.statistics")
    counted = Counted(fitted.num_numerical, fitted.num_categorical)
    for number, split in enumerate(splits):
        for name, part in Statistics.load(folder / str(number)).items():
            counted.add(counted.splits, name, part)
            counted.add(counted.slices, split.day, part)
    counted.slices = {day: counted.slices[day] for day in sorted(counted.slices)}
    return {
        "days": [
            {"day": day, **_row_facts(*part.totals[:2].tolist())}
            for day, part in counted.slices.items()
        ],
        "splits": {
            name: {
                **_row_facts(total.get("rows", 0), total.get("clicks", 0)),
                "values_raised_to_1": total.get("clamped", 0),
            }
            for name, total in totals.items()
        },
        "numerical": _numerical(counted, fitted),
        "categorical": _categorical(counted, fitted, run.work.result("merged")),
        "lines_rejected": _rejected(run),
    }


def _row_facts(rows: int, clicks: int) -> dict[str, Any]:
    return {"rows": rows, "clicks": clicks, "click_through_rate": share(clicks, rows)}


def _numerical(counted: Counted, fitted: Transform) -> list[dict[str, Any]]:
    features = []
    for i in range(fitted.num_numerical):
        quantiles: dict[str, float | None] = dict.fromkeys(map(str, QUANTILES))
        if (bins := counted.quantile_bins(i)) is not None:
            values = fitted.schema.numerical[i].rule.invert(number_of_bin(bins), Fitted())
            quantiles = {
                str(q): float(f"{round(float(value)):.3g}")
                for q, value in zip(QUANTILES, values, strict=True)
            }
        features.append(
            {
                "name": layout.numerical_name(i),
                "missing": counted.missing(i, layout.SPLITS),
                "quantiles": quantiles,
                "drift": _drift_by_day(counted, counted.tenths(i)),
            }
        )
    return features


def _categorical(
    counted: Counted, fitted: Transform, merged: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    return [
        {
            "name": layout.categorical_name(i),
            "missing": counted.missing(fitted.num_numerical + i, layout.SPLITS),
            "distinct_values": sum(bucket["distinct"][i] for bucket in merged),
            "cardinality": fitted.cardinalities[i],
            "frequency_limit": fitted.fields[i].frequency_limit,
            "values_without_id": counted.without_id(i, layout.SPLITS),
            "drift": _drift_by_day(counted, counted.id_groups(i)),
        }
        for i in range(fitted.num_categorical)
    ]


def _drift_by_day(counted: Counted, histogram: Histogram) -> list[float]:
    return [counted.drift(part, histogram) for part in counted.slices.values()]


def _rejected(run: Run) -> dict[str, int]:
    folder = run.work.output / QUARANTINE
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: path.read_text(encoding="utf-8").count("\n") for path in files}
