import re
import subprocess
import sys

import pytest

from dlrm.language.pretraining import PretrainingDataset

pytest.importorskip("h5py", reason="no h5py, which reads HDF5")
pytest.importorskip("tokenizers", reason="no tokenizers, which cuts texts into WordPieces")


@pytest.fixture
def prepare(tmp_path):
    """Runs the command on a text of three documents."""
    (tmp_path / "text.txt").write_text("a b c .\na b .\n\nb c .\n\nc a .\n")
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "."])
    )

    def run(*flags):
        module = "dlrm.language.prepare_text"
        given = ["--source=text.txt", "--vocab_file=vocab.txt", "--output=out", *flags]
        return subprocess.run(
            [sys.executable, "-m", module, *given],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_the_command_writes_a_dataset_and_says_what_is_in_it(prepare, tmp_path):
    done = prepare("--max_seq_length=16", "--max_predictions_per_seq=3", "--processes=2")
    assert done.returncode == 0, done.stderr
    dataset = PretrainingDataset(tmp_path / "out", verify_data="always")
    assert (dataset.length, dataset.max_predictions, dataset.vocab_size) == (16, 3, 8)
    assert "read: 1 file, 3 documents, 4 sentences, 13 tokens" in done.stdout
    assert re.search(
        rf"^rows: {dataset.num_samples} in 1 files, [\d,]+ a second", done.stdout, re.M
    )
    assert done.stdout.endswith("out: complete\n")
    again = prepare("--max_seq_length=16", "--max_predictions_per_seq=3", "--no-lower_case")
    assert again.returncode == 0, again.stderr
    assert '"lower_case": false' in (tmp_path / "out" / "manifest.json").read_text()
