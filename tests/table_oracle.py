"""Builds a table's dataset from its documentation, in plain Python: the tests' oracle.

Rows are dicts of Python values, and a schema is the content of `schema.yaml`. No code of the
package is used: hashes, dictionaries, means, bins, shuffles and formats are written again.
"""

import math
import struct
from collections import Counter
from datetime import datetime, timedelta, timezone
from decimal import Decimal, localcontext
from fractions import Fraction
from zoneinfo import ZoneInfo

SPLITS = ("train", "test", "validation")
WORD = (1 << 64) - 1
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
UNITS = {"s": 1_000_000, "ms": 1000, "us": 1}
DIVIDE, KEEP = 0x5EED_0001, 0x5EED_0002


def splitmix64(seed, counter):
    x = ((counter + 1) * 0x9E3779B97F4A7C15 + seed) & WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def hash_text(text):
    def mixed(x):
        for _ in range(2):
            x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 & WORD
        return x ^ (x >> 32)

    state = len(text) * 0x9E3779B97F4A7C15 & WORD
    for begin in range(0, len(text), 8):
        state = mixed(state ^ int.from_bytes(text[begin : begin + 8], "little"))
    return state


def text_of(value):
    """Returns any value as stripped CSV text, "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        whole = math.isfinite(value) and value == int(value) and abs(value) < 2**64
        return str(int(value)) if whole else repr(value)
    if isinstance(value, Decimal):
        if 0 < abs(value) < Decimal("0.0001") and Decimal(repr(float(value))) == value:
            return repr(float(value))  # as the text of the same float
        sign, digits, exponent = value.as_tuple()
        whole = "".join(map(str, digits)).rjust(1 - exponent, "0") + "0" * max(exponent, 0)
        if exponent < 0:
            whole = f"{whole[:exponent]}.{whole[exponent:]}".rstrip("0").rstrip(".")
        whole = whole.lstrip("0")
        whole = whole if whole and whole[0] != "." else f"0{whole}"
        return "-" * (sign and whole != "0") + whole
    return canonical(str(value).strip())


def canonical(text):
    """Returns one text for the spellings of a boolean and of a whole number."""
    if text in ("True", "TRUE", "False", "FALSE"):
        return text.lower()
    whole, point, zeros = text.partition(".")
    digits = whole.removeprefix("-")
    if zeros and set(zeros) == {"0"} and digits.isascii() and digits.isdecimal():
        if digits == "0":
            return "0"
        return text if digits[0] == "0" else whole
    return text


def microseconds(value, field):
    if isinstance(value, int):
        return value * UNITS[field["unit"]]
    if isinstance(value, str):
        value = datetime.fromisoformat(value.strip())
    if value.tzinfo is None:
        value = in_zone(value, ZoneInfo(field.get("zone", "UTC")))
    return (value - EPOCH) // timedelta(microseconds=1)


def in_zone(time, zone):
    """Returns a local time: the first of two, or the microsecond before a gap that skips it."""
    before, after = (time.replace(tzinfo=zone, fold=fold).utcoffset() for fold in (0, 1))
    if after <= before:
        return time.replace(tzinfo=zone, fold=0)
    low, high = (time.replace(tzinfo=timezone.utc) - offset for offset in (after, before))
    while high - low > timedelta(microseconds=1):
        middle = low + (high - low) / 2
        low, high = (
            (low, middle) if middle.astimezone(zone).utcoffset() == after else (middle, high)
        )
    return low


def field_of(entry):
    return {"column": entry} if isinstance(entry, str) else dict(entry)


class Oracle:
    """Computes the expected dataset of rows.

    Attributes:
        files: relative name -> bytes, for every `.bin`.
        facts: fitted values by column: (mean, deviation, edges, shares), or dictionary values.
        sizes: rows per table.
    """

    def __init__(self, schema, rows, division, file_of=(), file_splits=()):
        self.schema, self.rows, self.division = schema, rows, division
        self.missing_values = {"", *schema.get("missing_values", ())}
        digits = [text for text in self.missing_values if text.strip("-.0123456789") == ""]
        self.missing_numbers = {float(text) for text in digits if text}
        self.label = field_of(schema["label"])
        self.splits = self._splits(file_of, file_splits)
        weights = [row.get(schema.get("weight"), 1.0) for row in rows]
        training = zip(self.splits, weights, strict=True)
        self.training = [i for i, (s, weight) in enumerate(training) if s == "train" and weight]
        self.empty = [name for name in self._asked(file_splits) if name not in self.splits]
        self.files, self.facts, self.sizes = {}, {}, []
        if not self.empty:
            self._write(file_splits)

    def _asked(self, file_splits):
        """Returns the splits that must not be empty."""
        asked, division = {"train", *file_splits}, self.division
        if any(division.get(way) for way in ("test_fraction", "test_from", "split_column")):
            asked.add("test")
        if division.get("validation_fraction") or division.get("validation_from"):
            asked.add("validation")
        return asked

    def _is_positive(self, row):
        text = text_of(row[self.label["column"]])
        if "positive" in self.label:
            return text == self.label["positive"]
        return {"0": False, "1": True, "true": True, "false": False}[text]

    def _splits(self, file_of, file_splits):
        division, seed = self.division, self.division.get("seed", 0)
        test, validation = (division.get(f"{n}_fraction", 0) for n in ("test", "validation"))
        splits = ["train"] * len(self.rows)
        if file_splits:
            splits = [file_splits[file] for file in file_of]
        elif "test_from" in division:
            begins = [microseconds(division["test_from"], self.schema["time"])]
            if "validation_from" in division:
                begins.append(microseconds(division["validation_from"], self.schema["time"]))
            times = [self._time(row) for row in self.rows]
            splits = [SPLITS[sum(time >= begin for begin in begins)] for time in times]
        elif "split_column" in division:
            splits = [text_of(row[division["split_column"]]).lower() for row in self.rows]
        elif division.get("split_key"):
            for i, row in enumerate(self.rows):
                text = text_of(row[division["split_key"]]).encode()
                drawn = splitmix64(seed + DIVIDE, hash_text(text))
                if drawn < int(test * 2**64):
                    splits[i] = "test"
                elif drawn < int((test + validation) * 2**64):
                    splits[i] = "validation"
        elif test or validation:
            order = sorted(range(len(self.rows)), key=lambda i: splitmix64(seed + DIVIDE, i))
            first = round(len(self.rows) * test)
            second = first + round(len(self.rows) * validation)
            for place, i in enumerate(order[:second]):
                splits[i] = "test" if place < first else "validation"
        kept = int(division.get("keep_negatives", 1) * 2**64)
        return [
            None
            if split == "train"
            and not self._is_positive(self.rows[i])
            and splitmix64(seed + KEEP, i) >= kept
            else split
            for i, split in enumerate(splits)
        ]

    def _time(self, row):
        return microseconds(row[self.schema["time"]["column"]], self.schema["time"])

    def _write(self, file_splits):
        seed = self.division.get("seed", 0)
        names = {"train", "test", *self._asked(file_splits), *filter(None, self.splits)}
        columns = self._columns()
        for name in names:
            chosen = [i for i, split in enumerate(self.splits) if split == name]
            if name == "train":
                chosen.sort(key=lambda i: splitmix64(seed, i))
            for file, cells in columns.items():
                content = self.files[f"{name}/{file}"] = b"".join(cells[i] for i in chosen)
                if file.endswith(".lengths.bin"):
                    width = len(content) // max(len(chosen), 1)
                    lengths = memoryview(content).cast({1: "b", 2: "h", 4: "i", 0: "b"}[width])
                    starts = file.replace("lengths", "starts")
                    self.files[f"{name}/{starts}"] = starts_of(lengths.tolist())

    def _columns(self):
        """Returns the bytes of each row of all splits, by file."""
        schema, rows = self.schema, self.rows
        columns = {"label.bin": [bytes([self._is_positive(row)]) for row in rows]}
        numbers = [self._numbers(field_of(entry)) for entry in schema.get("numerical", ())]
        categorical = [field_of(entry) for entry in schema.get("categorical", ())]
        if numbers:
            columns["numerical.bin"] = [b"".join(cells) for cells in zip(*numbers, strict=True)]
        dictionaries = self._dictionaries(categorical)
        for i, field in enumerate(categorical):
            id_of, code = self._ids(field, dictionaries[field["column"]])
            if "max_length" in field:
                columns |= self._lists(field, id_of, code, f"cat_{i}")
                continue
            ids = (id_of(row[field["column"]]) for row in rows)
            columns[f"cat_{i}.bin"] = [struct.pack(f"<{code}", one) for one in ids]
        for i, cross in enumerate(schema.get("crosses", ()), len(categorical)):
            ids, code = self._crossed(cross, categorical)
            columns[f"cat_{i}.bin"] = [struct.pack(f"<{code}", one) for one in ids]
        if "weight" in schema:
            weights = (self._number(row[schema["weight"]]) for row in rows)
            columns["weight.bin"] = [struct.pack("<f", weight) for weight in weights]
        for name in schema.get("groups", ()):
            hashes = (hash_text(text_of(row[name]).encode()) for row in rows)
            columns[f"group_{name}.bin"] = [struct.pack("<Q", one) for one in hashes]
        if "time" in schema:
            columns["time.bin"] = [struct.pack("<q", self._time(row)) for row in rows]
        return columns

    def _number(self, value):
        if value is None or text_of(value) in self.missing_values:
            return None
        return None if float(value) in self.missing_numbers else float(value)

    def _numbers(self, field):
        values = [self._number(row[field["column"]]) for row in self.rows]
        return self._transformed(field, values)

    def _transformed(self, field, values):
        known = [values[i] for i in self.training if values[i] is not None]
        rule = field.get("transform", "standardize")
        mean, deviation = scale(known) if rule == "standardize" else (0.0, 1.0)
        bins = field.get("bins") or (64 if rule == "quantile" else 0)
        edges, shares = bins_of(known, bins) if bins else ([], [])
        self.facts[field["column"]] = mean, deviation, edges, shares

        def transformed(value):
            if rule == "log":
                return math.log(max(2.0 if value is None else value + 2.0, 1.0))
            if rule == "quantile":
                return 0.5 if value is None or not edges else interpolated(value, edges, shares)
            return 0.0 if value is None else (value - mean) / deviation

        return [half(transformed(value)) for value in values]

    def _key(self, field, value):
        """Returns the key of a value, which also sorts it among ids; None if missing."""
        text = text_of(value)
        if text in self.missing_values:
            return None
        if field.get("type") == "integer":
            return int(text) & WORD
        return text.encode()

    def _dictionaries(self, fields):
        """Returns column -> keys, in the order of their ids."""
        groups = {}
        for field in fields:
            shared = field.get("dictionary")
            groups.setdefault(("shared", shared) if shared else field["column"], []).append(field)
        found = {}
        for name, members in groups.items():
            keys = (
                self._key(field, value)
                for field in members
                for i in self.training
                for value in values_of(field, self.rows[i])
            )
            counts = Counter(key for key in keys if key is not None)
            first = members[0]
            kept = [key for key in counts if counts[key] >= first.get("frequency_limit", 1)]
            kept.sort(key=lambda key: (-counts[key], key))
            kept = kept[: first.get("max_ids")]
            self.facts["dictionary", name] = [
                key.decode() if isinstance(key, bytes) else signed(key) for key in kept
            ]
            found |= {field["column"]: kept for field in members}
        return found

    def _number_of(self, field, value):
        """Returns the key of a value as a number; None if missing."""
        key = self._key(field, value)
        return hash_text(key) if isinstance(key, bytes) else key

    def _combined(self, cross, categorical):
        """Returns each row's combined key, None if a part is missing, and the texts of keys."""
        fields = [next(f for f in categorical if f["column"] == name) for name in cross["fields"]]
        texts, keys = {}, []
        for row in self.rows:
            numbers = [self._number_of(field, row[field["column"]]) for field in fields]
            key = None
            if None not in numbers:
                key = hash_text(struct.pack(f"<{len(numbers)}Q", *numbers))
                parts = [self._key(field, row[field["column"]]) for field in fields]
                parts = [p if isinstance(p, bytes) else b"%d" % signed(p) for p in parts]
                texts[key] = b" & ".join(parts)
            keys.append(key)
        return keys, texts

    def _crossed(self, cross, categorical):
        """Returns each row's id of a combination, and the ids' `struct` code."""
        keys, texts = self._combined(cross, categorical)
        counts = Counter(keys[i] for i in self.training if keys[i] is not None)
        limit = cross.get("frequency_limit", math.inf)
        kept = [key for key in counts if counts[key] >= limit]
        spread = {key: key * 0x9E3779B97F4A7C15 & WORD for key in kept}
        kept.sort(key=lambda key: (-counts[key], texts[key], spread[key]))
        kept = kept[: cross.get("max_ids")]
        name = cross.get("name", "_x_".join(cross["fields"]))
        self.facts["dictionary", name] = [texts[key].decode() for key in kept]
        field = {"column": name, "hash_buckets": cross.get("buckets", 0)}
        id_of, code = self._ids(field, kept, lambda field, key: key)
        return [id_of(key) for key in keys], code

    def _ids(self, field, dictionary, key_of=None):
        key_of = key_of or self._key
        ids = {key: 1 + place for place, key in enumerate(dictionary)}
        buckets, own = field.get("hash_buckets", 0), 1 + len(dictionary)
        self.sizes.append(own + buckets)
        code = code_of(own + buckets)

        def id_of(value):
            key = key_of(field, value)
            if key is None or key in ids:
                return ids.get(key, 0)
            if not buckets:
                return 0
            key = hash_text(key) if isinstance(key, bytes) else key
            mixed = (key * 0x9E3779B97F4A7C15 & WORD) >> 32
            mixed = (mixed * 0x9E3779B97F4A7C15 & WORD) >> 32
            return own + (mixed * buckets >> 32)

        return id_of, code

    def _lists(self, field, id_of, code, name):
        """Returns each row's bytes in the files of a list field, without starts."""
        most, weighted = field["max_length"], "weights" in field
        found = {f"{name}.values.bin": [], f"{name}.lengths.bin": []}
        found |= {f"{name}.weights.bin": []} if weighted else {}
        for row in self.rows:
            ids = [id_of(value) for value in values_of(field, row)]
            weights = (row[field["weights"]] or []) if weighted else [1.0] * len(ids)
            weights = [struct.unpack("<f", struct.pack("<f", one))[0] for one in weights]
            pairs = list(zip(ids, weights, strict=True))
            ordered = field.get("ordered", True)
            if not ordered:
                pairs.sort(key=lambda pair: (pair[0] == 0, *pair))
            last = field.get("keep", "last" if ordered else "first") == "last"
            pairs = pairs[-most:] if last else pairs[:most]
            found[f"{name}.lengths.bin"].append(struct.pack(f"<{code_of(most + 1)}", len(pairs)))
            packed = [struct.pack(f"<{code}", one) for one, _ in pairs]
            found[f"{name}.values.bin"].append(b"".join(packed))
            if weighted:
                packed = [struct.pack("<f", weight) for _, weight in pairs]
                found[f"{name}.weights.bin"].append(b"".join(packed))
        return found


