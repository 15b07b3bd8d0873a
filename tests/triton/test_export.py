"""The exporter writes a repository that agrees with the checkpoint, or none."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import trained_model
from triton_testing import config_of

import dlrm
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.sources import native
from dlrm.data.transform.lookup import IdLookup
from dlrm.deployment import deployer, exporter
from dlrm.manifest import write_manifest
from dlrm.serving.network.platforms import PLATFORMS
from dlrm.serving.server.names import KIND
from dlrm.serving.server.scorer import OnnxScorer
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.nvidia import write_nvidia

pytestmark = pytest.mark.long


def test_a_model_of_a_table_in_memory_is_judged_by_generated_rows(
    export, tmp_path, monkeypatch, capsys
):
    table = {"bought": [i % 2 for i in range(600)], "shop": [i % 7 for i in range(600)]}
    table["price"] = [float(i % 17) for i in range(600)]
    schema = {"label": "bought", "numerical": ["price"], "categorical": ["shop"]}
    model = dlrm.fit(pa.table(table), schema, base_device="cpu", max_steps=2, embedding_dim=4)
    model.save(tmp_path / "saved")
    saved = trained_model.Trained(None, tmp_path / "saved", None, None)
    with pytest.raises(ValueError, match=r"^--dataset: expected .*Dataset\.from_arrow\(frame"):
        export(saved, tmp_path / "refused", "--embedding-precision=fp16")
    monkeypatch.setattr(exporter, "MAX_ROWS", 300)
    repository = export(saved, tmp_path / "repository")
    assert "on 300 generated rows, since the dataset of the" in capsys.readouterr().out
    version = repository / "model" / "1"
    report = json.loads((version / "report.json").read_text())
    assert (report["dataset"], report["rows"]) == (None, 300)
    assert "auc" not in report
    assert report["greatest_difference"] < 1e-5 < report["greatest_score"]
    found = PLATFORMS["onnx"].open(version)(np.float32([[0]]), np.int64([[1]]))
    expected = model.model(torch.zeros(1, 1), torch.tensor([[1]])).detach().numpy()
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-4)


@pytest.fixture(scope="module")
def exported(export, trained, tmp_path_factory):
    """A repository with the model, exported without flags; tests must not change it."""
    return export(trained, tmp_path_factory.mktemp("exported"))


def flip(path, draw):
    """Flips a bit of a file; returns a function that undoes it."""
    whole = path.read_bytes()
    damaged, place = bytearray(whole), draw.randrange(8 * len(whole))
    damaged[place // 8] ^= 1 << place % 8
    path.write_bytes(damaged)
    return lambda: path.write_bytes(whole)


@pytest.mark.parametrize("flips", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_any_file_of_a_version_is_named(exported, tmp_path, flips):
    version, seed = tmp_path / "1", 20261125
    shutil.copytree(exported / "model" / "1", version)
    files = sorted(path for path in version.rglob("*") if path.is_file() and path.stat().st_size)
    draw = random.Random(seed)
    OnnxScorer(version, 10)
    for number in range(flips):
        path = draw.choice(files) if number >= len(files) else files[number]
        undo = flip(path, draw)
        with pytest.raises(ValueError, match=re.escape(path.name)):
            OnnxScorer(version, 10)
        undo()
    (version / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"manifest\.json: no such file"):
        OnnxScorer(version, 10)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_platform_agrees_with_the_checkpoint(export, trained, tmp_path, platform, capsys):
    repository = export(trained, tmp_path / "repository", f"--{platform}")
    report = json.loads((repository / "model" / "1" / "report.json").read_text())
    assert report["rows"] == 1000
    assert report["greatest_difference"] < 1e-5
    assert abs(report["auc_change"]) < 1e-6
    assert report["auc"] > 0.7
    assert "agreement: on 1,000 rows" in capsys.readouterr().out

    test = open_datasets(DataConfig(dataset=str(trained.dataset), test_batch_size=99)).test
    batch = test.batch(3)
    version = repository / "model" / "1"
    score = PLATFORMS[platform].open(version)
    found = score(batch.numerical.float().numpy(), batch.categorical.long().numpy())
    with torch.no_grad():
        expected = dlrm.load(trained.checkpoint).model(batch.numerical, batch.categorical)
    np.testing.assert_allclose(found[:, 0], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_what_nvidia_saved_is_exported(export, exported, trained, tmp_path):
    theirs = tmp_path / "theirs"
    write_nvidia(Checkpoint.open(trained.checkpoint), theirs)
    shutil.rmtree(theirs / "transform")  # NVIDIA's program saves none
    found = export(trained._replace(checkpoint=theirs), tmp_path, f"--dataset={trained.dataset}")
    reports = [
        json.loads((repository / "model" / "1" / "report.json").read_text())
        for repository in (found, exported)
    ]
    assert reports[0]["checkpoint"] == str(theirs)
    assert reports[0]["greatest_difference"] < 1e-5
    assert reports[0]["auc"] == pytest.approx(reports[1]["auc"], abs=1e-6)
    inputs = config_of(found / "model")["input"]
    assert inputs[-1]["name"] == "raw__0"  # through the dataset's transform


def test_nvidias_deployer_writes_what_export_writes(export, exported, trained, tmp_path, capsys):

    def deploy(*words):
        words = [f"--save-dir={tmp_path}", *words]
        if code := deployer.main(["--python", "--deploy_cpu", *words]):
            sys.exit(code)

    model = ["--", f"--model_checkpoint={trained.checkpoint}"]
    sizes = ["--embedding_dim", "8", "--top_mlp_sizes", "32", "1", "--interaction_op", "dot"]
    deploy(
        *model, *sizes, f"--dataset={trained.dataset}", "--batch_size=1", "--embedding_type=joint"
    )
    theirs, ours = (repository / "model" for repository in (tmp_path, exported))
    for name in ("1/model.onnx/model.onnx", "1/model.json", "1/report.json"):
        assert (theirs / name).read_bytes() == (ours / name).read_bytes(), name
    for words, message in (
        ([*model, "--embedding_dim=128"], "--embedding_dim 128: expected 8, as "),
        ([*model, "--top_mlp_sizes", "9", "1"], "--top_mlp_sizes 9,1: expected 32,1, as "),
        ([*model, "--dump_perf_data=x"], "--dump_perf_data: dlrm client --input "),
        (["--", "--model_checkpoint=/no"], "/no: no checkpoint here"),
        ([], "expected -- --model_checkpoint DIR behind the flags of export.py"),
    ):
        with pytest.raises(SystemExit):
            deploy(*words)
        assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_version_is_filled_where_a_polling_server_does_not_look(
    export, trained, tmp_path, monkeypatch
):
    repository, seen = tmp_path / "repository", []
    python = PLATFORMS["python"]

    def watched(*arguments):
        seen.append({path.relative_to(repository).parts[:2] for path in repository.rglob("*")})
        python.write(*arguments)

    monkeypatch.setitem(PLATFORMS, "python", python._replace(write=watched))
    export(trained, repository)
    export(trained, repository, "--update")
    assert seen == [set(), {("model",), ("model", "1"), ("model", "config.pbtxt")}]
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]


def test_modules_run_by_the_names_that_nvidia_prints():
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    commands = {"deployer": ["--", "--help"], "client": ["--help"], "server": ["--help"]}
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", f"triton.{name}", *words],
            cwd=root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for name, words in commands.items()
    }
    for name, process in running.items():
        _, said = process.communicate()
        assert process.returncode == 0, (name, said.decode())


def test_the_configuration_says_what_the_flags_said(export, trained, tmp_path):
    flags = [
        *("--triton-model-name=ctr", "--triton-model-version=7", "--triton-max-batch-size=64"),
        *("--triton_dyn_batching_delay=2.5", "--triton-engine-count=2", "--fp16", "--ids=int32"),
        *("--triton-keep-versions=2", "--output-kind=probability", "--threads=1"),
    ]
    repository = export(trained, tmp_path, *flags)
    config = config_of(repository / "ctr")
    inputs = {tensor["name"]: (tensor["data_type"], tensor["dims"]) for tensor in config["input"]}
    assert inputs == {
        "input__0": ("TYPE_FP16", ["3"]),
        "input__1": ("TYPE_INT32", ["4"]),
        "raw__0": ("TYPE_UINT8", ["-1"]),
    }
    assert config["output"] == [{"name": "output__0", "data_type": "TYPE_FP32", "dims": ["1"]}]
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("ctr", "python", 64)
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == "2500"
    assert config["instance_group"] == [{"count": 2, "kind": "KIND_CPU"}]
    assert config["version_policy"] == {"latest": {"num_versions": 2}}
    assert [warmup["batch_size"] for warmup in config["model_warmup"]] == [1, 64]
    parameters = {name: p["string_value"] for name, p in config["parameters"].items()}
    assert parameters == {"output_kind": "probability", "platform": "python", "threads": "1"}
    facts = json.loads((repository / "ctr" / "7" / "model.json").read_text())
    assert (facts["output_kind"], facts["ids_dtype"]) == ("probability", "int32")


def test_other_platforms_serve_raw_rows_by_an_ensemble(export, trained, tmp_path):
    repository = export(trained, tmp_path, "--onnx", "--triton-no-cuda")
    assert config_of(repository / "model")["platform"] == "onnxruntime_onnx"
    assert config_of(repository / "model")["instance_group"][0]["kind"] == "KIND_CPU"
    steps = config_of(repository / "model_raw")["ensemble_scheduling"]["step"]
    assert [step["model_name"] for step in steps] == ["model_transform", "model"]
    assert config_of(repository / "model_transform")["backend"] == "python"
    assert (repository / "model_raw" / "1").is_dir()
    plain = export(trained, tmp_path / "ids", "--ts-trace", "--no-raw", "--triton-no-dyn-batching")
    assert [path.name for path in plain.iterdir()] == ["model"]
    assert config_of(plain / "model")["platform"] == "pytorch_libtorch"
    assert "dynamic_batching" not in config_of(plain / "model")


def test_parts_are_published_before_the_ensemble_that_uses_them(
    export, trained, tmp_path, monkeypatch
):
    repository, seen, rename = tmp_path / "repository", [], Path.rename

    def watched(path, target):
        moved = rename(path, target)
        seen.append(sorted(model.name for model in repository.iterdir()))
        return moved

    monkeypatch.setattr(Path, "rename", watched)
    export(trained, repository, "--ts-trace")
    assert seen[-1] == ["model", "model_raw", "model_transform"]
    assert not [names for names in seen[:-1] if "model_raw" in names]


WITHOUT_CLIENT = """
import sys
sys.modules["tritonclient"] = None
from dlrm.scripts.commands import main
sys.exit(main(sys.argv[1:]))
"""


def test_exporting_needs_no_client(trained, tmp_path):
    words = ["export", f"--checkpoint={trained.checkpoint}", f"--save-dir={tmp_path}", "--ts-trace"]
    subprocess.run([sys.executable, "-c", WITHOUT_CLIENT, *words], check=True)
    assert config_of(tmp_path / "model")["platform"] == "pytorch_libtorch"


def test_quantized_tables_are_reported(export, trained, tmp_path):
    repository = export(trained, tmp_path, "--embedding_precision=fp16")
    report = json.loads((repository / "model" / "1" / "report.json").read_text())
    assert report["table_bytes"] == report["table_bytes_fp32"] / 2
    assert abs(report["auc_change"]) < 5e-4
    assert 0 < report["greatest_difference"] < 0.1


ALONE = """
import importlib.abc, json, sys
from pathlib import Path

