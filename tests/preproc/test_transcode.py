"""NVIDIA's CSV becomes a dataset that readers accept; errors in it are named."""

import forked
import numpy as np
import yaml
from nvidia_reader import read_as_nvidia

from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets


def transcode(folder, *flags):
    paths = [f"--input={folder}", f"--output={folder / 'out'}"]
    return forked.run("dlrm.scripts.transcode", *paths, *flags)


def read_back(directory, **config):
    """Returns numericals, ids and labels of each split, all rows at once."""
    datasets = open_datasets(DataConfig(dataset=str(directory), **config))
    train, test = datasets.train, datasets.test
    return {
        "train": [tensor.numpy() for tensor in train.batch(0)[:3]],
        "test": [tensor.numpy() for tensor in test.batch(0)[:3]],
    }


def write_spec(directory, *, cardinality="auto", test_user=4):
    sections = {
        "feature_spec": {
            "user": {"dtype": "int32", "cardinality": cardinality},
            "shop": {"dtype": "int32", "cardinality": 300},
            "price": {"dtype": "float32"},
            "age": {"dtype": "float32"},
            "comment": {"dtype": "str"},
            "clicked": {"dtype": "bool"},
        },
        "source_spec": {
            split: [
                {
                    "type": "csv",
                    "features": ["clicked", "price", "user", "comment"],
                    "files": [f"{split}_0.csv", f"{split}_1.csv"],
                },
                {"type": "csv", "features": ["age", "shop"], "files": [f"{split}_more.csv"]},
            ]
            for split in ("train", "test")
        },
        "channel_spec": {
            "categorical": ["user", "shop"],
            "numerical": ["age", "price"],
            "label": ["clicked"],
        },
        "metadata": {},
    }
    (directory / "feature_spec.yaml").write_text(yaml.safe_dump(sections))
    for split, last in (("train", 2), ("test", test_user)):
        (directory / f"{split}_0.csv").write_text("1,0.5,0,hello\n0,1.5,1,\n")
        (directory / f"{split}_1.csv").write_text(f'1,,{last},"a,b"\n')
        (directory / f"{split}_more.csv").write_text("20,299\n30,0\n40,7\n")
    return sections


def test_a_specification_keeps_ids_and_the_order_of_rows(tmp_path):
    write_spec(tmp_path)
    done = transcode(tmp_path, "--chunk_size=1", "--feature_spec_out=other.yaml")
    assert done.returncode == 0, done.stderr
    sections = yaml.safe_load((tmp_path / "out" / "other.yaml").read_text())["feature_spec"]
    sizes = [sections[name]["cardinality"] for name in ("user", "shop")]
    assert sizes == [5, 300]  # the largest id of both splits, plus 1
    data = read_back(tmp_path / "out", feature_spec="other.yaml")
    numerical, ids, labels = data["train"]
    assert numerical.tolist() == [[20, 0.5], [30, 1.5], [40, 0]]
    assert ids.tolist() == [[0, 299], [1, 0], [2, 7]]
    assert labels.tolist() == [1, 0, 1]
    assert data["test"][1].tolist() == [[0, 299], [1, 0], [4, 7]]


def test_nvidias_reader_takes_what_was_made_of_a_specification_with_validation(tmp_path):
    sections = write_spec(tmp_path)
    sections["source_spec"]["validation"] = sections["source_spec"]["test"]
    (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(sections))
    assert transcode(tmp_path).returncode == 0
    labels, numbers, ids = read_as_nvidia(tmp_path / "out")["test"]
    assert (labels.tolist(), numbers[:, 0].tolist()) == ([1, 0, 1], [20, 30, 40])
    assert np.stack(ids, 1).tolist() == [[0, 299], [1, 0], [4, 7]]
    validation = open_datasets(DataConfig(dataset=str(tmp_path / "out"))).validation
    assert validation.batch(0).categorical.tolist() == [[0, 299], [1, 0], [4, 7]]


def test_bad_rows_of_a_specification_may_be_left_out(tmp_path):
    write_spec(tmp_path)
    (tmp_path / "test_more.csv").write_text("20,299\n30,-1\n40,7\n")
    where = f"{tmp_path / 'feature_spec.yaml'}, test, row 1, column shop: "
    assert where in transcode(tmp_path).stderr
    assert not (tmp_path / "out").exists()
    flags = ["--bad_lines=quarantine", "--max_bad_lines=0.5", "--noreport"]
    assert transcode(tmp_path, *flags).returncode == 0
    data = read_back(tmp_path / "out")
    assert data["train"][1].tolist() == [[0, 299], [1, 0], [2, 7]]
    assert data["test"][1].tolist() == [[0, 299], [4, 7]]


def test_what_breaks_a_specification_is_named(tmp_path):
    def fails(message):
        done = transcode(tmp_path)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert message in line
        assert not (tmp_path / "out").exists()

    def save(sections):
        (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(sections))

    write_spec(tmp_path, cardinality=4)
    fails("test, row 2, column user: ")
    write_spec(tmp_path, cardinality=0)
    fails('feature user: expected a cardinality of 1 or more, or "auto", got 0')
    sections = write_spec(tmp_path)
    (tmp_path / "train_more.csv").write_text("20,299\n")
    fails("expected chunks with the same number of rows")
    sections["source_spec"]["test"][1]["type"] = "split_binary"
    save(sections)
    fails("source_spec test: expected chunks of type csv")
    del sections["source_spec"]["test"][1]["type"]
    save(sections)
    fails("source_spec test: expected chunks of type csv")
    sections = write_spec(tmp_path)
    del sections["source_spec"]["train"][1]
    save(sections)
    fails("source_spec train: expected feature shop once")
    sections = write_spec(tmp_path)
    sections["source_spec"]["test"][1]["files"] = ["../test_more.csv"]
    save(sections)
    fails("../test_more.csv")
