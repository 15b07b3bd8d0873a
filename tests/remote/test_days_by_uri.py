"""Days at a URI: their rows are learned, and datasets there are extended without their rows."""

import daily_steps

from dlrm.remote.objects import open_store


def test_days_at_a_uri_are_fetched_and_learned(store_uri, tmp_path, capsys):
    store, uri = open_store(store_uri), store_uri.below("raw")
    for name in ("day_10.csv", "day_2.csv", "_SUCCESS_1", "notes.txt", "part/notes.txt"):
        store.write(f"{uri.folder}{name}", b"rows")
    assert daily_steps.daily(tmp_path, f"--days={uri}") == 0
    assert daily_steps.learned(tmp_path) == {"day_2": None, "day_10": 1}
    assert daily_steps.known(tmp_path / "chain/days/day_10/run") == ["day_2", "day_10"]
    store.write(f"{uri.folder}day_11.csv", b"bad")
    assert daily_steps.daily(tmp_path, f"--days={uri}") == 1
    assert f"{uri}/day_11.csv: dlrm prepare: exit code 1" in capsys.readouterr().err
