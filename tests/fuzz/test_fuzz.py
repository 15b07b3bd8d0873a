"""Mutated files of every format give a value or a user error, within time and memory limits."""

import io
import json
import os
import signal
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from fuzzing import CASES, failures, mutated
from pyarrow import orc
from tables_testing import contents

import dlrm
from dlrm.data.bags import Jagged, ListField
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.list_columns import ListColumn
from dlrm.data.clicks.writer import SplitWriter
from dlrm.data.layout import read_model_size
from dlrm.data.schema.numbers import Fitted
from dlrm.data.schema.schema import CategoricalField, Label, NumericalField, Schema
from dlrm.data.sources.csv_rows import Reading, read_csv
from dlrm.data.sources.log_lines import LogFormat
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.files import FORMATS as TABLE_FORMATS, JSON_LINES, TableFile
from dlrm.data.tables.formats.cells import Cells
from dlrm.data.tables.parts import Part, parts_of_file
from dlrm.data.transform.dictionaries import Dictionary
from dlrm.data.transform.row_reader import RowReader
from dlrm.data.transform.transform import Transform
from dlrm.documents import read_json, read_yaml
from dlrm.language.pretraining import PretrainingDataset
from dlrm.language.squad import read_squad
from dlrm.manifest import read_manifest, sealed_json, write_manifest
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.preproc.logs.options import LogOptions
from dlrm.preproc.logs.raw_log import LogSource, Split
from dlrm.scripts.checkpoint import describe
from dlrm.serving.rows.raw import inputs_of_text, text_of_lines
from dlrm.train.checkpoints.checkpoint import Checkpoint, checked_config
from dlrm.train.checkpoints.state import Parameters, read_tensors


def log_lines(path):
    split = Split(str(path), str(path), 0, 0, path.stat().st_size)
    options = LogOptions(log_format=LogFormat(3, 2))
    if split.size:
        list(LogSource(options.schema, options.log_format).read(split, []))


def csv_rows(path):
    list(read_csv(path, Reading(TextFormat(header=True))))


def manifest(path):
    """Reads a manifest with a valid checksum, as a faulty writer would seal it."""
    entries = path.read_bytes()
    try:
        text = sealed_json(json.loads(entries))
    except (ValueError, RecursionError, AttributeError):
        text = None
    if text:
        path.write_text(text)
    read_manifest(path.parent, "dataset")


def fitted(path):
    folder = path.parent / "transform"
    folder.mkdir(exist_ok=True)
    (folder / "transform.json").write_bytes(path.read_bytes())
    Transform.load(folder)


def image(path):
    decode = pytest.importorskip("dlrm.vision.images").decode
    decode(path.read_bytes(), 8)


def records(path):
    tfrecord = pytest.importorskip("dlrm.vision.tfrecord")
    for record in tfrecord.find_records(path):
        tfrecord.parse_example(tfrecord.read_record(path, record))


def example(path):
    tfrecord = pytest.importorskip("dlrm.vision.tfrecord")
    tfrecord.parse_example(path.read_bytes())


def squad(path):
    read_squad(path)


def vocabulary(path):
    from dlrm.language.wordpiece import Tokenizer

    Tokenizer(path)


def spec_yaml():
    features = {"y": {"dtype": "bool"}, "x": {"dtype": "float16"}}
    features["u"] = {"dtype": "int8", "cardinality": 5}
    chunks = [{"type": "split_binary", "features": [n], "files": [f"t/{n}"]} for n in features]
    sections = {"feature_spec": features, "source_spec": {"train": chunks, "test": chunks}}
    sections["channel_spec"] = {"label": ["y"], "numerical": ["x"], "categorical": ["u"]}
    return yaml.safe_dump(sections | {"metadata": {}}).encode()


def png():
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)).save(file, "PNG")
    return file.getvalue()


def hdf5_file():
    h5py = pytest.importorskip("h5py")
    file = io.BytesIO()
    with h5py.File(file, "w") as out:
        for name in ("input_ids", "input_mask"):
            out.create_dataset(name, data=np.ones((9, 8), "i4"), compression="gzip")
        out["segment_ids"] = np.zeros((9, 8), "i4")
        for name in ("masked_lm_positions", "masked_lm_ids"):
            out[name] = np.zeros((9, 2), "i4")
        out["next_sentence_labels"] = np.zeros(9, "i4")
    return file.getvalue()


EXAMPLE = b"\n\x0f\n\r\n\x05label\x12\x04\x1a\x02\x08\x07"  # a tf.train.Example: label is [7]


def tfrecord_file():
    tfrecord = pytest.importorskip("dlrm.vision.tfrecord")
    size = len(EXAMPLE).to_bytes(8, "little")
    sums = [tfrecord.masked_crc32c(part).to_bytes(4, "little") for part in (size, EXAMPLE)]
    return (size + sums[0] + EXAMPLE + sums[1]) * 3


