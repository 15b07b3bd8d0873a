"""The format of text files is drafted from their beginnings, and what a user names counts."""

import pytest

from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.sniff import sniff

CASES = {
    "plain": ("a,b\n1,2.5\n3,x\n", ".csv", {}),
    "empty": ("", ".csv", {}),
    "tabs with stray quotes": ('q\ty\nb\t1\n"how to\t0\ntv 55"\t1\n', ".tsv", {"quote": "none"}),
    "tabs in .txt": ("q\ty\nb\t1\nc\t0\n", ".txt", {"delimiter": "\t", "quote": "none"}),
    "quoted tabs": ('"q"\t"y"\n"a\tb"\t"1"\n', ".tsv", {}),
    "semicolons": ("a;b\n1;x\n2;y, z\n", ".csv", {"delimiter": ";"}),
    "Hive's cells": ("a\x01b\n1\x01x\n", ".csv", {"delimiter": "\x01"}),
    "a bad line": ("a;b\n" + "1;x\n" * 30 + "1;2;3\n", ".csv", {"delimiter": ";"}),
    "bars": ("a|b\n1|x\n", ".csv", {"delimiter": "|"}),
    "one column": ("a\nx;y\nz\n", ".csv", {}),
    "decimal commas": ("a;b\n1,5;x\n12,25;y\n", ".csv", {"delimiter": ";", "decimal": ","}),
    "european": (
        "a;b\n1.234,5;x\n7,0;y\n",
        ".csv",
        {"delimiter": ";", "decimal": ",", "thousands": "."},
    ),
    "american": ('a,b\n"1,234.50",x\n"7",y\n', ".csv", {"thousands": ","}),
    "swiss": ("a,b\n1'234'567,x\n7,y\n", ".csv", {"thousands": "'"}),
    "groups or decimals": ('a,b\n"1,234",x\n"2,500",y\n', ".csv", {}),
    "commas and points": ("a;b\n1,5;1.5\n2,5;2.5\n", ".csv", {"delimiter": ";"}),
    "Spark": ('a,b\n"say \\"hi\\", you",1\n"x",0\n', ".csv", {"escape": "\\"}),
    "Windows folders": ('a,b\n"C:\\",1\n"D:\\",0\n', ".csv", {}),
    "stray quote": ('a,b\n"x,1\ny,0\nz,1\n', ".csv", {"quote": "none"}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_beginning_shows(tmp_path, name):
    content, suffix, expected = CASES[name]
    (tmp_path / f"rows{suffix}").write_text(content)
    text, line = sniff(find_tables([tmp_path]), TextFormat())
    assert text == TextFormat(**expected)
    assert (line is None) == (not expected)
    if "delimiter" in expected:
        assert line.startswith(f"delimiter {expected['delimiter']!r}")


@pytest.mark.parametrize(
    ("encoding", "text", "expected"),
    [
        ("utf-8", "Zürich", None),
        ("utf-8-sig", "Zürich", None),
        ("utf-16", "Zürich", "utf-16"),
        ("latin-1", "Zürich", "latin-1"),
        ("cp1252", "10 € “quoted”", "cp1252"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_encodings(tmp_path, encoding, text, expected, suffix):
    rows = f"y,a\n1,{text}\n" if suffix == ".csv" else f'{{"y": 1, "a": "{text}"}}\n'
    (tmp_path / f"rows{suffix}").write_bytes(rows.encode(encoding))
    found, line = sniff(find_tables([tmp_path]), TextFormat())
    assert found.encoding == expected
    assert ("in doubt" in (line or "")) == (expected in ("latin-1", "cp1252"))


@pytest.mark.parametrize("first", ["# of Monday", "sep=;", "sales; 2026"])
def test_a_line_before_the_header_is_named(tmp_path, first):
    (tmp_path / "rows.csv").write_text(f"{first}\na;b;c\n1;x;2\n2;y;3\n")
    with pytest.raises(ValueError, match=f"line 1: expected the names .* got '{first}'; remove"):
        sniff(find_tables([tmp_path]), TextFormat())


def test_what_a_user_names_counts(tmp_path):
    (tmp_path / "rows.csv").write_text("a;b\n1,5;x\n")
    given = TextFormat(delimiter=";", decimal=".", quote="'")
    assert sniff(find_tables([tmp_path]), given) == (given, None)
    (tmp_path / "rows.csv").write_text("1 3:0.5 7:1\n0 2:1\n")
    with pytest.raises(ValueError, match="rows of labels and INDEX:VALUE, as of libsvm"):
        sniff(find_tables([tmp_path]), TextFormat())
