"""Names in a split-binary dataset, which configurations know without numpy."""

from dlrm.files import MANIFEST

KIND = "dataset"  # kind of dataset in a manifest
CONVERTED = "Parquet of a dataset"  # kind of one that is converted to Parquet
SPLITS = ("train", "test", "validation")
FEATURE_SPEC = "feature_spec.yaml"
MODEL_SIZE = "model_size.json"
TRANSFORM = "transform"  # directory of the fitted transform, which serving loads
LABEL = "label"
LABEL_FILE = "label.bin"
NUMERICAL_FILE = "numerical.bin"
WEIGHT_FILE = "weight.bin"  # of samples
MAX_CARDINALITY = 2**31 - 2  # rows of the largest table, see `layout.id_dtype`


def numerical_name(index: int) -> str:
    """The default name of a numerical feature; all of them share `numerical.bin`."""
    return f"num_{index}"


def categorical_name(index: int) -> str:
    """The default name of a categorical feature; ".bin" is part of it, as in NVIDIA's datasets."""
    return f"cat_{index}.bin"


def field_names(num_numerical: int, num_categorical: int) -> tuple[list[str], list[str]]:
    """Returns the names of fields without a schema on pages and in messages."""
    numerical = [f"numerical {i}" for i in range(num_numerical)]
    return numerical, [f"categorical {i}" for i in range(num_categorical)]


def field_of(feature: str, index: int) -> str:
    """Returns the name of a field for a message, with its file if that has the default name."""
    if feature == categorical_name(index):
        return f"categorical {index} ({feature})"
    return f"numerical {index}" if feature == numerical_name(index) else feature


def default_names(num_numerical: int, num_categorical: int) -> tuple[str, list[str], list[str]]:
    """Returns NVIDIA's names of the label, the numerical and the categorical features."""
    numerical = [numerical_name(i) for i in range(num_numerical)]
    return LABEL, numerical, [categorical_name(i) for i in range(num_categorical)]


def check_spec_name(name: str) -> None:
    """Raises ValueError for a name under which no specification can be written into a dataset."""
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
        raise ValueError(f"--feature_spec_out: expected a file name without folders, got {name!r}")
    if name in (MANIFEST, MODEL_SIZE, TRANSFORM, *SPLITS):
        raise ValueError(
            f"--feature_spec_out: expected a name that the dataset does not use, got {name!r}"
        )