def tensors():
    from safetensors.numpy import save

    return save({"weight": np.ones((3, 4), np.float32), "bias": np.zeros(3, np.float32)})


def table_rows(kind):
    """Returns the reader of a columnar format, which reads as tasks of preprocessing do."""

    def read_table(path):
        for piece in parts_of_file(0, TableFile(path, TABLE_FORMATS[kind]), 1):
            reader = RowReader(Schema.from_dict(TABLE_SCHEMA))
            for batch in Part([piece], crc=Part([piece]).checksum()).read(reader.columns):
                reader.read(batch)

    return read_table


def table_file(write):
    """Returns the bytes of a table of two groups of rows that a function writes."""

    def content():
        columns = {"y": [0, 1] * 50, "x": [0.5, None] * 50, "l": [["a"], [], None, ["b", "a"]] * 25}
        table = pa.table({**columns, "c": [f"text {i % 7}" for i in range(100)]})
        file = io.BytesIO()
        write(table, file)
        return file.getvalue()

    return content


def write_orc(table, file):
    orc.write_table(table, file, compression="zlib", stripe_size=1, batch_size=50)


def write_arrow(table, file, new=pa.ipc.new_file):
    place = table.schema.get_field_index("c")
    table = table.set_column(place, "c", table["c"].dictionary_encode())
    with new(file, table.schema) as writer:
        writer.write_table(table, 50)


def score(folder):
    dlrm.load(folder).predict(ROWS)


def checkpoint(path):
    """Reads it as it is, then with a matching manifest, as a faulty writer would leave it."""
    problems = []
    for seals in (False, True):
        if seals:
            (path / "manifest.json").unlink(missing_ok=True)
            write_manifest(path, "checkpoint")
        for read in (describe, score):
            try:
                read(path)
            except (ValueError, OSError) as error:
                problems.append(error)
    if problems:
        raise problems[-1]


def checkpoint_folder():
    config = DLRMConfig((4, 3), 2, 4, (4,), (8, 1), "dot")
    model = DLRM(config)
    flags = {
        name: getattr(config, name) for name in ("embedding_dim", "interaction_op", "hash_indices")
    }
    flags |= {"bottom_mlp_sizes": [4], "top_mlp_sizes": [8, 1], "max_table_size": None}
    run = {"flags": flags, "dataset": {"table sizes": [4, 3]}}
    progress = {"step": 5, "best": {"auc": 0.5, "step": 5}, "history": [{"step": 5, "auc": 0.5}]}
    with tempfile.TemporaryDirectory() as folder:
        parts = Parameters(model, model.embeddings.table_parameters())
        fitted = Path(folder, "transform")
        fit().save(fitted)
        Checkpoint.save(Path(folder, "c"), parts, run, progress, attached=[fitted])
        return contents(Path(folder, "c"))


def fit():
    return Transform.from_logs(2, [np.array([7, 9, 1], np.uint32), np.array([2, 5], np.uint64)])


def fitted_table():
    fields = (CategoricalField("c", "id", cardinality=3),)
    schema = Schema(Label("y", "1"), (NumericalField("x"),), fields, ("?",))
    with tempfile.TemporaryDirectory() as folder:
        made = Transform(
            schema, [Fitted(0.5, 2.0)], [Dictionary.ids(2)], ["string"], ["0"], ["x", "c", "y"]
        )
        made.save(folder)
        return Path(folder, "transform.json").read_bytes()


def dictionaries(path):
    transform = Transform.load(path / "transform")
    transform.check_all()
    inputs_of_text(transform, text_of_lines("\n".join(ROWS).encode(), 4))


def dictionaries_folder():
    with tempfile.TemporaryDirectory() as folder:
        fit().save(Path(folder, "transform"))
        return contents(Path(folder))


def lists(path):
    spec = FeatureSpec.load(path)
    for split in spec.splits:
        rows = spec.num_rows(split)
        for name in spec.lists:
            ListColumn(spec, split, name, rows).read(0, rows)


def lists_folder():
    fields = {"a": ListField(5, weighted=True), "b": ListField(300)}
    with tempfile.TemporaryDirectory() as folder:
        path, sizes = Path(folder, "feature_spec.yaml"), {"a": 9, "b": 300}
        spec = FeatureSpec.named(path, "y", [], sizes, ["train", "test"], lists=fields)
        for split in spec.splits:
            lengths = np.array([2, 0, 5, 1])
            values = np.arange(8)
            bags = [Jagged(values, lengths, np.ones(8, np.float32)), Jagged(values, lengths)]
            with SplitWriter(spec, split) as writer:
                writer.write(np.zeros(4), np.zeros((4, 0)), bags)
        spec.save()
        return contents(Path(folder))


