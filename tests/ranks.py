"""Processes joined over gloo that call functions for the tests until closed."""

import tempfile
import time
from pathlib import Path

from forked import CONTEXT

TIMEOUT = 120  # seconds until a call fails the test and the processes are killed


class Ranks:
    """Starts `size` processes; `call` runs a function in each. Use it in a `with` block."""

    def __init__(self, size):
        self.size = size
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self):
        store = (Path(self._folder.name) / "store").as_uri()
        self._pipes, self._processes = [], []
        for rank in range(self.size):
            here, there = CONTEXT.Pipe()
            arguments = (rank, self.size, store, there)
            process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        return self

    def __exit__(self, *exception):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()

    def alive(self):
        """Returns True while all processes run."""
        return all(process.is_alive() for process in self._processes)

    def call(self, function, arguments=None):
        """Returns `function(world, *arguments[rank])`, or its exception, for each rank."""
        arguments = arguments or [()] * self.size
        for pipe, own in zip(self._pipes, arguments, strict=True):
            pipe.send((function, own))
        end = time.monotonic() + TIMEOUT
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(end - time.monotonic(), 0)):
                answers = results + [other.recv() for other in self._pipes if other.poll()]
                for process in self._processes:
                    process.kill()
                cause = next((one for one in answers if isinstance(one, Exception)), None)
                raise TimeoutError(f"rank {rank} gave no answer in {TIMEOUT} s") from cause
            results.append(pipe.recv())
        return results


def _serve(rank, size, store, pipe):
    from datetime import timedelta

    import seeding
    import torch
    import torch.distributed as dist

    from dlrm.distributed import World

    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)
    world = World(rank, size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        seeding.seed(seeding.SEED + rank)
        try:
            pipe.send(function(world, *arguments))
        except Exception as error:
            pipe.send(error)
    dist.destroy_process_group()
