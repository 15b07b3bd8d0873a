"""The record of days: which are new, which are refused, and what a damaged record says."""

import json
import os
import shutil
import time

import pytest

from dlrm.manifest import sealed_json
from dlrm.scripts.daily.chain import RECORD, LearnedDay, digest_of, open_chain
from dlrm.scripts.daily.days import find_days

SCHEMA = "a" * 64


def rows_of(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"label,x\n1,{name}\n")
    return find_days(folder, print)


def learn(chain, day, **others):
    """Records a day as `dlrm daily` does after training."""
    for directory in (chain.dataset_of(day.name), chain.path_of(day.name) / "run/step-1"):
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text(f"{day.name} {directory.name}")
    parent = chain.days[-1].digest if chain.days else ""
    sums = [
        digest_of(chain.dataset_of(day.name)),
        digest_of(chain.checkpoint_of(day.name)),
    ]
    chain.add(LearnedDay(day.name, day.files, day.digest(), parent, *sums, 10, 2, **others))


@pytest.fixture
def chain_of_two(tmp_path):
    """A chain that has learned days 9 and 10."""
    days = rows_of(tmp_path / "raw", "day_9.csv", "day_10.csv")
    with open_chain(tmp_path / "chain", SCHEMA) as chain:
        for day in days:
            learn(chain, day)
    return tmp_path / "chain"


def test_days_are_in_the_order_of_their_numbers(tmp_path, capsys):
    names = ("day_10.csv.gz", "day_2.csv", "day_1/part-0.parquet", "README.md", ".day_3.csv")
    days = rows_of(tmp_path / "raw", *names, "day_4.csv.part", "day_5.csv~")
    assert [day.name for day in days] == ["day_1", "day_2", "day_10"]
    assert "no days: README.md, day_4.csv.part, day_5.csv~" in capsys.readouterr().out


def test_days_with_dates_are_in_the_order_of_these(tmp_path):
    days = rows_of(
        tmp_path / "raw", "2026-11-21T01.csv", "day=2026-11-20/a.csv", "2026-11-21_00.csv"
    )
    assert [day.name for day in days] == ["day=2026-11-20", "2026-11-21_00", "2026-11-21T01"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("day_1.csv", "day_1.parquet"), "expected one entry for a day"),
        (("tag 1,a.csv",), "expected the name of a day without a comma"),
        (("2026-11-20.csv", "copy of 2026-11-20.csv"), "expected one entry for a day"),
        (("README.md",), "no entry with a number"),
        (("day_1/.hidden",), "expected files in the folder of a day"),
    ],
)
def test_folders_without_clear_days_are_refused(tmp_path, names, expected):
    with pytest.raises((ValueError, FileNotFoundError), match=expected):
        rows_of(tmp_path / "raw", *names)


def test_a_chain_goes_on_where_it_stopped(tmp_path, chain_of_two):
    days = rows_of(tmp_path / "raw", "day_11.csv", "day_100.csv")
    with open_chain(chain_of_two, SCHEMA) as chain:
        assert [day.name for day in chain.days] == ["day_9", "day_10"]
        assert [day.name for day in chain.new_days(days, ())] == ["day_11", "day_100"]
        assert [day.name for day in chain.new_days(days, ["day_11"])] == ["day_100"]


def test_a_day_that_is_touched_but_the_same_is_no_change(tmp_path, chain_of_two):
    os.utime(tmp_path / "raw/day_9.csv", ns=(1, 1))
    with open_chain(chain_of_two, SCHEMA) as chain:
        assert chain.new_days(find_days(tmp_path / "raw", print), ()) == []


def test_learned_days_may_be_deleted(tmp_path, chain_of_two):
    (tmp_path / "raw/day_9.csv").unlink()
    with open_chain(chain_of_two, SCHEMA) as chain:
        assert chain.new_days(find_days(tmp_path / "raw", print), ()) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda raw: rows_of(raw, "day_3.csv"), r"day_3.csv: is before day_10.*--skip day_3"),
        (
            lambda raw: (raw / "day_9.csv").write_text("label,x\n0,other\n"),
            "day_9.csv: has changed since it was learned",
        ),
        (  # two days swapped
            lambda raw: [
                (raw / "day_9.csv").rename(raw / "t"),
                (raw / "day_10.csv").rename(raw / "day_9.csv"),
                (raw / "t").rename(raw / "day_10.csv"),
            ],
            "day_9.csv: has changed since it was learned, and has the content of day_10 now",
        ),
    ],
)
def test_days_out_of_order_and_changed_days_are_refused(tmp_path, chain_of_two, change, expected):
    change(tmp_path / "raw")
    with (
        open_chain(chain_of_two, SCHEMA) as chain,
        pytest.raises(ValueError, match=expected),
    ):
        chain.new_days(find_days(tmp_path / "raw", print), ())


