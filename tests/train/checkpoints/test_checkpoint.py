"""Any table layout reads checkpoints of any other; broken and foreign ones are named."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from dlrm.distributed import World
from dlrm.manifest import write_manifest
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.scripts.checkpoint import describe
from dlrm.tasks.run import check_unchanged
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.dense import dense_optimizer
from dlrm.train.optim.row_optimizers import table_optimizer

SMALL = DLRMConfig(
    table_sizes=(7, 20, 3),
    num_numerical_features=2,
    embedding_dim=4,
    bottom_mlp_sizes=(4,),
    top_mlp_sizes=(8, 1),
)


def parameters(kind="adam", seed=1, trained=True, device="cpu", **changes) -> Parameters:
    config = dataclasses.replace(SMALL, **changes)
    model = DLRM(config, World(device=device), seed=seed)
    tables = model.embeddings.table_parameters()
    held = {id(weight) for weight, _ in tables}
    low = model.embeddings.lower_halves()
    optimizers = [
        table_optimizer(kind, [weight for weight, _ in tables], low),
        dense_optimizer("adam", [p for p in model.parameters() if id(p) not in held]),
    ]
    result = Parameters(model, tables, optimizers)
    return train(result) if trained else result


def train(result: Parameters, steps=3) -> Parameters:
    set_learning_rate(result.optimizers, 0.1)
    for step in range(steps):
        device = result.model.output.weight.device
        ids = torch.tensor([[step, 2 * step + 1, 2], [step, 5, 1]], device=device)
        result.model(torch.ones(2, 2, device=device), ids).square().sum().backward()
        for optimizer in result.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return result


def tables(result: Parameters):
    return [table.clone() for table in result.model.embeddings.tables()]


BF16 = {"embedding_dtype": "bf16"}
DTYPES, DTYPE_NAMES = [{}, BF16], ["fp32", "bf16"]
CLOSE = {"atol": 1e-4, "rtol": 1e-2}  # steps of 0.1; a bfloat16 weight may be the next one


@pytest.mark.parametrize("kind", ["adagrad", "adam"])
@pytest.mark.parametrize("tables", DTYPES, ids=DTYPE_NAMES)
def test_a_run_goes_on_on_another_device(tmp_path, kind, tables, device):
    for writer, reader in {("cpu", device), (device, "cpu")}:
        whole = parameters(kind, device=writer, **tables)
        Checkpoint.save(tmp_path / f"on {writer}", whole, {"flags": {}}, {})
        loaded = parameters(kind, seed=9, trained=False, device=reader, **tables)
        Checkpoint(tmp_path / f"on {writer}").load(loaded, resume=True)
        weights = [
            {name: value.cpu() for name, value in result.model.state_dict().items()}
            for result in (train(whole), train(loaded))
        ]
        low = "embeddings.weight_low"  # rounding's last bits
        torch.testing.assert_close(*({k: w[k] for k in w if k != low} for w in weights), **CLOSE)


@pytest.mark.parametrize("reader", DTYPES, ids=DTYPE_NAMES)
@pytest.mark.parametrize("writer", DTYPES, ids=DTYPE_NAMES)
def test_tables_of_either_dtype_read_those_of_the_other(tmp_path, writer, reader):
    saved = parameters(**writer)
    Checkpoint.save(tmp_path / "c", saved, {"flags": {}}, {})
    loaded = parameters(seed=2, trained=False, **reader)
    Checkpoint(tmp_path / "c").load(loaded)
    assert all(map(torch.equal, tables(loaded), tables(saved)))
    x, ids = torch.ones(1, 2), torch.tensor([[1, 1, 1]])
    rounding = {"atol": 0.05, "rtol": 0.05} if BF16 in (reader, writer) else {}
    torch.testing.assert_close(loaded.model(x, ids), saved.model(x, ids), **rounding)


@pytest.mark.parametrize("block_bytes", [1, 96, 1 << 24])
def test_bfloat16_tables_are_float32_rows_on_disk(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr("dlrm.train.checkpoints.tables.BLOCK_BYTES", block_bytes)
    saved = parameters(**BF16)
    Checkpoint.save(tmp_path / "c", saved, {"flags": {}}, {})
    raw = np.fromfile(tmp_path / "c/tables/1.bin", dtype="<f4").reshape(20, 4)
    np.testing.assert_array_equal(raw, tables(saved)[1].numpy())
    assert not torch.equal(tables(saved)[1], tables(saved)[1].bfloat16().float())
    loaded = parameters(seed=2, trained=False, **BF16)
    Checkpoint(tmp_path / "c").load(loaded)
    for name, value in saved.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name


def test_another_architecture_is_refused_by_name_and_changes_nothing(tmp_path):
    Checkpoint.save(tmp_path / "c", parameters(), {"flags": {}}, {})
    other = parameters(trained=False, seed=5, table_sizes=(7, 21, 3), top_mlp_sizes=(16, 1))
    before = tables(other)
    with pytest.raises(ValueError, match="another architecture") as error:
        Checkpoint(tmp_path / "c").load(other)
    assert "table 1: [20, 4] in the checkpoint, [21, 4] here" in str(error.value)
    assert "top_mlp.0.weight: [8, 16] in the checkpoint, [16, 16] here" in str(error.value)
    assert "table 0" not in str(error.value)
    assert all(map(torch.equal, tables(other), before))


@pytest.mark.parametrize(
    ("sizes", "differs"),
    [
        ((7, 20, 3, 9), ["tables: 3 in the checkpoint, 4 here", "table 3: none in the"]),
        ((7, 3), ["table 1: [20, 4] in the checkpoint, [3, 4] here", "table 2: [3, 4] in the"]),
    ],
)
def test_a_checkpoint_with_other_tables_names_them_and_what_to_do(sizes, differs, tmp_path):
    Checkpoint.save(tmp_path / "c", parameters(), {"flags": {}}, {})
    with pytest.raises(ValueError, match="prepare the data with these fields") as error:
        Checkpoint(tmp_path / "c").load(parameters(trained=False, table_sizes=sizes))
    for line in differs:
        assert line in str(error.value)
    assert "table 0" not in str(error.value)
    assert "--continue_from" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: (c / "tables/1.bin").write_bytes(b"0000"), r"tables/1.bin: expected 320 bytes"),
        (lambda c: (c / "tables/1.bin").unlink(), r"tables/1.bin: missing"),
        (lambda c: (c / "manifest.json").unlink(), r"manifest.json: no such file"),
        (
            lambda c: (c / "manifest.json").write_text("{"),
            r"manifest.json: line 1.* no JSON",
        ),
        (lambda c: flip(c / "dense.safetensors"), r"dense.safetensors: expected CRC-32 \w+, got"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_changes_nothing(tmp_path, damage, message):
    Checkpoint.save(tmp_path / "c", parameters(), {"flags": {}}, {})
    damage(tmp_path / "c")
    other = parameters(trained=False, seed=5)
    before = tables(other)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Checkpoint(tmp_path / "c").load(other)
    assert all(map(torch.equal, tables(other), before))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_failed_save_leaves_the_earlier_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    run = CheckpointDirectory(tmp_path / "run")
    run.save(1, parameters(), {"flags": {}}, {"step": 1})
    monkeypatch.setattr(
        "dlrm.train.checkpoints.writer.write_manifest",
        lambda *a, **k: (_ for _ in ()).throw(OSError(28, "full")),
    )
    with pytest.raises(OSError, match="No space left on device: .*step-000000002"):
        run.save(2, parameters(), {"flags": {}}, {"step": 2})
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-000000001"]
    assert Checkpoint(run.last()).load(parameters(trained=False)) == {"step": 1}


def test_a_half_written_checkpoint_is_passed_over_and_removed(tmp_path):
    run = CheckpointDirectory(tmp_path / "run")
    run.save(1, parameters(), {"flags": {}}, {"step": 1})
    (tmp_path / "run/.step-000000002.partial-77").mkdir()
    (tmp_path / "run/step-000000003").mkdir()  # no manifest
    again = CheckpointDirectory(tmp_path / "run")
    assert again.last().name == "step-000000001"
    assert (tmp_path / "run/.step-000000002.partial-77").exists()  # may be another run's
    again.claim()
    assert not (tmp_path / "run/.step-000000002.partial-77").exists()


def test_a_directory_belongs_to_one_run_at_a_time(tmp_path):
    run = CheckpointDirectory(tmp_path)
    run.claim()
    (tmp_path / ".step-000000002.partial-77").mkdir()  # it is writing this
    another = CheckpointDirectory(tmp_path)
    with pytest.raises(BlockingIOError, match="another run saves here"):
        another.claim()
    assert (tmp_path / ".step-000000002.partial-77").exists()
    run.release()
    another.claim()


def test_the_last_few_and_the_best_are_kept(tmp_path):
    run = CheckpointDirectory(tmp_path / "run", keep=2)
    for step in range(1, 6):
        run.save(step, parameters(), {"flags": {}}, {"step": step})
        if step == 2:
            run.mark_best({"step": step})
    names = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert names == ["step-000000002", "step-000000004", "step-000000005"]
    assert Checkpoint.open(tmp_path / "run").path.name == "step-000000002"
    assert Checkpoint.open(tmp_path / "run/step-000000005").path.name == "step-000000005"


def test_reading_a_runs_directory_changes_nothing_in_it(tmp_path):
    CheckpointDirectory(tmp_path).save(1, parameters(), {"flags": {}}, {})
    (tmp_path / ".step-000000002.partial-77").mkdir()  # being written by another process
    before = sorted(tmp_path.rglob("*"))
    assert Checkpoint.open(tmp_path).path.name == "step-000000001"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("content", ["", "{}", '{"step": 7}'])
def test_a_damaged_note_of_the_best_is_named(tmp_path, content):
    CheckpointDirectory(tmp_path).save(1, parameters(), {"flags": {}}, {})
    (tmp_path / "best.json").write_text(content)
    with pytest.raises(ValueError, match="best.json"):
        Checkpoint.open(tmp_path)


def test_other_optimizers_are_refused_and_nothing_is_changed(tmp_path):
    Checkpoint.save(tmp_path / "c", parameters("adam"), {"flags": {}}, {})
    other = parameters("sgd", trained=False, seed=5)
    before = tables(other)
    with pytest.raises(ValueError, match=r"optimizers \['RowAdam', 'Adam'\], here \['RowSGD'"):
        Checkpoint(tmp_path / "c").load(other, resume=True)
    assert all(map(torch.equal, tables(other), before))


def test_a_directory_without_checkpoints_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint here"):
        Checkpoint.open(tmp_path)
    assert not any(tmp_path.iterdir())


def test_no_pickle_is_written(tmp_path):
    Checkpoint.save(tmp_path / "c", parameters(), {"flags": {}}, {})
    suffixes = {path.suffix for path in (tmp_path / "c").rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors", ".bin", ".md"}
    assert json.loads((tmp_path / "c/manifest.json").read_text())["kind"] == "checkpoint"


def test_changed_flags_are_all_named():
    saved = {"--lr": 1.0, "--seed": 1, "--amp": False}
    check_unchanged("run", saved, dict(saved))
    with pytest.raises(ValueError, match="cannot resume") as error:
        check_unchanged("run", saved, {"--lr": 2.0, "--seed": 1, "--amp": True})
    assert "--lr: 1.0 in the checkpoint, now 2.0" in str(error.value)
    assert "--amp: False in the checkpoint, now True" in str(error.value)
    assert "--seed" not in str(error.value)


def neither_reads(checkpoint, message):
    """Checks that a checkpoint is refused, also with the checksums of its damaged files."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    own = ("kind", "version", "files", "own_crc32")
    write_manifest(checkpoint, "checkpoint", **{k: v for k, v in manifest.items() if k not in own})
    with pytest.raises(ValueError, match=message):
        Checkpoint(checkpoint).load(parameters(trained=False), resume=True)
    with pytest.raises(ValueError, match=message):
        describe(checkpoint)