def json_lists(path):
    table, separators = TableFile(path, JSON_LINES), {"t": "|", "u": "|"}
    wanted = ["y", "t", "u"]
    for batch, _ in JSON_LINES.batches(table, TextFormat(), wanted, Cells(separators)):
        batch.validate(full=True)


ROWS = ["1\t2\t7\t5", "\t-3\tffff\t"]
FILE = {"bytes": 0, "crc32": f"{zlib.crc32(b''):08x}"}
ANSWER = {"text": "b", "answer_start": 2}
QUESTION = {"id": "1", "question": "which?", "answers": [ANSWER]}
TABLE_SCHEMA = {"label": "y", "numerical": ["x"], "categorical": ["c"]}
TABLE_SCHEMA["categorical"] += [{"column": "l", "max_length": 4}]
TABLE = {"rows": 3, "dim": 2, "state": ["sum"], "scalars": {"step": 1}}
FORMATS = {
    "log": (b"1\t5\t\t-2\tab12\tcd34\n" * 30, log_lines),
    "csv": (b'y,x,"u"\n1,2.5,"a, b"\n0,,c\n' * 20, csv_rows),
    "spec": (spec_yaml, FeatureSpec.load),
    "yaml": (b"a: &a [1, 2]\nb: {c: *a, d: [*a, *a]}\n", read_yaml),
    "manifest": (sealed_json({"kind": "dataset", "version": 2, "files": {"a": FILE}}), manifest),
    "json": (json.dumps([TABLE, TABLE_SCHEMA]), lambda path: read_json(path, object)),
    "model_size": (json.dumps({"_c14": 3, "_c15": 9}), lambda path: read_model_size(path.parent)),
    "transform": (fitted_table, fitted),
    "config": (
        json.dumps({"flags": {"lr": 1.0}, "tables": [TABLE]}),
        lambda path: checked_config(path.parent),
    ),
    "tensors": (tensors, read_tensors),
    "hdf5": (hdf5_file, PretrainingDataset),
    "image": (png, image),
    "tfrecord": (tfrecord_file, records),
    "example": (EXAMPLE, example),
    "squad": (
        json.dumps({"data": [{"paragraphs": [{"context": "a b", "qas": [QUESTION]}]}]}),
        squad,
    ),
    "rows of parquet": (
        table_file(lambda table, file: pq.write_table(table, file, row_group_size=50)),
        table_rows("parquet"),
    ),
    "orc": (table_file(write_orc), table_rows("orc")),
    "arrow": (table_file(write_arrow), table_rows("arrow")),
    "arrow stream": (
        table_file(lambda table, file: write_arrow(table, file, pa.ipc.new_stream)),
        table_rows("arrow"),
    ),
    "lists": (lists_folder, lists),
    "json lists": (b'{"y": 0, "t": ["a", null, "b"], "u": []}\n' * 9, json_lists),
    "checkpoint": (checkpoint_folder, checkpoint),
    "dictionaries": (dictionaries_folder, dictionaries),
    "vocabulary": ("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n##s\n", vocabulary),
}
NAMES = {"model_size": "model_size.json", "config": "config.json", "manifest": "manifest.json"}


def read(kind, path):
    """Reads the unmodified file, which must not raise."""
    content, reader = FORMATS[kind]
    content = content() if callable(content) else content
    if isinstance(content, dict):
        for name, whole in content.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(whole)
        reader(path)
        return content, reader
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    reader(path)
    return path.read_bytes(), reader


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_mutated_files_end_in_a_value_or_an_error_of_the_user(tmp_path, kind):
    (tmp_path / "a").touch()
    path = tmp_path / NAMES.get(kind, "file.hdf5")
    content, reader = read(kind, path)
    print(f"{kind}: seeds 0 to {CASES - 1}")
    found = failures(reader, content, path)
    assert not found, f"{len(found)} of {CASES} cases:\n" + "\n".join(found[:3])


def test_a_reader_that_fails_hangs_dies_or_fills_the_memory_is_found(tmp_path):
    def no_error_of_the_user(path):
        raise KeyError("internal")

    def error_of_the_user(path):
        raise ValueError(path)

    def ends(read, seconds=60):
        return failures(read, b"content", tmp_path / "file", cases=3, seconds=seconds)

    assert ends(error_of_the_user) == []
    assert ["KeyError" in found for found in ends(no_error_of_the_user)] == [True] * 3
    alarmed = ["seed 0: ended with -14", "seed 2: ended with -14"]
    assert ends(only_even(time.sleep, 99), 2) == alarmed
    assert ends(only_even(die)) == ["seed 0: ended with -9", "seed 2: ended with -9"]
    (first, _) = ends(only_even(bytearray, 3 << 30))
    assert "MemoryError" in first


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def only_even(act, *arguments):
    """Returns a reader that acts only in the cases of seeds 0 and 2."""
    even = {mutated(b"content", seed) for seed in (0, 2)}

    def reader(path):
        if path.read_bytes() in even:
            act(*arguments)

    return reader
