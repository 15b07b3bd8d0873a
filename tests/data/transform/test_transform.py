import json
import math
import string
import zlib

import numpy as np
import pyarrow as pa
import pytest
from column_testing import text_column, transform_texts

from dlrm.data import layout
from dlrm.data.schema.numeric_transforms import NUMERIC_TRANSFORMS
from dlrm.data.schema.schema import CategoricalField
from dlrm.data.sources.columns import (
    CachedByKey,
    Coded,
    Parsed,
    TextColumn,
    parse_fields,
    read_hexadecimal,
)
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform.dictionaries import frequency_limits
from dlrm.data.transform.keys import FieldKeys
from dlrm.data.transform.transform import Transform


def column(*fields):
    return text_column(fields)


def parsed(*values, missing=()):
    flags = np.zeros(len(values), bool)
    flags[list(missing)] = True
    return Parsed(np.array(values), flags)


def read_integer(column):
    """Reads integers as Python does where there is no compiled library."""
    fields = TextColumn(column.data, column.starts[None], column.ends[None])
    (values, missing), _, bad_at = parse_fields(fields, 1)
    bad = np.arange(len(column.starts)) == (-1 if bad_at is None else bad_at)
    return Parsed(values[0], missing[0]), bad


def test_hexadecimal_digits_are_a_number():
    texts = ("1f", "", "0000001F", "ffffffffffffffff", "123456789", "0")
    numbers, _ = read_hexadecimal(column(*texts))
    assert numbers.values.tolist() == [0x1F, 0, 0x1F, 2**64 - 1, 0x123456789, 0]
    assert numbers.missing.tolist() == [False, True, False, False, False, False]


def test_integers_of_every_length_are_read():
    values = [sign * int("987654321987654321"[:n]) for n in range(1, 19) for sign in (1, -1)]
    numbers, _ = read_integer(column(*map(str, values), "", "-0", "007"))
    assert numbers.values.tolist() == [*values, 0, 0, 7]
    assert np.flatnonzero(numbers.missing).tolist() == [len(values)]


@pytest.mark.parametrize("place", range(8))
def test_every_byte_that_is_no_digit_is_refused(place):
    hexadecimal, decimal = string.hexdigits.encode(), string.digits.encode()
    for byte in range(256):
        text = b"0" * place + bytes([byte]) + b"0" * (7 - place)
        field = TextColumn(np.frombuffer(text + bytes(8), np.uint8), np.array([0]), np.array([8]))
        allowed = {
            read_hexadecimal: byte in hexadecimal,
            read_integer: byte in decimal + (b"-" if place == 0 else b""),
        }
        for read, accepts in allowed.items():
            _, bad = read(field)
            assert bad.tolist() == [not accepts]


@pytest.mark.parametrize("text", ["g", "0x1", "1 ", "-1", "1" * 17, "1234567z9", "é", "1\r"])
def test_malformed_hashes_are_marked(text):
    _, bad = read_hexadecimal(column("1", "", text, "2"))
    assert bad.tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    "text", ["-", "--1", "+1", "1.5", "1e3", "a", "9" * 19, "12345678x", "x12345678"]
)
def test_malformed_integers_are_marked(text):
    _, bad = read_integer(column("1", text, ""))
    assert bad.tolist() == [False, True, False]


def test_columns_without_rows():
    for read in (read_hexadecimal, read_integer):
        numbers, bad = read(column())
        assert len(numbers.values) == len(bad) == 0


def test_logarithms_of_the_source_document():
    numbers = parsed(0, 5, -1, -2, -40, 10**18 - 1, missing=[0])
    result, clamped = NUMERIC_TRANSFORMS["log"].apply(numbers)
    expected = [math.log(a) for a in (2, 7, 1, 1, 1, 10**18 + 1)]
    assert result.dtype == np.float16
    assert result.tolist() == np.array(expected, np.float32).astype(np.float16).tolist()
    assert clamped == 2  # -2 and -40; -1 gives the argument 1


def test_logarithm_is_rounded_to_float32_first():
    """Rounding ln(10364) directly to float16 gives 9.24: the float32 in between is a tie."""
    assert NUMERIC_TRANSFORMS["log"].apply(parsed(10362))[0].item() == 9.25


def test_logarithms_of_nvidia():
    result, clamped = NUMERIC_TRANSFORMS["nvidia"].apply(parsed(0, 0, -2, -3, missing=[0]))
    assert result.tolist() == [0, float(np.float16(np.float32(math.log(3)))), 0, 0]
    assert clamped == 1
    with pytest.raises(ValueError, match="'log2'"):
        Transform.from_logs(1, [], "log2")


def test_frequency_limits_of_columns():
    limits = frequency_limits("15,20:3,39:0", 13, 26)
    assert [limits[i] for i in (0, 6, 25)] == [15, 3, 0]
    assert frequency_limits("2:7", 1, 2) == (7, 15)


@pytest.mark.parametrize(
    "text", ["", "a", "15,16", "13:3", "40:3", "20:3,20:4", "1:2:3", "-1", "15,", "0:3"]
)
def test_frequency_limits_that_mean_nothing_are_refused(text):
    with pytest.raises(ValueError, match="frequency limit"):
        frequency_limits(text, 13, 26)