directory = Path(sys.argv[1])
sys.path.insert(0, str(directory))

class OnlyWhatServersHave(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "yaml", "absl", "pytriton", "tritonclient", "onnx"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, OnlyWhatServersHave())
import numpy as np
from dlrm.data.sources import native
from dlrm.serving.server import backend
from dlrm.serving.server.scorer import OnnxScorer

class Logger:
    lines = []
    log_warn = lines.append

class Server:
    Logger = Logger

scorer = OnnxScorer(directory, 4096)
backend.log_parser(Server, scorer.reader)
rows = np.array([line.encode() for line in json.loads(sys.stdin.read())])
(scores,) = scorer.answer([{"raw__0": rows.view(np.uint8).reshape(len(rows), -1)}])
files = [Path(module.__file__) for name, module in sys.modules.items() if name.startswith("dlrm")]
print(json.dumps([
    all(directory in file.parents for file in files), native.host is not None,
    native.served is not None, Logger.lines, scores[:, 0].tolist(),
]))
"""


@pytest.mark.parametrize("library", ["built", "damaged", "missing", "of another Python"])
def test_an_exported_version_runs_alone(exported, trained, tmp_path, library):
    version = shutil.copytree(exported / "model" / "1", tmp_path / "1")
    file = version / "dlrm" / "_served.so"
    if native.served is None:
        pytest.skip("the parser is not built")
    if library == "damaged":
        file.write_bytes(b"no library")
    elif library == "missing":
        file.unlink()
    elif library == "of another Python":
        (module,) = file.parent.glob("_host.*.so")
        module.rename(module.with_name("_host.cpython-399-other.so"))
    write_manifest(version, KIND)  # as if exported so
    lines = trained.rows[:50]
    done = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, version],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    inside, has_module, reads_natively, logged, scores = json.loads(done.stdout)
    assert inside
    assert has_module == (library != "of another Python")
    assert reads_natively == (library not in ("damaged", "missing"))
    assert len(logged) == (not reads_natively)
    reasons = {"damaged": "invalid ELF|too short", "missing": "not built"}
    for line in logged:
        assert re.search(reasons[library], line)
    expected = dlrm.load(trained.checkpoint).logits(lines)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


OTHER_PYTHON = """
import ctypes, json, sys

