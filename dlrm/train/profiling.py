"""Shows how a training step spends its time: `--profile N` records some steps of a run."""

from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

LEAST_WARMUP = 5  # steps until libraries have chosen their kernels and graphs are recorded


class StepProfiler:
    """Records training steps after a warm-up, prints the longest operators and writes a trace.

    The trace, `profile-rank<r>.json.gz`, opens in Perfetto (ui.perfetto.dev). Other steps are not
    slowed down.

    Args:
        warmup: earlier steps, at least `LEAST_WARMUP`.
    """

    def __init__(
        self,
        steps: int,
        warmup: int,
        folder: Path,
        rank: int,
        device: str,
        line: Callable[[str], object],
    ):
        self._steps, self._warmup = steps, max(warmup, LEAST_WARMUP)
        self._path, self._line = folder / f"profile-rank{rank}.json.gz", line
        self._on_gpu, self._done = device.startswith("cuda"), 0
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._on_gpu],
            schedule=schedule(wait=self._warmup - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._report,
        )
        self._profile.start()

    def after_step(self, step: int) -> None:
        """Counts a finished step of the training."""
        self._done += 1
        self._profile.step()

    def finish(self) -> None:
        """Prints a note if the run was too short for the recording."""
        if self._done < self._warmup + self._steps:
            follows = f"--profile {self._steps} follows {self._warmup} steps of warm-up"
            self._line(f"note: no profile: {follows}, and the run took {self._done}")

    def close(self) -> None:
        """Ends a running recording, without a report."""
        self._profile.on_trace_ready = None
        self._profile.stop()

    def _report(self, done: profile) -> None:
        self._line(f"operators that took longest in {self._steps} steps:")
        order = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        for line in done.key_averages().table(sort_by=order, row_limit=10).splitlines():
            self._line(line)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            self._line(f"note: no trace: {error}")
            return
        self._line(f"profile of {self._steps} steps: {self._path} (open it in ui.perfetto.dev)")
