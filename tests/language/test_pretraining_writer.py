import filecmp
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from text_testing import assert_same

from dlrm.language import writer
from dlrm.language.loader import NO_TOKEN
from dlrm.language.pretraining import PretrainingDataset
from dlrm.language.writer import (
    PretrainingTextConfig,
    read_sentences,
    text_files,
    write_dataset,
)

pytest.importorskip("h5py", reason="no h5py, which reads HDF5")
pytest.importorskip("tokenizers", reason="no tokenizers, which cuts texts into WordPieces")

WORDS = [f"word{chr(97 + i)}{chr(97 + j)}" for i in range(10) for j in range(10)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, *WORDS, ".", "!"]) + "\n")
    return path


@pytest.fixture(scope="module")
def documents() -> list[list[str]]:
    random = np.random.default_rng(0)
    return [
        [
            " ".join(random.choice(WORDS, random.integers(1, 9)))
            for _ in range(random.integers(1, 20))
        ]
        for _ in range(60)
    ]


@pytest.fixture(scope="module")
def text(tmp_path_factory, documents) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join("\n".join(document) for document in documents))
    return path


def config(vocabulary, **options) -> PretrainingTextConfig:
    sizes = {"max_seq_length": 32, "max_predictions_per_seq": 5, "dupe_factor": 2}
    return PretrainingTextConfig(vocab_file=str(vocabulary), **{**sizes, **options})


def files_of(directory: Path) -> list[str]:
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*"))


def test_text_becomes_a_dataset(vocabulary, text, documents, tmp_path):
    summary = write_dataset(config(vocabulary), [text], tmp_path / "out")
    dataset = PretrainingDataset(tmp_path / "out", max_seq_length=32, verify_data="always")
    assert files_of(tmp_path / "out") == ["manifest.json", "part_00000.hdf5"]
    sentences = [sentence for document in documents for sentence in document]
    words = sum(len(sentence.split()) for sentence in sentences)
    assert summary[:4] == (1, 60, len(sentences), words)
    batch = dataset.read(np.arange(dataset.num_samples))
    assert (summary.rows, summary.shards) == (dataset.num_samples, 1)
    assert summary.random_rows == batch.labels.sum()
    assert summary.row_tokens == batch.lengths.sum()
    assert summary.masked_tokens == (batch.masked_ids != NO_TOKEN).sum()
    assert (dataset.vocab_size, dataset.max_predictions) == (107, 5)


def test_any_number_of_processes_writes_the_same_bytes(vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_TOKENS", 1 << 19)  # in this process, which divides the rows
    for number in range(30):  # 3.2 MB and 450,000 tokens: several tasks of each kind
        lines = [f"{WORDS[number]} {WORDS[50 + document]} " * 25 for document in range(30)]
        (tmp_path / f"{number}.txt").write_text("\n".join(f"{line}\n" * 10 for line in lines))
    outputs = [tmp_path / str(processes) for processes in (1, 3)]
    for processes, output in zip((1, 3), outputs, strict=True):
        sizes = {"max_seq_length": 128, "dupe_factor": 3}
        files = sorted(tmp_path.glob("*.txt"))
        summary = write_dataset(config(vocabulary, processes=processes, **sizes), files, output)
    assert summary.documents == 900
    assert summary.rows > 10_000
    assert len(files_of(outputs[0])) > 3
    for name in files_of(outputs[0]):
        assert filecmp.cmp(outputs[0] / name, outputs[1] / name, shallow=False), name
    batch = PretrainingDataset(outputs[0]).read(np.arange(summary.rows))
    ids, row = batch.ids.numpy(), np.arange(summary.rows)[:, None]
    ids[row, batch.masked_positions] = np.where(
        batch.masked_ids == NO_TOKEN, ids[row, batch.masked_positions], batch.masked_ids
    )
    words = np.sort(np.where(ids < len(SPECIAL), 0, ids), axis=1)
    distinct = (np.diff(words, axis=1) > 0).sum(axis=1)  # two words identify the document
    assert (distinct[batch.labels == 0] == 2).all()
    assert (distinct[batch.labels == 1] > 2).all()


def test_rows_depend_on_the_seed_and_repetitions_differ(vocabulary, text, tmp_path):
    def rows(**options):
        write_dataset(config(vocabulary, **options), [text], tmp_path / "out")
        dataset = PretrainingDataset(tmp_path / "out")
        return dataset.read(np.arange(dataset.num_samples))

    first, again, other = rows(), rows(), rows(seed=1)
    assert_same(first, again)
    assert first.ids.shape != other.ids.shape or (first.ids != other.ids).any()
    assert len({tuple(row) for row in first.ids.tolist()}) > 0.95 * len(first.ids)
    assert len(rows(dupe_factor=6).ids) > 2.5 * len(first.ids)


def test_rows_are_in_a_random_order(vocabulary, tmp_path):
    lines = [f"{WORDS[i]} {WORDS[i]}" for i in range(100)]  # each row identifies its document
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(lines))
    write_dataset(config(vocabulary, dupe_factor=3), [path], tmp_path / "out")
    ids = PretrainingDataset(tmp_path / "out").read(np.arange(300)).ids[:, 1]
    assert 0.4 < (ids.diff() > 0).double().mean() < 0.6