library, tables = sys.argv[1], json.loads(sys.stdin.read())

class Lookup(ctypes.Structure):
    _fields_ = [("hashes", ctypes.c_void_p), ("ids", ctypes.c_void_p),
                ("directory", ctypes.c_void_p), ("places", ctypes.c_int64),
                ("id_bytes", ctypes.c_int64)]

def array(kind, values):
    return (kind * len(values))(*values)

kinds = ctypes.c_uint64, ctypes.c_int8, ctypes.c_int64
arrays = [[array(kind, values) for kind, values in zip(kinds, table)] for table in tables]
lookups = array(Lookup, [
    Lookup(*map(ctypes.addressof, table), len(table[2]), 1) for table in arrays
])
data = b"7-1205ff"  # of two rows: 7 and -12, 05 and nothing, ff twice
starts, ends = (array(ctypes.c_int64, ends) for ends in ([0, 1, 4, 6, 6, 6], [1, 4, 6, 6, 8, 8]))
values, missing, ids = (ctypes.c_int64 * 6)(), (ctypes.c_bool * 6)(), (ctypes.c_int32 * 4)()
encode = ctypes.CDLL(library).dlrm_encode_fields
number, pointer = ctypes.c_int64, ctypes.c_void_p
encode.argtypes = [pointer, number, pointer, pointer, *[number] * 3, *[pointer] * 4]
encode.restype = number
bad = encode(data, len(data), starts, ends, 1, 2, 2, lookups, values, missing, ids)
print(json.dumps([bad, *map(list, (values[:2], missing, ids))]))
"""


def other_pythons():
    """Returns Pythons of other versions, on the path or installed beside this one."""
    for minor in range(10, 16):
        name = f"python3.{minor}"
        beside = Path(sys.base_prefix).parent.glob(f"*/bin/{name}")  # as pyenv and uv have them
        for python in filter(None, (shutil.which(name), *beside)):
            asked = [python, "-c", "import sys; print(sys.version_info.minor)"]
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            if done.stdout.strip() == str(minor) != str(sys.version_info.minor):
                yield python
                break


def test_the_library_of_a_served_model_works_in_another_python(exported):
    if native.served is None:
        pytest.skip("the parser is not built")
    if not (pythons := list(other_pythons())):
        pytest.skip("there is no other Python")
    tables = [IdLookup.from_dictionary(np.array(keys, np.uint64)) for keys in ([3, 5], [255])]
    for python in pythons:
        done = subprocess.run(
            [python, "-I", "-c", OTHER_PYTHON, exported / "model" / "1" / "dlrm" / "_served.so"],
            input=json.dumps([[array.tolist() for array in table] for table in tables]),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        absent = [False, False, False, True, False, False]
        assert json.loads(done.stdout) == [-1, [7, -12], absent, [2, 1, 0, 1]]


@pytest.mark.parametrize("name", ["../evil", "", ".."])
def test_a_name_that_is_no_directory_of_the_repository_is_refused(export, trained, tmp_path, name):
    with pytest.raises(ValueError, match="--triton-model-name '.*': expected the name of one"):
        export(trained, tmp_path / "models", f"--triton-model-name={name}")
    assert not list(tmp_path.iterdir())


def test_tables_that_quantize_badly_are_refused(export, trained, tmp_path, monkeypatch):
    monkeypatch.setitem(exporter.MAX_AUC_CHANGE, "fp16", -1)
    with pytest.raises(ValueError, match="ranks otherwise than the checkpoint"):
        export(trained, tmp_path, "--embedding_precision=fp16")
    assert not list(tmp_path.iterdir())


def test_a_model_that_disagrees_is_not_written(export, trained, tmp_path, monkeypatch):
    python = PLATFORMS["python"]

    def write_other(module, example, directory):
        module.scored[0].output.bias.data += 0.01
        python.write(module, example, directory)

    monkeypatch.setitem(PLATFORMS, "python", python._replace(write=write_other))
    with pytest.raises(ValueError, match=r"scores otherwise .* differs by 0\.01"):
        export(trained, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_named(export, exported, trained, other_trained, tmp_path):
    def refused(message, *flags, directory=tmp_path / "repository"):
        with pytest.raises((ValueError, OSError), match=message):
            export(trained, directory, *flags)

    class NoCheckpoint:
        checkpoint = tmp_path

    with pytest.raises(FileNotFoundError, match="no checkpoint here"):
        export(NoCheckpoint, tmp_path / "repository")
    refused("its transform is not that of", f"--dataset={other_trained.dataset}")
    missing = tmp_path / "none"
    refused(
        f"--dataset {missing}: expected a dataset's directory, got none", f"--dataset={missing}"
    )
    for delay in ("-1", "nan", "inf"):
        refused("triton_dyn_batching_delay.*60000", f"--triton-dyn-batching-delay={delay}")
    refused("triton_max_batch_size=0: .*positive", "--triton-max-batch-size=0")
    file = tmp_path / "file"
    file.touch()
    refused("expected a directory that may be written in", directory=file)
    refused("no served model", "--update")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    shutil.copytree(exported, tmp_path / "repository")
    refused("there is a model of that name")


def test_a_dataset_with_other_ids_judges_where_that_is_allowed(
    export, trained, other_ids, tmp_path, capsys
):
    flags = [f"--dataset={other_ids}", "--ts-trace"]
    with pytest.raises(ValueError, match="its transform is not that of .* categorical 0: id 1 is"):
        export(trained, tmp_path / "repository", *flags)
    assert not (tmp_path / "repository").exists()
    export(trained, tmp_path / "repository", *flags, "--allow-other-transform")
    assert f"note: {other_ids}: its transform is not that of" in capsys.readouterr().out


def test_weights_that_score_no_number_are_not_exported(export, trained, tmp_path):
    checkpoint, row = trained_model.overflowing(trained, tmp_path)
    ruined = trained._replace(checkpoint=checkpoint)
    with pytest.raises(
        ValueError, match=f"test row {row}: expected a finite score, got (nan|-?inf)"
    ):
        export(ruined, tmp_path / "repository", f"--dataset={trained.dataset}")
    assert not (tmp_path / "repository").exists()


def test_an_update_adds_a_version_of_the_same_kind(export, exported, trained, tmp_path):
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "model" / "config.pbtxt").read_text()
    export(trained, tmp_path, "--update", "--embedding_precision=fp16")
    export(trained, tmp_path, "--update", "--triton-model-version=9")
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == ["1", "2", "9", "config.pbtxt"]
    assert (tmp_path / "model" / "config.pbtxt").read_text() == before
    for flags, message in (
        (["--ids=int32"], "must have the inputs of the others.*TYPE_INT64.*TYPE_INT32"),
        (["--no-raw"], "must have the inputs of the others"),
        (["--output-kind=probability"], "the output_kind of the others, logit, got probability"),
        (["--onnx"], "the platform of the others, python, got onnx"),
        (["--triton-model-version=9"], "expected more than 9"),
    ):
        with pytest.raises(ValueError, match=message):
            export(trained, tmp_path, "--update", *flags)


@pytest.mark.slow
def test_an_ensemble_takes_no_other_transform(export, trained, other_trained, tmp_path):
    export(trained, tmp_path, "--onnx")
    export(trained, tmp_path, "--onnx", "--update")
    with pytest.raises(ValueError, match="expected the transform of the new version, got another"):
        export(other_trained, tmp_path, "--onnx", "--update")
    shutil.rmtree(tmp_path / "model_transform")
    assert not (tmp_path / "model" / "3").exists()


@pytest.mark.slow
def test_tables_beyond_2_gb_are_written(export, tmp_path):
    """ONNX files are limited to 2 GB; weights go in a second file."""
    from dlrm.model.config import DLRMConfig
    from dlrm.model.dlrm import DLRM
    from dlrm.serving.network.exportable import Exportable

    if shutil.disk_usage(tmp_path).free < 8e9:
        pytest.skip("needs 8 GB of disk")
    sizes = {"embedding_dim": 4, "bottom_mlp_sizes": (4,), "top_mlp_sizes": (1,)}
    model = DLRM(DLRMConfig((10,), 2, **sizes), seed=1)
    rows = 2**31 // 16 + 1000
    weight = torch.zeros(rows, 4)
    weight[-1] = 7.0
    exported = Exportable(model, weight)
    exported.sizes.fill_(rows)
    inputs = torch.ones(2, 2), torch.tensor([[rows - 1], [0]])
    PLATFORMS["onnx"].write(exported, inputs, tmp_path)
    assert (tmp_path / "model.onnx" / "model.onnx.data").stat().st_size > 2**31
    score = PLATFORMS["onnx"].open(tmp_path)
    with torch.no_grad():
        expected = exported(*inputs).numpy()
    np.testing.assert_allclose(score(*(x.numpy() for x in inputs)), expected, rtol=1e-5)
    assert abs(expected[0] - expected[1]) > 1e-3
    shutil.rmtree(tmp_path / "model.onnx")
