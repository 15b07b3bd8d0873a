import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlrm import ops
from dlrm.ops.library import cuda_kernels_available, cuda_switches, why_not_cuda_kernels

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]

# Compares every operator with its reference, and prints what is refused.
SCRIPT = """
import sys
import torch
{prepare}
from dlrm import ops
sys.path.insert(0, {folder!r})
from op_cases import CASES, check
for case in CASES:
    for shape in case.shapes[1:3]:
        check(case, shape, torch.float32)
weight, offsets = torch.randn(30, 8), torch.tensor([0, 10, 30])
ids = torch.tensor([[1, 2], [9, 19], [1, 20]], dtype=torch.int16)
lengths, bag_ids = torch.tensor([[1, 0], [2, 3]]), torch.tensor([9, 1, 1, 0, 19, 5])
print(ops.native_available(), ops.instruction_set())
for bad in (
    lambda: ops.joint_embedding(weight, ids, offsets),
    lambda: ops.joint_embedding(weight, bag_ids, offsets, lengths - 1),
    lambda: ops.joint_embedding(weight, bag_ids[1:], offsets, lengths),
    lambda: ops.joint_embedding(weight, bag_ids * 2, offsets, lengths),
):
    try:
        bad()
    except RuntimeError as error:
        print(error)
"""
HIDE = """
from pathlib import Path
exists, load = Path.exists, torch.ops.load_library
Path.exists = lambda path: path.name != "_ops_cpu.so" and exists(path)
def missing(path):
    raise OSError("cannot open shared object file")
torch.ops.load_library = missing
"""
FOREIGN = """
def foreign(path):
    raise OSError("wrong ELF class: ELFCLASS32")
torch.ops.load_library = foreign
"""


def run_script(prepare):
    code = SCRIPT.format(prepare=prepare, folder=str(Path(__file__).parent))
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)


def test_references_give_the_same_without_the_library():
    fallback = run_script(HIDE)
    assert (
        fallback.stdout
        == """\
False none
joint_embedding: id 20 of table 1 in batch row 2: expected 0 <= id < 20
joint_embedding: length -1 of table 1 in batch row 0: \
expected 0 <= length <= 6, the number of ids
joint_embedding: lengths add up to 6: expected the number of ids, 5
joint_embedding: id 18 of table 0 in batch row 0: expected 0 <= id < 10
"""
    )
    (line,) = fallback.stderr.splitlines()
    assert "plain-torch references run instead of the native ops" in line
    assert "was not built; `make venv` in " in line
    assert "`python setup.py build_ext --inplace`" in line


def test_a_library_of_another_machine_is_logged_and_left_alone(native):
    fallback = run_script(FOREIGN)
    assert fallback.stdout.startswith("False none")
    (line,) = fallback.stderr.splitlines()
    assert "ELFCLASS32" in line


def test_torch_works_in_a_directory_with_a_triton_folder(tmp_path):
    (tmp_path / "triton").mkdir()  # like the repository's: no Triton compiler
    code = (
        "import triton\n"  # as `python -m triton.deployer` does
        "import dlrm.ops, torch\n"
        "torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)\n"
        "torch.compile(lambda x: x + 1, backend='aot_eager')(torch.zeros(1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


def test_an_instruction_set_can_be_limited_and_raised_again(native):
    best = ops.instruction_set()
    assert ops.instruction_set(limit="generic") == "generic"
    assert ops.instruction_set() == "generic"
    assert ops.instruction_set(limit="avx512_bf16") == best


def test_an_unknown_instruction_set_is_refused(native):
    with pytest.raises(ValueError, match="mmx"):
        ops.instruction_set(limit="mmx")


def test_tensors_on_several_devices_are_named():
    weight, ids, offsets = torch.zeros(4, 2), torch.zeros(1, 1).long(), torch.tensor([0, 4])
    with pytest.raises(RuntimeError, match="one device, got dense on cpu, embeddings on meta"):
        ops.dot_interaction(torch.zeros(1, 2), torch.zeros(1, 1, 2, device="meta"))
    with pytest.raises(RuntimeError, match="joint_embedding: .* weight on cpu, ids on meta"):
        ops.joint_embedding(weight, ids.to("meta"), offsets)
    with pytest.raises(RuntimeError, match="joint_embedding: .* lengths on meta"):
        ops.joint_embedding(weight, ids[0], offsets, ids.to("meta"))
    message = "row_update_: .* weight on cpu, rows on cpu, grad on meta"
    args = ids[0], torch.zeros(1, 2, device="meta"), torch.tensor(0.1)
    with pytest.raises(RuntimeError, match=message):
        ops.row_update_(ops.ROW_RULES["sgd"], weight, [], *args)
    compiled = torch.compile(ops.joint_embedding, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="weight on cpu, ids on meta"):
        compiled(weight, ids.to("meta"), offsets)


def test_why_there_are_no_cuda_kernels_is_known():
    if cuda_kernels_available():
        assert why_not_cuda_kernels() is None
    elif torch.version.cuda is None:
        assert "built without CUDA" in why_not_cuda_kernels()
    else:
        assert "_ops_cuda.so" in why_not_cuda_kernels()


def test_the_kernels_switches_are_torchs_settings():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = False
        assert cuda_switches() == 0
        matmul.allow_tf32 = True
        assert cuda_switches() == 1
        torch.use_deterministic_algorithms(True)
        assert cuda_switches() == 3
    finally:
        matmul.allow_tf32 = before
        torch.use_deterministic_algorithms(False)