@pytest.fixture
def transform():
    dictionaries = [
        np.array([5, 3, 0xFFFFFFFF], np.uint32),
        np.array([], np.uint32),
        np.arange(2**40, 2**40 + 200, dtype=np.uint64)[::-1],
    ]
    return Transform.from_logs(2, dictionaries, "readme", "2,4:9")


COLUMNS = [
    column("1", "", "-3"),
    column("", "12", "0"),
    column("5", "ffffffff", "4"),
    column("1", "", "2"),
    column(f"{2**40:x}", f"{2**40 + 199:x}", "5"),
]


def test_known_answer(transform):
    result = transform_texts(transform, COLUMNS)
    logs = [[math.log(3), math.log(2)], [math.log(2), math.log(14)], [0, math.log(2)]]
    np.testing.assert_array_equal(result.numerical, np.array(logs, np.float32).astype(np.float16))
    assert [ids.tolist() for ids in result.ids] == [[1, 3, 0], [0, 0, 0], [200, 1, 0]]
    assert [ids.dtype for ids in result.ids] == [np.int8, np.int8, np.int16]
    assert [ids.dtype for ids in result.ids] == [
        layout.id_dtype(n) for n in transform.cardinalities
    ]
    assert result.clamped == 1


def test_number_beyond_the_dictionary_is_unseen(transform):
    """A 64-bit key must not be truncated to the dictionary's 32 bits."""
    assert transform.encode(0, read_hexadecimal(column("100000005", "5"))[0]).tolist() == [0, 1]


def test_first_bad_row_is_reported(transform):
    bad = list(COLUMNS)
    bad[0], bad[3] = column("1", "", "x"), column("1", "y", "z")
    with pytest.raises(RowError, match="row 1, column categorical 1: .* got 'y'") as error:
        transform_texts(transform, bad)
    assert (error.value.column, error.value.row) == ("categorical 1", 1)


def test_reloaded_transform_gives_the_same(transform, tmp_path):
    transform.save(tmp_path / "transform")
    loaded = Transform.load(tmp_path / "transform")
    assert (loaded.num_numerical, loaded.cardinalities) == (2, [4, 1, 201])
    assert loaded.schema == transform.schema
    assert not loaded.dictionaries[0].keys.flags.owndata  # mapped
    expected, result = transform_texts(transform, COLUMNS), transform_texts(loaded, COLUMNS)
    np.testing.assert_array_equal(result.numerical, expected.numerical)
    for ids, wanted in zip(result.ids, expected.ids, strict=True):
        np.testing.assert_array_equal(ids, wanted)


def test_damaged_artifact_is_named(transform, tmp_path):
    with pytest.raises(FileNotFoundError, match="transform.json"):
        Transform.load(tmp_path)
    transform.save(tmp_path)
    np.save(tmp_path / "dictionary_0.npy", np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match=r"dictionary_0.npy: expected 3 numbers"):
        Transform.load(tmp_path)
    header = (tmp_path / "dictionary_0.npy").read_bytes()[:128]
    for content in (b"nothing", header.replace(b"}", b" "), header.replace(b"{", b"=")):
        (tmp_path / "dictionary_0.npy").write_bytes(content + b"1" * 8)
        with pytest.raises(ValueError, match=r"dictionary_0.npy: not an array"):
            Transform.load(tmp_path)
    (tmp_path / "dictionary_0.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"dictionary_0.npy"):
        Transform.load(tmp_path)
    (tmp_path / "transform.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match="not a fitted transform"):
        Transform.load(tmp_path)


def test_flipped_bit_of_a_dictionary_is_seen_before_it_gives_a_wrong_id(transform, tmp_path):
    transform.save(tmp_path)
    path = tmp_path / "dictionary_2.npy"
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)
    loaded = Transform.load(tmp_path)
    loaded.check(0)
    message = r"dictionary_2.npy: expected CRC-32 [0-9a-f]{8}, got [0-9a-f]{8}: damaged"
    with pytest.raises(ValueError, match=message):
        loaded.check(2)
    with pytest.raises(ValueError, match=message):
        transform_texts(loaded, COLUMNS)


def test_a_transform_without_all_checksums_is_refused(transform, tmp_path):
    transform.save(tmp_path)
    facts = json.loads((tmp_path / "transform.json").read_text())
    entry = facts["dictionaries"][0]
    assert entry.pop("crc32") == [f"{zlib.crc32(transform.dictionaries[0].keys):08x}"]
    (tmp_path / "transform.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"transform\.json: not a fitted .*crc32"):
        Transform.load(tmp_path)
    entry["crc32"] = []
    (tmp_path / "transform.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="expected 1 checksums, got"):
        Transform.load(tmp_path)


def test_a_hash_of_zero_is_no_missing_value_where_empty_texts_are():
    field = CategoricalField("c", "hexadecimal", missing_values=("", "ff"))
    texts = pa.array(["00000000", "", "00ff", "1"])
    keys, _ = FieldKeys(field, field.missing_values).of(texts, problems := {})
    assert not problems
    assert keys.missing.tolist() == [False, True, True, False]


def test_threads_that_share_a_transform_get_the_ids_of_their_own_keys():
    """Another thread may replace the remembered keys at any moment."""
    mine, other = np.array([1, 2], np.uint64), np.array([900, 901], np.uint64)

    def function(keys):
        if keys.values is mine:
            cached(Coded(other, np.array([0, 1])))
        return keys.values

    cached = CachedByKey(function)
    assert cached(Coded(mine, np.array([1, 0, -1]))).tolist() == [2, 1, 0]