def test_files_may_be_compressed_empty_or_in_folders(vocabulary, documents, tmp_path):
    folder = tmp_path / "texts"
    (folder / "AA").mkdir(parents=True)
    (folder / ".hidden").write_text("wordaa wordaa")
    (folder / "empty").write_text("")
    (folder / "blank").write_text("\n \n\r\n")
    content = "\n".join(documents[0]).encode()
    (folder / "AA" / "wiki_00").write_bytes(b"\xef\xbb\xbf" + content)  # with a byte-order mark
    (folder / "AA" / "wiki_01.gz").write_bytes(gzip.compress(b"\n\n" + content + b"\n\n\n"))
    files = text_files([folder])
    assert [f.name for f in files] == ["wiki_00", "wiki_01.gz", "blank", "empty"]
    for file in files[:2]:
        assert [text for text in read_sentences(file) if text] == documents[0]
    summary = write_dataset(config(vocabulary), [folder], tmp_path / "out")
    assert summary[:3] == (4, 2, 2 * len(documents[0]))


def test_sentences_may_be_alone_or_longer_than_a_row(vocabulary, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join([" ".join(WORDS), "wordaa", "\x00", " ".join(WORDS[::-1])]))
    summary = write_dataset(config(vocabulary), [path], tmp_path / "out")
    assert summary.documents == 3  # a sentence of control characters has no tokens
    batch = PretrainingDataset(tmp_path / "out").read(np.arange(summary.rows))
    assert batch.labels.all()
    assert batch.lengths.min() >= 5
    assert batch.lengths.max() == 32


def test_wikitext_is_cut_into_documents_and_sentences(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text(
        " \n = Robert <unk> = \n \n Robert is an actor . He was born in 1 @,@ 969 . \n"
        " He said : what ? \n \n = = Career = = \n \n A well @-@ known 2 @.@ 5 . \n"
        " = Next = \n = 2 \n"
    )
    assert [*read_sentences(path, "wikitext")] == [
        *(None, None, "Robert is an actor .", "He was born in 1,969 .", "He said : what ?"),
        *("A well-known 2.5 .", None, "= 2"),
    ]


def test_what_is_wrong_with_the_input_is_named(vocabulary, text, tmp_path):
    out = tmp_path / "out"

    def refused(source, error, match, **options):
        with pytest.raises(error, match=match):
            write_dataset(config(vocabulary, **options), source, out)
        assert not out.exists()
        assert not list(tmp_path.glob(".*"))

    refused([tmp_path / "none"], FileNotFoundError, "none: no such file or directory")
    (tmp_path / "folder").mkdir()
    refused([tmp_path / "folder"], FileNotFoundError, "folder: expected text files, found none")
    path = tmp_path / "text.txt"
    path.write_bytes(b"wordaa\n\nwordab wordac\nword\xff\n")
    refused([path], ValueError, r"text.txt: line 4: not UTF-8: invalid start byte")
    refused([path], ValueError, r"text.txt: line 4: not UTF-8", processes=2)
    path.write_bytes(gzip.compress(text.read_bytes())[:-20])
    refused([path], ValueError, r"text.txt: after line \d+: not a whole gzip file")
    path.write_text(" \n\n")
    refused([path, path], ValueError, "text.txt, .*text.txt: expected sentences, found none")
    path.write_text("wordaa\nwordab\n")
    refused([path], ValueError, r"text.txt: expected two documents .* got one \(blank lines are")
    refused([path], ValueError, "got one .headings like ` = Title = `", input_format="wikitext")
    no_mask = tmp_path / "no_mask.txt"
    no_mask.write_text("\n".join([*SPECIAL[:4], *WORDS]))
    with pytest.raises(ValueError, match=r"no_mask.txt: .*\[MASK\]"):
        write_dataset(config(no_mask), [text], out)
    assert not out.exists()


def test_an_earlier_dataset_is_replaced_and_nothing_else(vocabulary, text, tmp_path):
    out = tmp_path / "out"
    write_dataset(config(vocabulary, dupe_factor=1), [text], out)
    write_dataset(config(vocabulary), [text], out)
    assert len(files_of(out)) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("precious")
    with pytest.raises(FileExistsError, match="mine: exists and has no manifest.json"):
        write_dataset(config(vocabulary), [text], tmp_path / "mine")
    assert json.loads((out / "manifest.json").read_text())["made_with"] == {
        "input_format": "sentences",
        "seed": 12345,
        "dupe_factor": 2,
    }


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("vocab_file", ""), ("dupe_factor", 0), ("processes", 0)),
        *(("input_format", "csv"), ("max_seq_length", 7), ("max_predictions_per_seq", 0)),
        ("max_predictions_per_seq", 126),
        ("seed", -1),
    ],
)
def test_impossible_values_are_named(flag, value):
    with pytest.raises(ValueError, match=f"^--{flag}( {value})?: .*expected"):
        PretrainingTextConfig(**{"vocab_file": "vocab.txt", flag: value})
