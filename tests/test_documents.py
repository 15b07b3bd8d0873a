"""JSON and YAML that is too deep, too large or invalid is refused quickly in one line."""

import os
import re
import tracemalloc

import pytest

from dlrm.documents import MAX_DEPTH, MAX_YAML_BYTES, brief, one_line, read_json, read_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "line 7, column .*aliases expanded"),
        ("a: &a [*a]", "line 1, column 4: .*aliases expanded"),
        ("[" * 30000, "at most 64 deep"),
        ("a: !!timestamp x", "invalid YAML"),
        ("a: 2020-13-45", "invalid YAML: 'month must be in"),
        ("a: 0b" + "1" * 100_000, "column 4: .*an integer of at most 300 characters"),
        ("a: '", "line 1, column 5: invalid YAML"),
        ("x: !!python/object:os.system {}", "could not determine a constructor"),
        ("- 1", r"expected a map, got \[1\]"),
        ("a: 1\n---\nb: 2", "another document"),
    ],
)
def test_yaml_is_refused_in_a_line(tmp_path, text, message):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{message}") as caught:
        read_yaml(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_aliases_and_levels_within_the_limits_are_read(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("a: &a [1, 2]\nb: [*a, *a]\n<<: {c: 3}\n")
    assert read_yaml(path) == {"a": [1, 2], "b": [[1, 2], [1, 2]], "c": 3}
    path.write_text("a: " + "[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2))
    read_yaml(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "at most 64 deep"),
        ('{"a": ' + "9" * 5000 + "}", "no JSON: Exceeds the limit"),
        ('{\n"a": }', "line 2, column 6: no JSON"),
        ("[]", r"expected a map, got \[\]"),
        ("\udcff", "byte 0: .* not UTF-8"),
    ],
)
def test_json_is_refused_in_a_line(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{message}"):
        read_json(path)


def test_a_file_that_is_too_large_or_no_file_is_not_read(tmp_path):
    path = tmp_path / "spec.yaml"
    with open(path, "wb") as file:
        file.truncate(MAX_YAML_BYTES + 1)
    with pytest.raises(ValueError, match=f"at most {MAX_YAML_BYTES} bytes, got"):
        read_yaml(path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="fifo: expected a regular file"):
        read_json(tmp_path / "fifo")


def test_what_a_message_quotes_is_short():
    nested = [["x" * 10**6] * 1000] * 1000
    for _ in range(3):
        nested = [nested] * 9
    assert len(brief(nested)) < 1000


def test_control_characters_do_not_split_a_message():
    assert one_line("a\nerror: b\r\x1b[2J: \udcff") == "a\\nerror: b\\r\\x1b[2J: \\udcff"
    assert one_line("differences:\n  one\n  two") == "differences:\n  one\n  two"


def test_a_small_file_takes_little_memory_whatever_the_limit(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    tracemalloc.start()
    read_json(tmp_path / "a.json")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: 1\nb: {c: 1, c: 2}\n")
    with pytest.raises(
        ValueError, match=r"a\.yaml: line 2, column 11: invalid YAML: 'c' is a duplicate key"
    ):
        read_yaml(path)
    path.write_text("a: &x {b: 1}\nc: {<<: *x, d: 2}\n")
    assert read_yaml(path)["c"] == {"b": 1, "d": 2}