def test_the_same_rows_under_another_name_are_refused(tmp_path, chain_of_two):
    (tmp_path / "raw/day_11.csv").write_bytes((tmp_path / "raw/day_9.csv").read_bytes())
    with open_chain(chain_of_two, SCHEMA) as chain:
        (day,) = chain.new_days(find_days(tmp_path / "raw", print), ())
        with pytest.raises(ValueError, match="day_11.csv: has the same content as day_9"):
            chain.check_new(day, day.digest())


def damaged(folder, change):
    record = json.loads((folder / RECORD).read_text())
    change(record)
    (folder / RECORD).write_text(sealed_json(record))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda folder: (folder / RECORD).write_text(
                (folder / RECORD).read_text().replace('"rows": 10', '"rows": 11', 1)
            ),
            "daily.json: expected CRC-32",
        ),
        (
            lambda folder: damaged(folder, lambda record: record["days"].pop(0)),
            "day day_10 does not follow the day before it",
        ),
        (
            lambda folder: os.utime(folder / RECORD, (time.time() + 7200,) * 2),
            "whose clock has gone back",
        ),
        (
            lambda folder: (folder / "days/day_10/dataset/manifest.json").write_text("another"),
            "expected the dataset of day day_10 .*, got one of another run",
        ),
        (
            lambda folder: (folder / "days/day_10/run/step-1/manifest.json").unlink(),
            "expected the checkpoint of day day_10 .*, got none",
        ),
    ],
)
def test_damaged_chains_are_refused(chain_of_two, change, expected):
    change(chain_of_two)
    with pytest.raises(ValueError, match=expected), open_chain(chain_of_two, SCHEMA):
        pass


def test_a_chain_has_one_schema(chain_of_two):
    def difference(dataset):
        assert dataset == chain_of_two / "days/day_10/dataset"
        return found

    found = "numerical n: nothing in the transform and ..."
    with (
        pytest.raises(ValueError, match="--schema: expected the schema .*, got another one: numer"),
        open_chain(chain_of_two, "b" * 64, difference=difference),
    ):
        pass
    found = None  # such as another comment
    with open_chain(chain_of_two, "b" * 64, difference=difference) as chain:
        assert [day.name for day in chain.days] == ["day_9", "day_10"]


def test_the_last_day_can_be_removed(chain_of_two):
    with open_chain(chain_of_two, SCHEMA) as chain:
        with pytest.raises(ValueError, match="--undo day_9: expected the last day .* day_10"):
            chain.remove_last("day_9")
        chain.remove_last("day_10")
    assert [path.name for path in (chain_of_two / "days").iterdir()] == ["day_9"]
    with open_chain(chain_of_two, SCHEMA) as chain:
        assert [day.name for day in chain.days] == ["day_9"]
        with pytest.raises(ValueError, match="--undo day_9: it is the only day"):
            chain.remove_last("day_9")


def test_a_day_whose_checkpoint_is_gone_can_be_removed(tmp_path, chain_of_two):
    (chain_of_two / "days/day_10/run/step-1/manifest.json").unlink()
    with open_chain(chain_of_two, SCHEMA, last_is_whole=False) as chain:
        chain.remove_last("day_10")
    with open_chain(chain_of_two, SCHEMA) as chain:
        learn(chain, *rows_of(tmp_path / "more", "day_11.csv"))
        (chain_of_two / "days/day_9/dataset/manifest.json").unlink()
        with pytest.raises(ValueError, match="expected the dataset of the day before it"):
            chain.remove_last("day_11")


def test_a_removal_that_is_killed_leaves_nothing_to_resume(chain_of_two, monkeypatch):
    begun = chain_of_two / "days/day_10/begun.json"
    begun.write_text("{}")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with open_chain(chain_of_two, SCHEMA) as chain:
        chain.remove_last("day_10")
    assert not begun.exists()


def test_one_process_at_a_time_changes_a_chain(chain_of_two):
    with (
        open_chain(chain_of_two, SCHEMA),
        pytest.raises(FileExistsError, match="another dlrm daily"),
        open_chain(chain_of_two, SCHEMA),
    ):
        pass


def test_other_directories_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("")
    with (
        pytest.raises(FileExistsError, match=r"has no daily.json"),
        open_chain(tmp_path / "mine", SCHEMA),
    ):
        pass
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