def values_of(field, row):
    """Returns a row's values of a field: any number for a list."""
    value = row[field["column"]]
    return (value or []) if "max_length" in field else [value]


def code_of(size):
    """Returns the `struct` code of the type that holds ids below a size."""
    return "b" if size < 127 else "h" if size < 32767 else "i"


def starts_of(lengths):
    """Returns the bytes of the starts of rows 0, 4096, ... and of the total."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return struct.pack(f"<{(len(ends) + 4094) // 4096 + 1}q", *ends[:-1][::4096], ends[-1])


def signed(key):
    return key - (1 << 64) if key >> 63 else key


def half(value):
    """Returns a number's float16 bytes; raises OverflowError if too large."""
    single = struct.unpack("<f", struct.pack("<f", value))[0]
    return struct.pack("<e", single)


def scale(values):
    """Returns the exact mean and standard deviation, rounded once."""
    if not values:
        return 0.0, 1.0
    size = max(map(abs, values))
    if max(values) - min(values) <= 2.0**-49 * size:
        return min(values), max(size, 1.0)
    mean = sum(map(Fraction, values)) / len(values)
    variance = sum(Fraction(value) ** 2 for value in values) / len(values) - mean * mean
    with localcontext() as context:
        context.prec = 60
        root = (Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt()
    return float(mean), float(root)


def bins_of(values, bins):
    """Returns edges at quantiles of all and of distinct values, and the shares below them."""
    if not values:
        return [], []
    ascending, distinct, inner = sorted(values), sorted(set(values)), bins - 1
    edges = {distinct[0], distinct[-1]}
    for count, at in ((inner - inner // 2, ascending), (inner // 2, distinct)):
        for k in range(1, count + 1):
            place = k / (count + 1) * len(at)
            edges.add(at[math.ceil(place) - 1] if at is ascending else at[int(place)])
    kept = sorted(edges)
    shares = [
        (sum(v < edge for v in values) + sum(v == edge for v in values) / 2) / len(values)
        for edge in kept
    ]
    return kept, shares


def interpolated(value, edges, shares):
    if value <= edges[0]:
        return shares[0]
    if value >= edges[-1]:
        return shares[-1]
    place = max(i for i, edge in enumerate(edges) if edge <= value)
    slope = (shares[place + 1] - shares[place]) / (edges[place + 1] - edges[place])
    return slope * (value - edges[place]) + shares[place]