def header(text, data=b""):
    return len(text).to_bytes(8, "little") + text + data


BAD_TENSORS = {
    "empty": b"",
    "no header": b"1234567",
    "a header of 2**63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "no JSON": header(b"no json "),
    "offsets beyond the end": header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "another type": header(b'{"a":{"dtype":"X32","shape":[1],"data_offsets":[0,4]}}', b"0000"),
    "deep": header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
}


@pytest.mark.parametrize("what", BAD_TENSORS)
@pytest.mark.parametrize("name", ["dense", "optimizer"])
def test_a_file_of_tensors_that_is_none_is_named(tmp_path, what, name):
    Checkpoint.save(tmp_path / "c", parameters(), {"flags": {}}, {})
    (tmp_path / "c" / f"{name}.safetensors").write_bytes(BAD_TENSORS[what])
    neither_reads(tmp_path / "c", rf"{name}\.safetensors: damaged, or no safetensors")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a map"),
        ('{"tables": null}', "tables: expected a list, got None"),
        ('{"tables": [5]}', "tables: entry 0: expected rows"),
        ('{"tables": [{"rows": 1, "dim": 1, "state": ["../../x"]}]}', "tables: entry 0"),
        ('{"tables": [{"rows": -1, "dim": 1, "state": []}]}', "tables: entry 0"),
        ('{"flags": []}', r"flags: expected a map, got \[\]"),
    ],
)
def test_a_configuration_of_another_form_is_named(tmp_path, text, message):
    Checkpoint.save(tmp_path / "c", parameters(), {"flags": {}}, {})
    (tmp_path / "c" / "config.json").write_text(text)
    neither_reads(tmp_path / "c", rf"config\.json: {message}")


def test_a_link_out_of_a_checkpoint_is_refused(tmp_path):
    Checkpoint.save(tmp_path / "c", parameters(), {"flags": {}}, {})
    (tmp_path / "c" / "tables" / "0.bin").rename(tmp_path / "0.bin")
    (tmp_path / "c" / "tables" / "0.bin").symlink_to(tmp_path / "0.bin")
    with pytest.raises(ValueError, match=r"'tables/0\.bin': .* symbolic link to .*0\.bin$"):
        Checkpoint(tmp_path / "c").load(parameters(trained=False))
