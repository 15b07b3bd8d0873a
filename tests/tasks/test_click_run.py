"""A click-through run says what it cannot do before it starts, on devices that are not here."""

import pytest

from dlrm.distributed import World
from dlrm.scripts.common.dlrm_flags import parse
from dlrm.tasks.settle import settle

FLAGS = [
    *("--dataset_type=synthetic_random", "--synthetic_dataset_table_sizes=40,7"),
    *("--synthetic_dataset_num_entries=64", "--batch_size=8", "--embedding_dim=8"),
    *("--bottom_mlp_sizes=8", "--top_mlp_sizes=8,1"),
]


def opened(*flags, device="meta"):
    world = World(device=device)
    return settle(parse([*FLAGS, *flags]), world).assemble(world)


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--synthetic_dataset_hotness=3", "batches with several ids a table differ in shape"),
        ("--embedding_l2=0.01", "--embedding_l2 counts steps on the host"),
        ("--lr=1", "plain torch runs, which waits for the GPU"),
    ],
)
def test_a_run_that_cannot_be_recorded_says_why(flag, reason, monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr("dlrm.tasks.assembly.cuda_kernels_available", lambda: False)
    run = opened("--cuda_graphs", flag)
    assert run.task.recorder is None
    assert [note for note in run.notes if f"--cuda_graphs is not used; {reason}." in note]


def test_tables_in_files_are_for_the_cpu(tmp_path):
    with pytest.raises(ValueError, match="--table_files .*: expected --base_device cpu, got meta"):
        opened(f"--table_files={tmp_path / 'files'}")
    assert not (tmp_path / "files").exists()
