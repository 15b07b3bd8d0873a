import pytest

from preproc import raw_log
from preproc.raw_log import BadLineError, LogFormat, count_rows, read_blocks, split_days

SHAPE = LogFormat(1, 1)
LINES = [f"{i % 2}\t{i}\t{i * i:x}\n" for i in range(300)]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "day_0"
    path.write_text("".join(LINES))
    return path


def read(split):
    rows = []
    for block in read_blocks(split, SHAPE):
        assert block.first_row == len(rows)
        integers, hashes = block.columns
        rows += [
            f"{int(label)}\t{integers.text(row)}\t{hashes.text(row)}\n"
            for row, label in enumerate(block.labels)
        ]
    return rows


def read_all(splits):
    return [line for split in splits for line in read(split)]


@pytest.mark.parametrize("block_bytes", [5, 64, 1 << 20])
@pytest.mark.parametrize("split_bytes", [3, 100, 1 << 20])
def test_splits_and_blocks_give_each_line_once(log, monkeypatch, split_bytes, block_bytes):
    monkeypatch.setattr(raw_log, "_BLOCK_BYTES", block_bytes)
    splits = split_days([log], split_bytes)
    assert read_all(splits) == LINES
    assert [count_rows(split) for split in splits] == [len(read(split)) for split in splits]


@pytest.mark.parametrize("row", [0, 1, 150, 299])
def test_line_number_is_that_of_the_file(log, monkeypatch, row):
    monkeypatch.setattr(raw_log, "_BLOCK_BYTES", 50)
    log.write_text("".join([*LINES[:row], "x\t1\t1\n", *LINES[row + 1 :]]))
    with pytest.raises(BadLineError, match=rf"day_0: line {row + 1}, column 0 \(label\)"):
        read_all(split_days([log], 333))


def test_line_without_end_is_refused(log, monkeypatch):
    monkeypatch.setattr(raw_log, "_LONGEST_LINE", 1000)
    with open(log, "a") as file:
        file.write("1\t2\t" + "a" * 5000)
    with pytest.raises(BadLineError, match="line 301: longer than 1000 bytes"):
        read_all(split_days([log], 2000))


def test_file_that_shrinks_is_noticed(log):
    (split,) = split_days([log], 1 << 20)
    log.write_text("".join(LINES[:100]))
    with pytest.raises(BadLineError, match="became shorter"):
        count_rows(split)
