"""`dlrm.Classifier`: `dlrm.fit` as an estimator of scikit-learn."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import inspect
import warnings
from collections.abc import Mapping
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm.command_line import missing_extra

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import (
        _check_sample_weight,
        check_consistent_length,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError as error:
    raise ImportError(missing_extra(error, "evaluate")) from error

from dlrm.api.dataset import unexpected
from dlrm.api.training import SETTINGS, fit
from dlrm.data.schema.schema import Schema
from dlrm.data.tables.draft import draft
from dlrm.data.tables.frames import is_frame, open_frame
from dlrm.serving.scoring import probability

_WATCHING = ("metrics", "on_test", "on_step", "progress", "verbose")
_OWN = ("categorical", "numerical", "recipe", "base_device", "random_state", *_WATCHING)
_PARAMETERS = (*_OWN, *(name for name in SETTINGS if name != "seed"))
_KINDS = ("numerical", "categorical")
_MISSING = ("None", "nan", "NaT", "<NA>")
_SET_ASIDE_FROM = 10_000  # rows from which a tenth is set aside to choose the weights on
_IMPORTANCE_ROWS = 5_000


class Classifier(ClassifierMixin, BaseEstimator):
    """A DLRM of two classes with the interface of scikit-learn's estimators.

    `fit` drafts a schema and trains by `dlrm.fit`. Columns of numpy arrays are numerical; those of
    data frames are what `dlrm.data.tables.draft.draft` takes them for: text and ids are
    categorical. Missing values are allowed, and values unseen in training share one id.

    All rows given to `fit` are training rows. With an `eval_set`, the weights with the best AUC on
    it are kept. Without one, a tenth of the rows is set aside to choose on if there are 10,000 or
    more; `set_aside` is another share.

    Args:
        categorical, numerical: columns to use as ids and as numbers, whatever the draft says:
            names of a frame's columns, or positions in an array.
        recipe: "auto" chooses the open settings from the rows.
        base_device: "cpu", "cuda" or "cuda:<index>"; None uses CUDA if available.
        random_state: seed, or a `numpy.random.RandomState` that draws one; None leaves it to
            `dlrm.fit`.
        metrics, on_test, on_step: functions that watch the training, see `dlrm.fit`.
        progress, verbose: whether to show a progress bar, or to print lines; None does neither, as
            searches train many models.
        settings: settings of `dlrm.fit`, such as `embedding_dim`, `epochs`, `lr` and `early_stop`;
            None leaves a setting to `dlrm.fit`.

    Attributes:
        classes_: the two classes in ascending order, `[2]`; the second is the positive one.
        n_features_in_: number of columns.
        feature_names_in_: names of a frame's columns; missing after training on an array.
        model_: the trained model, as `dlrm.fit` returns it.
        schema_: meaning of the columns.
        feature_importances_: the AUC lost when the values of a column are permuted, `[columns]`, 0
            for columns that no field reads.

    Raises:
        TypeError: an unknown setting.
    """

    def __init__(self, **settings: Any) -> None:
        for name in settings:
            if name not in _PARAMETERS:
                raise unexpected(Classifier, name, _PARAMETERS)
        for name in _PARAMETERS:
            setattr(self, name, settings.get(name))

    __init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # get_params reads it
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        + [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in _PARAMETERS]
    )

    def fit(self, X: Any, y: Any, sample_weight: Any = None, eval_set: Any = None) -> "Classifier":
        """Trains on rows `X`, `[rows, columns]`, with the classes `y`, `[rows]`.

        Args:
            X: a data frame of pandas, Polars or Arrow, or an array of numbers or text.
            y: two classes, of any type.
            sample_weight: weights of the rows in the loss, `[rows]`, at least 0.
            eval_set: a pair (X, y), or a list of one pair, to choose the weights on.

        Raises:
            TypeError: X is sparse.
            ValueError: the classes are not two, a value of X cannot be read, lengths differ, or the
                columns of `eval_set` do; the message names it.
        """
        frame = self._frame(X, reset=True)
        codes = self._codes(y, frame)
        label, weight = _free("label", frame), None
        table = frame.append_column(label, pa.array(codes))
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, frame, ensure_non_negative=True)
            if not weights.any():
                raise ValueError("sample_weight: expected a weight above 0, got zeros alone")
            weight = _free("weight", frame)
            table = table.append_column(weight, pa.array(weights))
        self.schema_ = self._schema(X, table, label, weight)
        test = None if eval_set is None else self._test_table(eval_set, label, weight)
        self.model_ = fit(
            table,
            self.schema_,
            test=test,
            metrics=self.metrics,
            on_test=self.on_test,
            on_step=self.on_step,
            progress=bool(self.progress),
            verbose=bool(self.verbose),
            recipe=self.recipe,
            base_device=self.base_device,
            **self._settings(len(codes), test is not None),
        )
        judged = table if test is None else test
        kept = np.random.default_rng(0).permutation(judged.num_rows)[:_IMPORTANCE_ROWS]
        self._names, self._sample = frame.column_names, judged.take(kept)
        self.__dict__.pop("feature_importances_", None)  # of an earlier model
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Returns the probabilities of both classes, float32 `[rows, 2]`."""
        positive = probability(self.decision_function(X))
        return np.stack([1 - positive, positive], axis=1)

    def decision_function(self, X: Any) -> np.ndarray:
        """Returns the logits of the positive class, float32 `[rows]`."""
        check_is_fitted(self)
        return self.model_.logits(self._frame(X, reset=False))

    def predict(self, X: Any) -> np.ndarray:
        """Returns the more probable class of each row, `[rows]`."""
        positive = self.decision_function(X) > 0
        return self.classes_[positive.astype(int)]

    @cached_property
    def feature_importances_(self) -> np.ndarray:
        check_is_fitted(self)
        schema, lost = self.schema_, dict.fromkeys(self._names, 0.0)
        numbers = [field.column for field in schema.numerical]
        column_of = dict(zip(schema.numerical_names, numbers, strict=True))
        try:
            found = self.model_.importance(self._sample)
        except (ValueError, OSError) as error:  # which hasattr would pass on
            raise AttributeError(f"feature_importances_: {error}") from error
        for one in found:  # a column that is both a number and an id has the sum of its fields
            lost[column_of.get(one.field, one.field)] += one.auc_lost
        return np.array([lost[name] for name in self._names])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.categorical = tags.input_tags.string = True
        tags.classifier_tags.multi_class = False
        return tags

    def _frame(self, X: Any, reset: bool) -> pa.Table:
        """Returns rows as an Arrow table, with columns x0, x1, ... from an array."""
        if is_frame(X) or hasattr(X, "collect"):  # a LazyFrame is refused with advice
            table = open_frame(X, None, "X").read_all()
            if not table.num_columns:
                raise ValueError("X: expected columns, got none")
            validate_data(self, table, reset=reset, skip_check_array=True)
        else:
            dtype = None if hasattr(X, "dtype") else "numeric"
            X = validate_data(self, X, reset=reset, dtype=dtype, ensure_all_finite="allow-nan")
            table = pa.table({f"x{i}": _array(column, i) for i, column in enumerate(X.T)})
        for name in self._columns("categorical", table, is_frame(X)):
            column = _as_text(table.column(name), name)
            table = table.set_column(table.column_names.index(name), name, column)
        return table

    def _columns(self, kind: str, table: pa.Table, named: bool) -> list[str]:
        """Returns the names of the columns that `categorical` or `numerical` lists.

        If X is `named`, a number is a name, and not a position.
        """
        given: Any = getattr(self, kind)
        found = []
        for one in [given] if isinstance(given, str | Integral) else () if given is None else given:
            is_position = isinstance(one, Integral) and not (named or isinstance(one, bool))
            name = f"x{one}" if is_position else str(one)
            if name not in table.column_names:
                raise ValueError(
                    f"{kind}: {one!r} is no column of X, which has {table.column_names}"
                )
            found.append(name)
        return list(dict.fromkeys(found))

    def _codes(self, y: Any, frame: pa.Table) -> np.ndarray:
        """Returns 0 or 1 for each row, and sets the classes."""
        y = column_or_1d(y, warn=True)
        check_consistent_length(frame, y)
        if not len(y):
            raise ValueError("X, y: expected rows, got none")
        if y.dtype == object:
            _check_one_type(y)
        check_classification_targets(y)
        classes, codes = np.unique(y, return_inverse=True)
        if len(classes) > 2:
            raise ValueError(
                "Only binary classification is supported. The type of the target is "
                f"{type_of_target(y)}; y has {len(classes)} classes. "
                "sklearn.multiclass.OneVsRestClassifier(dlrm.Classifier()) trains a model for each"
            )
        if len(classes) < 2:
            raise ValueError(f"y: expected two classes, got 1 class: {classes[0]}")
        self.classes_ = classes  # after the checks: an earlier model keeps its own
        return codes

    def _test_table(self, eval_set: Any, label: str, weight: str | None) -> pa.Table:
        is_listed = isinstance(eval_set, list) and len(eval_set) == 1
        pair = eval_set[0] if is_listed else eval_set
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"eval_set: expected one pair (X, y), got {type(eval_set).__name__}")
        frame, y = self._frame(pair[0], reset=False), column_or_1d(pair[1])
        check_consistent_length(frame, y)
        known = np.isin(y, self.classes_)
        if not known.all():
            raise ValueError(
                f"eval_set: y[{known.argmin()}] is {y[known.argmin()]}, which is none of the "
                f"classes {self.classes_.tolist()}"
            )
        if len(found := np.unique(y)) < 2:
            raise ValueError(f"eval_set: expected rows of two classes, got {found.tolist()}")
        table = frame.append_column(label, pa.array((y == self.classes_[1]).astype(int)))
        return table.append_column(weight, pa.array(np.ones(len(y)))) if weight else table

    def _schema(self, X: Any, table: pa.Table, label: str, weight: str | None) -> Schema:
        """Returns the meaning of the columns: numbers in an array, else as drafted."""
        chosen = {kind: self._columns(kind, table, is_frame(X)) for kind in _KINDS}
        if both := set(chosen["numerical"]) & set(chosen["categorical"]):
            raise ValueError(f"categorical, numerical: {min(both)!r} is in both")
        moved = {one for columns in chosen.values() for one in columns}
        is_text = {one.name: pa.types.is_string(one.type) for one in table.schema}
        if is_frame(X) or any(is_text.values()):
            found = draft(table.to_batches(), label, weight=weight)
            if note := found.note(moved):
                warnings.warn(
                    f"the schema drafted from X {note}; dlrm.Classifier(numerical=[...], "
                    "categorical=[...]) decides otherwise",
                    stacklevel=3,
                )
            facts = found.schema.to_dict()
        else:
            facts = {"version": 1, "label": {"column": label}}
            facts |= {"weight": weight} if weight else {}
        if not is_frame(X):
            numbers = [
                name for name in is_text if not is_text[name] and name not in (label, weight)
            ]
            ids = [one for one in facts.get("categorical", ()) if _column_of(one) not in numbers]
            facts |= {"numerical": [_number(name) for name in numbers], "categorical": ids}
        for kind, columns in chosen.items():
            drafted = {_column_of(field): field for field in facts.get(kind, ())}
            kept = [field for name, field in drafted.items() if name not in moved]
            make = _number if kind == "numerical" else str
            facts[kind] = kept + [drafted.get(name, make(name)) for name in columns]
        return Schema.from_dict({name: value for name, value in facts.items() if value != []})

    def _settings(self, rows: int, tested: bool) -> dict[str, Any]:
        names = [name for name in _PARAMETERS if name not in _OWN]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if (state := self.random_state) is not None:
            is_seed = isinstance(state, Integral)
            given["seed"] = int(state if is_seed else check_random_state(state).randint(1 << 31))
        if tested:
            return {"set_aside": 0.0} | given
        return {"test_fraction": 0.0, "set_aside": 0.1 * (rows >= _SET_ASIDE_FROM)} | given


