"""Contenders of `benchmarks/quality.py`: each is made from rows and fits settings to them.

Tuning searches a contender's `space`, in the form of `dlrm.scripts.tune`. All contenders get the
same rows and columns; values in fewer training rows than the schema's limit become one, "rare".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import dlrm
from dlrm.data.schema.schema import Schema
from dlrm.scripts.tune import Space, default_space
from dlrm.tasks.recipe import DatasetFacts

AT_THE_END = 1 << 62  # steps between tests, so that no test chooses the weights
MISSING, RARE = 0, 1  # codes
PATIENCE, MOST_ROUNDS = 50, 3000  # of boosting

Logits = Callable[[pa.Table], np.ndarray]


class Rows(NamedTuple):
    """Rows to fit, rows that tuning judges by (None: there is nothing to choose), their schema."""

    train: pa.Table
    judged: pa.Table | None
    schema: Schema


class Fitted(NamedTuple):
    """A model as table -> logits, and its settings with what fitting has chosen."""

    logits: Logits
    settings: dict[str, Any]


class Dlrm:
    """This package: the space that `dlrm.scripts.tune` searches by default."""

    deterministic = False
    recipe: str | None = "auto"

    @staticmethod
    def space(rows: Rows) -> Space:
        rate = float(labels_of(rows.train, rows.schema).mean())
        tables = tuple(
            len(_frequent(rows.train[field.column], field.frequency_limit)) + 1
            for field in rows.schema.categorical
        )
        return default_space(
            DatasetFacts(len(rows.train), len(rows.schema.numerical), tables, rate)
        )

    def __init__(self, rows: Rows, threads: int) -> None:
        test = rows.train.slice(0, 100) if rows.judged is None else rows.judged  # of no effect
        self._dataset = dlrm.Dataset.from_arrow(
            rows.train, rows.schema, test=test, cores=threads, report=False
        )

    def fit(self, settings: dict[str, Any], seed: int) -> Fitted:
        model = dlrm.fit(
            self._dataset,
            base_device="cpu",
            recipe=self.recipe,
            seed=seed,
            test_freq=AT_THE_END,
            set_aside=0.0,  # the last weights are judged, so none are chosen
            **settings,
        )
        return Fitted(model.logits, settings)


class Recipe(Dlrm):
    """This package by `--recipe auto`, untuned, which also chooses what goes with the settings."""

    settings: Mapping[str, Any] = {}

    @classmethod
    def space(cls, rows: Rows) -> Space:
        return cls.settings


class Packed(Recipe):
    settings = {"ensemble": 5}


class Quadratic(Recipe):
    settings = {"interaction_op": "quadratic", "self_ensemble": True}


class Mixed(Recipe):
    settings = {"ensemble": "dot*3,quadratic*2"}


class AsItWas(Recipe):
    """A DLRM by the defaults of `dlrm.fit`, untuned."""

    recipe = None


class Columns:
    """Numbers and codes of categorical values, fitted to training rows."""

    def __init__(self, rows: Rows) -> None:
        self._schema = rows.schema
        self._values = {
            field.column: _frequent(rows.train[field.column], field.frequency_limit)
            for field in rows.schema.categorical
        }

    def labels(self, table: pa.Table) -> np.ndarray:
        return labels_of(table, self._schema)

    def numbers(self, table: pa.Table) -> np.ndarray:
        """Returns `[rows, numerical]`, NaN where missing."""
        names = self._schema.numerical_names
        columns = [np.asarray(pc.cast(table[n], pa.float64()).to_numpy()) for n in names]
        return np.stack(columns, 1) if columns else np.empty((len(table), 0))

    def codes(self, table: pa.Table) -> np.ndarray:
        """Returns `[rows, categorical]`, int32: 0 is missing, 1 rare or unseen, others a value."""
        columns = []
        for name, values in self._values.items():
            column = _text(table[name])
            place = pc.fill_null(pc.index_in(column, values), -1).to_numpy() + (RARE + 1)
            place[pc.is_null(column).to_numpy()] = MISSING
            columns.append(place.astype(np.int32))
        return np.stack(columns, 1) if columns else np.empty((len(table), 0), np.int32)


def labels_of(table: pa.Table, schema: Schema) -> np.ndarray:
    """Returns labels, 0 or 1."""
    column, positive = table[schema.label.column], schema.label.positive
    if positive is None:
        return pc.cast(column, pa.int8()).to_numpy()
    return pc.equal(_text(column), positive).to_numpy().astype(np.int8)


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.cast(column, pa.string())


def _frequent(column: pa.ChunkedArray, least: int) -> pa.Array:
    counted = pc.value_counts(_text(column).drop_null())
    return counted.field("values").filter(pc.greater_equal(counted.field("counts"), least))


class LightGBM:
    """LightGBM with its own categorical splits, or with target encodings and counts."""

    deterministic = False

    @staticmethod
    def space(rows: Rows) -> Space:
        return {
            "num_leaves": {"low": 8, "high": 128, "log": True},
            "learning_rate": {"low": 0.02, "high": 0.2, "log": True},
            "min_child_samples": {"low": 5, "high": 200, "log": True},
            "colsample_bytree": {"low": 0.3, "high": 1.0},
            "subsample": {"low": 0.5, "high": 1.0},
            "reg_lambda": {"low": 0.001, "high": 30.0, "log": True},
            "cat_smooth": {"low": 1.0, "high": 100.0, "log": True},
            "encoding": ["own", "target"],
            "subsample_freq": 1,
        }

    def __init__(self, rows: Rows, threads: int) -> None:
        self._rows, self._threads, self._columns = rows, threads, Columns(rows)
        self._encodings: dict[str, _Encoding] = {}

    def fit(self, settings: dict[str, Any], seed: int) -> Fitted:
        import lightgbm

        chosen = dict(settings)
        kind = chosen.pop("encoding", "own")
        if kind not in self._encodings:
            self._encodings[kind] = _Encoding(kind, self._rows, self._columns)
        encoding, judged = self._encodings[kind], self._rows.judged
        chosen = {"n_estimators": MOST_ROUNDS} | chosen
        model = lightgbm.LGBMClassifier(
            **chosen, random_state=seed, n_jobs=self._threads, verbose=-1
        )
        watched: dict[str, Any] = {}
        if judged is not None:
            watched["eval_set"] = [(encoding(judged), self._columns.labels(judged))]
            watched["eval_metric"] = "auc"
            watched["callbacks"] = [
                lightgbm.early_stopping(PATIENCE, first_metric_only=True, verbose=False)
            ]
        labels = self._columns.labels(self._rows.train)
        model.fit(encoding.train, labels, categorical_feature=encoding.categorical, **watched)
        rounds = model.best_iteration_ or chosen["n_estimators"]

        def logits(table: pa.Table) -> np.ndarray:
            return model.predict(encoding(table), raw_score=True)

        return Fitted(logits, {**settings, "n_estimators": rounds})


_LIGHTGBM = (
    *("num_leaves", "learning_rate", "min_child_samples", "colsample_bytree", "subsample"),
    *("reg_lambda", "cat_smooth", "encoding", "subsample_freq"),
)


class _Encoding:
    """Columns for boosting: codes as categories, or out-of-fold target encodings and counts."""

    def __init__(self, kind: str, rows: Rows, columns: Columns) -> None:
        self._columns, self._target = columns, None
        numbers, codes = columns.numbers(rows.train), columns.codes(rows.train)
        self.categorical: Sequence[int] = []
        if kind == "own":
            self.categorical = list(range(numbers.shape[1], numbers.shape[1] + codes.shape[1]))
            self.train = np.hstack([numbers, codes])
            return
        from sklearn.preprocessing import TargetEncoder

        self._target = TargetEncoder(target_type="binary", random_state=0)
        self._counts = [np.bincount(column) for column in codes.T]
        encoded = self._target.fit_transform(codes, columns.labels(rows.train))
        self.train = np.hstack([numbers, encoded, self._counted(codes)])

    def __call__(self, table: pa.Table) -> np.ndarray:
        numbers, codes = self._columns.numbers(table), self._columns.codes(table)
        if self._target is None:
            return np.hstack([numbers, codes])
        return np.hstack([numbers, self._target.transform(codes), self._counted(codes)])

    def _counted(self, codes: np.ndarray) -> np.ndarray:
        counts = [
            np.append(known, [0] * (2 + int(column.max(initial=0))))[column]
            for known, column in zip(self._counts, codes.T, strict=True)
        ]
        return np.stack(counts, 1)


class CatBoost:
    """CatBoost with its own ordered encodings of categorical fields."""

    deterministic = False

    @staticmethod
    def space(rows: Rows) -> Space:
        return {
            "depth": {"low": 4, "high": 8},
            "learning_rate": {"low": 0.03, "high": 0.2, "log": True},
            "l2_leaf_reg": {"low": 1.0, "high": 30.0, "log": True},
            "random_strength": {"low": 0.1, "high": 10.0, "log": True},
            "bagging_temperature": {"low": 0.0, "high": 1.0},
        }

    def __init__(self, rows: Rows, threads: int) -> None:
        self._rows, self._threads, self._columns = rows, threads, Columns(rows)
        self._train = self._pool(rows.train)
        self._judged = None if rows.judged is None else self._pool(rows.judged)

    def _pool(self, table: pa.Table) -> Any:
        import catboost

        data = catboost.FeaturesData(
            num_feature_data=self._columns.numbers(table).astype(np.float32),
            cat_feature_data=self._columns.codes(table).astype(bytes).astype(object),
        )
        return catboost.Pool(data, self._columns.labels(table))

    def fit(self, settings: dict[str, Any], seed: int) -> Fitted:
        import catboost

        chosen = {"iterations": MOST_ROUNDS} | settings
        model = catboost.CatBoostClassifier(
            **chosen,
            eval_metric="AUC" if self._judged else None,
            random_seed=seed,
            thread_count=self._threads,
            verbose=False,
            allow_writing_files=False,
        )
        patience = PATIENCE if self._judged else None
        model.fit(self._train, eval_set=self._judged, early_stopping_rounds=patience)

        def logits(table: pa.Table) -> np.ndarray:
            return model.predict(self._pool(table), prediction_type="RawFormulaVal")

        return Fitted(logits, {**settings, "iterations": model.tree_count_})


class RealMLP:
    """RealMLP of pytabkit by its tuned defaults; a fifth of the rows to fit chooses the epoch."""

    deterministic = False
    kind = "RealMLP_TD_Classifier"
    settings: Mapping[str, Any] = {"use_ls": False}  # smoothed labels, which would cost AUC

    @staticmethod
    def space(rows: Rows) -> Space:
        return {}

    def __init__(self, rows: Rows, threads: int) -> None:
        self._columns, self._threads = Columns(rows), threads
        numbers = self._columns.numbers(rows.train)
        self._medians = np.nan_to_num(np.nanmedian(numbers, 0))
        self._train, self._labels = self._inputs(rows.train), self._columns.labels(rows.train)

    def _inputs(self, table: pa.Table) -> Any:
        import pandas

        numbers, codes = self._columns.numbers(table), self._columns.codes(table)
        filled = pandas.DataFrame(np.where(np.isnan(numbers), self._medians, numbers))
        return filled.join(pandas.DataFrame(codes.astype(str)).add_prefix("c")).rename(columns=str)

    def fit(self, settings: dict[str, Any], seed: int) -> Fitted:
        import pytabkit

        model = getattr(pytabkit, self.kind)(
            device="cpu",
            random_state=seed,
            n_threads=self._threads,
            val_metric_name="1-auc_ovr",
            **self.settings,
            **settings,
        )
        model.fit(
            self._train,
            self._labels,
            cat_col_names=[name for name in self._train if name.startswith("c")],
        )

        def logits(table: pa.Table) -> np.ndarray:
            shares = model.predict_proba(self._inputs(table)).astype(np.float64)
            shares = shares.clip(np.finfo(np.float32).tiny)
            return np.log(shares[:, 1]) - np.log(shares[:, 0])

        return Fitted(logits, settings)


class TabM(RealMLP):
    """TabM of pytabkit, in the same way."""

    kind = "TabM_D_Classifier"
    settings: Mapping[str, Any] = {}


class Logistic:
    """Logistic regression over values of categorical fields, and over numbers or their bins."""

    deterministic = True

    @staticmethod
    def space(rows: Rows) -> Space:
        return {"C": {"low": 0.01, "high": 10.0, "log": True}, "bins": [0, 16, 64]}

    def __init__(self, rows: Rows, threads: int) -> None:
        self._columns = Columns(rows)
        self._train = self._inputs(rows.train)
        self._labels = self._columns.labels(rows.train)

    def _inputs(self, table: pa.Table) -> np.ndarray:
        numbers = np.nan_to_num(self._columns.numbers(table))
        return np.hstack([numbers, self._columns.codes(table)])

    def fit(self, settings: dict[str, Any], seed: int) -> Fitted:
        from sklearn.compose import make_column_transformer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import KBinsDiscretizer, OneHotEncoder, StandardScaler

        bins, width = settings.get("bins", 0), self._train.shape[1]
        numerical = len(self._columns._schema.numerical)
        scale = StandardScaler()
        if bins:
            scale = KBinsDiscretizer(bins, strategy="quantile", subsample=None)
        model = make_pipeline(
            make_column_transformer(
                (scale, list(range(numerical))),
                (OneHotEncoder(handle_unknown="ignore"), list(range(numerical, width))),
            ),
            LogisticRegression(C=settings.get("C", 1.0), max_iter=1000),
        )
        model.fit(self._train, self._labels)
        return Fitted(lambda table: model.decision_function(self._inputs(table)), settings)


CONTENDERS: dict[str, Any] = {
    "as_it_was": AsItWas,
    "recipe": Recipe,
    "packed": Packed,
    "quadratic": Quadratic,
    "mixed": Mixed,
    "ours": Dlrm,
    "lightgbm": LightGBM,
    "catboost": CatBoost,
    "realmlp": RealMLP,
    "tabm": TabM,
    "logistic": Logistic,
}
# what each imports
NEEDS = {"lightgbm": "lightgbm", "catboost": "catboost", "realmlp": "pytabkit", "tabm": "pytabkit"}
NEEDS["logistic"] = "sklearn"
