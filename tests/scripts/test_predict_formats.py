"""Scoring reads text as the training data was read, and has one score for each row."""

import forked
import numpy as np
import pyarrow as pa
import pytest

import dlrm

ROWS = 300
TINY = {"epochs": 1, "batch_size": 64, "embedding_dim": 4, "bottom_mlp_sizes": (4,)}
TINY |= {"top_mlp_sizes": (4, 1), "lr": 0.1}


def lines(header="click\tquery\tprice\n"):
    """Returns a log of searches; two texts have a quote."""
    rows = [f"{i % 3 == 0:d}\tword{i % 7}\t{i % 11},5\n" for i in range(ROWS)]
    rows[100], rows[160] = '1\t"how to\t1,5\n', '0\ttv 55"\t2,5\n'
    return header + "".join(rows)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Yields the folder of a log in Latin-1 and a model trained on it by its schema's format."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "log.tsv").write_text(lines(), encoding="latin-1")
    (folder / "schema.yaml").write_text(
        "label: click\nnumerical: [price]\ncategorical: [query]\n"
        "format: {quote: none, encoding: latin-1, decimal: ','}\n"
    )
    given = [f"--schema={folder / 'schema.yaml'}", f"--input={folder / 'log.tsv'}"]
    forked.succeed("dlrm.scripts.prepare", *given, f"--output={folder / 'dataset'}", "--cores=1")
    dlrm.fit(folder / "dataset", save_checkpoint_path=folder / "run", **TINY)
    return folder


def predict(trained, source, *flags):
    output = trained / "scores.npy"
    output.unlink(missing_ok=True)
    given = [f"--checkpoint={trained / 'run'}", f"--input={source}", f"--output={output}"]
    done = forked.call("dlrm.scripts.predict", *given, *flags)
    return done, np.load(output) if output.exists() else None


def test_every_row_has_a_score_without_flags(trained):
    done, scores = predict(trained, trained / "log.tsv")
    assert done.returncode == 0, done.stderr
    assert len(scores) == ROWS
    assert "warning" not in done.stdout
    assert "quoted cells" not in done.stdout


def test_another_format_takes_flags(trained, tmp_path):
    _, expected = predict(trained, trained / "log.tsv")
    plain = lines().replace("\t", "|").replace(",", ".").replace('"', "\u201c")
    (tmp_path / "log.txt").write_text(plain, encoding="utf-16")
    flags = ["--delimiter=|", "--decimal=.", "--encoding=utf-16"]
    done, scores = predict(trained, tmp_path / "log.txt", *flags)
    assert done.returncode == 0, done.stderr
    same = np.ones(ROWS, bool)
    same[[100, 160]] = False
    assert np.array_equal(scores[same], expected[same])
    done, scores = predict(trained, tmp_path / "log.txt", *flags[:2])
    assert (done.returncode, scores) == (1, None)
    assert "log.txt: expected latin-1, got the mark of UTF-16; try --encoding utf-16" in done.stderr


def test_quotes_that_join_lines_are_said(trained):
    done, scores = predict(trained, trained / "log.tsv", '--quote="')
    assert len(scores) == ROWS - 60
    assert "quoted cells extend 1 row over 61 lines, the first at line 102" in done.stdout


def test_keys_that_rows_of_json_do_not_have_are_missing_values(trained, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"price": 1.5}\n' * 1200 + '{"query": "word1"}\n')
    done, scores = predict(trained, tmp_path / "a.jsonl")
    assert done.returncode == 0, done.stderr
    assert len(scores) == 1201
    (tmp_path / "a.jsonl").write_text('{"price": 1.5}\n{"pirce": 1.5}\n')
    done, scores = predict(trained, tmp_path / "a.jsonl")
    assert (done.returncode, scores) == (1, None)
    assert "a.jsonl: no column 'query' in any row" in done.stderr
    for text, problem in (("[{}]", "got an array"), ("{'query': 1}\n", "line 1, no JSON")):
        (tmp_path / "a.jsonl").write_text(text)
        done, scores = predict(trained, tmp_path / "a.jsonl")
        assert (done.returncode, scores) == (1, None)
        assert problem in done.stderr


def test_values_that_training_never_saw_are_warned_of(trained, tmp_path):
    (tmp_path / "log.tsv").write_text("click\tquery\tprice\n1\tnew\t1,5\n0\tother\t2,5\n")
    done, _ = predict(trained, tmp_path / "log.tsv")
    assert "warning: no value of query occurred in the training data" in done.stdout
    model = dlrm.load(trained / "run")
    frame = pa.table({"click": [0, 1], "query": ["a", "b"], "price": [1.5, 2.5]})
    for call in (model.predict, model.logits, model.evaluate):
        with pytest.warns(UserWarning, match="no value of query occurred") as warned:
            call(frame)
        assert call == model.logits or warned[0].filename == __file__
