"""Names of formats and transforms of data, which configurations know without numpy."""

from collections.abc import Iterable

VERIFY_DATA = ("first", "always", "never")
TABLE_FORMATS = ("parquet", "orc", "arrow", "csv", "jsonl")
# Numerical transforms by their names in a schema, with the result for a value x.
NUMERIC_TRANSFORMS = {
    "log": "ln(x + 2), with 0 for a missing x",
    "nvidia": "ln(x + 3), and 0 if x is missing",
    "standardize": "mean 0 and standard deviation 1 on the training rows, and 0 if x is missing",
    "quantile": "share of the training values below x, and 0.5 if x is missing",
    "none": "unchanged, and 0 if x is missing",
}
# Those of Criteo's logs, by their names in flags and `transform.json`.
CRITEO_TRANSFORMS = {"readme": "log", "nvidia": "nvidia"}


def described(names: Iterable[str] = NUMERIC_TRANSFORMS) -> str:
    """Returns names and meanings of numerical transforms, for the help of a flag."""
    return "; ".join(
        f"{name}: {NUMERIC_TRANSFORMS[CRITEO_TRANSFORMS.get(name, name)]}" for name in names
    )


# Texts of booleans in any file, and what they mean.
SPELLINGS = {**dict.fromkeys(("true", "True", "TRUE"), "true")}
SPELLINGS |= dict.fromkeys(("false", "False", "FALSE"), "false")
BITS = {text: str(int(word == "true")) for text, word in SPELLINGS.items()}
