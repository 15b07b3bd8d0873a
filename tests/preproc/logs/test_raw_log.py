import errno
import gzip
from io import BytesIO

import pytest

from dlrm.data.sources import native
from dlrm.data.sources.log_lines import LogFormat
from dlrm.data.sources.row_error import RowError
from dlrm.preproc.logs import raw_log
from dlrm.preproc.logs.options import LogOptions
from dlrm.preproc.logs.raw_log import (
    LogSource,
    Split,
    count_lines,
    find_days,
    split_days as split_whole_days,
    unpack,
)

OPTIONS = LogOptions(log_format=LogFormat(1, 1))
SOURCE = LogSource(OPTIONS.schema, OPTIONS.log_format)
LINES = [f"{i % 2}\t{i}\t{i * i:x}\n" for i in range(300)]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "day_0"
    path.write_text("".join(LINES))
    return path


@pytest.fixture(params=["native", "numpy"], autouse=True)
def parser(request, monkeypatch):
    """Each parser."""
    if request.param == "numpy":
        monkeypatch.setattr(native, "host", None)
    elif native.host is None:
        pytest.skip("the native parser is not built")


def split_days(paths, split_bytes):
    days = [Split(str(p), str(p), 0, 0, p.stat().st_size, first_row=0) for p in paths]
    return split_whole_days(days, split_bytes)


def shown(numbers, row, text):
    return "" if numbers.missing[row] else format(numbers.values[row], text)


def read(split, rejected=None):
    rows = []
    for some in SOURCE.read(split, rejected):
        assert some.numbers.tolist() == list(range(len(rows), len(rows) + len(some.labels)))
        (integers,), (hashes,) = some.rows.numerical, some.rows.categorical
        rows += [
            f"{int(label)}\t{shown(integers, row, 'd')}\t{shown(hashes, row, 'x')}\n"
            for row, label in enumerate(some.labels)
        ]
    return rows


def read_all(splits):
    return [line for split in splits for line in read(split)]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("block_bytes", [5, 64, 1 << 20])
@pytest.mark.parametrize("split_bytes", [3, 100, 1 << 20])
def test_splits_and_blocks_give_each_line_once(
    log, monkeypatch, split_bytes, block_bytes, line_end
):
    log.write_text("".join(LINES), newline=line_end)
    monkeypatch.setattr(raw_log, "_BLOCK_BYTES", block_bytes)
    splits = split_days([log], split_bytes)
    assert read_all(splits) == LINES
    assert [count_lines(split) for split in splits] == [len(read(split)) for split in splits]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_short_lines_of_windows_have_no_return_in_them(log, line_end):
    end = "\r" if line_end == "\r" else ""  # only where the last newline is missing
    text = f"1\r\n0\t\r\n1\t5\r\n0\t6\t\n1\t\tab{end or line_end}"
    log.write_bytes(text.encode())
    (split,) = split_days([log], 1 << 20)
    assert read(split) == ["1\t\t\n", "0\t\t\n", "1\t5\t\n", "0\t6\t\n", "1\t\tab\n"]


@pytest.mark.parametrize("text", ["\r\n", "1\t2\t3\r\n\r\n", "\n"])
def test_an_empty_line_is_refused(log, text):
    log.write_bytes(text.encode())
    with pytest.raises(ValueError, match=f"line {text.count('1') + 1}: .*got an empty line"):
        read_all(split_days([log], 1 << 20))


@pytest.mark.parametrize("row", [0, 1, 150, 299])
def test_line_number_is_that_of_the_file(log, monkeypatch, row):
    monkeypatch.setattr(raw_log, "_BLOCK_BYTES", 50)
    log.write_text("".join([*LINES[:row], "x\t1\t1\n", *LINES[row + 1 :]]))
    with pytest.raises(RowError, match=rf"day_0, line {row + 1}, column 0 \(label\)"):
        read_all(split_days([log], 333))


def test_line_without_end_is_refused(log, monkeypatch):
    monkeypatch.setattr(raw_log, "LONGEST_LINE", 1000)
    with open(log, "a") as file:
        file.write("1\t2\t" + "a" * 5000)
    with pytest.raises(ValueError, match="line 301: longer than 1000 bytes"):
        read_all(split_days([log], 2000))


def test_file_that_shrinks_is_noticed(log):
    (split,) = split_days([log], 1 << 20)
    log.write_text("".join(LINES[:100]))
    with pytest.raises(ValueError, match="became shorter"):
        read(split)


def test_lines_that_cannot_be_read_can_be_left_out(log, monkeypatch):
    monkeypatch.setattr(raw_log, "_BLOCK_BYTES", 50)
    bad = {0: "x\t1\t1\n", 7: "\n", 8: "0\t1\t2\t3\r\n", 299: "1\t-\t1\n"}
    log.write_text("".join(bad.get(i, line) for i, line in enumerate(LINES)), newline="")
    (split,) = split_days([log], 1 << 20)
    rejected = []
    assert read(split, rejected) == [line for i, line in enumerate(LINES) if i not in bad]
    assert {r.line: r.text for r in rejected} == {i: t.rstrip() for i, t in bad.items()}
    assert rejected[2].reason == "expected up to 3 fields separated by tabs, got 4"
    assert rejected[3].reason.startswith("column 1 (numerical 0): expected an integer")


@pytest.mark.parametrize("fails", [False, True])
def test_of_two_attempts_to_unpack_a_day_none_spoils_the_other(tmp_path, monkeypatch, fails):
    """The second begins and ends while the first is under way, which may then be ended."""
    text = "".join(LINES).encode() * 10
    source, target = tmp_path / "day_0.gz", tmp_path / "day_0"
    source.write_bytes(gzip.compress(text))
    opened = raw_log.open_bytes

    class First(BytesIO):
        def read(self, size):
            if self.tell() > 0 and not target.exists():
                monkeypatch.setattr(raw_log, "open_bytes", opened)
                assert unpack((str(source), str(target))) == len(text)
                if fails:
                    raise OSError(errno.EIO, "ended")
            return super().read(size)

    monkeypatch.setattr(raw_log, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(raw_log, "open_bytes", lambda *_: First(text))
    if fails:
        with pytest.raises(OSError, match="day_0"):
            unpack((str(source), str(target)))
    else:
        assert unpack((str(source), str(target))) == len(text)
    assert target.read_bytes() == text


@pytest.mark.parametrize("name", ["day_02.tar.gz", "day_7.parquet", "day_2.bz2"])
def test_a_day_that_is_there_in_another_form_only_is_refused(tmp_path, name):
    for day in range(2):
        (tmp_path / f"day_{day}").write_text("1\t2\t3\n")
    for other in ("day_x.gz", "notes.txt"):
        (tmp_path / other).touch()
    assert [path.name for path in find_days(tmp_path)] == ["day_0", "day_1"]
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"{name}: expected day_., plain or as .gz or .zst"):
        find_days(tmp_path)
