"""`bind.sh` gives each process its share of the cores."""

import os
import subprocess
import sys

SAYS_CORES = "import os; print(*sorted(os.sched_getaffinity(0)))"


def bind(root, *words, **variables):
    command = [root / "bind.sh", *words, "--", sys.executable, "-S", "-c", SAYS_CORES]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_each_rank_is_bound_to_its_share_of_the_cores(root):
    cores = sorted(os.sched_getaffinity(0))
    ranks = min(2, len(cores))
    bound = []
    for rank in range(ranks):
        done = bind(root, "--cpu=exclusive", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        assert done.returncode == 0, done.stderr
        bound += [[int(core) for core in done.stdout.split()]]
    assert {len(own) for own in bound} == {len(cores) // ranks}
    assert sum(bound, []) == cores[: len(cores) // ranks * ranks]
    assert bind(root, "--cpu=off").stdout.split() == [str(core) for core in cores]
    many = str(len(cores) + 1)
    for words, variables, message in (
        (["--cpu=dgxa100_ccx.sh"], {}, "--cpu=dgxa100_ccx.sh: expected exclusive, node or off"),
        (["--gpu"], {}, "expected --cpu=exclusive|node|off"),
        ([], {"LOCAL_WORLD_SIZE": many}, f"expected at most {len(cores)} ranks"),
    ):
        done = bind(root, *words, **variables)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: bind.sh: {message}")