def _free(name: str, table: pa.Table) -> str:
    """Returns a name that no column of a table has."""
    while name in table.column_names:
        name += "_"
    return name


def _check_one_type(y: np.ndarray) -> None:
    """Raises ValueError if labels that are objects of Python have several types, or are missing."""
    for row, one in enumerate(y):
        if not isinstance(one, str) and str(one) in _MISSING:
            raise ValueError(f"y: row {row}: expected a class, got {one}")
        if isinstance(one, str) != isinstance(y[0], str):
            raise ValueError(
                f"y: row {row}: expected a class of one type, as {y[0]!r}, got {one!r}"
            )


def _array(column: np.ndarray, index: int) -> pa.Array:
    try:
        return pa.array(column, from_pandas=True)
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"X: column {index}: expected numbers or text ({error})") from None


def _as_text(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Returns the values of a categorical column as text; NaN is a missing value."""
    if pa.types.is_list(column.type):  # a field of several values has its own
        return column
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    try:
        return column.cast(pa.string())
    except pa.ArrowException:
        raise ValueError(
            f"categorical: {name!r}: expected values that have a text, got the type {column.type}"
        ) from None


def _number(column: str) -> dict[str, str]:
    return {"column": column, "transform": "standardize"}


def _column_of(field: Any) -> str | None:
    return field.get("column") if isinstance(field, Mapping) else field
