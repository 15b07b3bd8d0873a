"""Shows how a training step spends its time: `--profile N` records some steps of a run."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from dlrm.pages.pictures import write_picture

LEAST_WARMUP = 5  # steps until libraries have chosen their kernels and graphs are recorded
_LONGEST = 10  # number of printed operators
# Categories by a part of the name; the first match counts.
_CATEGORIES = {
    "transfers": ("c10d", "nccl", "gloo", "all_reduce", "allreduce", "send", "recv", "broadcast"),
    "tables": ("embedding", "::row_", "RowS", "RowA", "RowW", "index_select"),
    "interaction": ("interaction", "bmm"),
    "products, convolutions": ("mm", "linear", "gemm", "conv", "dot", "attention", "cutlass"),
    "optimizers": ("_fused_", "multi_tensor", "Optimizer", "foreach"),
    "copies": ("copy", "::cat", "Memcpy", "Memset", "contiguous", "fill", "zero", "clone"),
}
_REST = "other"


class StepProfiler:
    """Records training steps after a warm-up, and writes a trace, and a picture of one step.

    The trace, `profile-rank<r>.json.gz`, opens in Perfetto (ui.perfetto.dev). The picture,
    `profile-rank0.png`, is drawn if matplotlib is installed. Other steps are not slowed down.

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
        self._path, self._rank, self._line = folder / f"profile-rank{rank}.json.gz", rank, line
        self._on_gpu, self._done = device.startswith("cuda"), 0
        self._profile: profile | None = None

    def after_step(self) -> None:
        """Counts a finished step of the training."""
        self._done += 1
        if self._done == self._warmup:
            self._start()
        elif self._profile and self._done < self._warmup + self._steps:
            self._profile.step()
        elif self._profile:
            self._report(self._stop())

    def finish(self) -> None:
        """Ends the recording, with a note if the run was too short for it."""
        if self._done < self._warmup + self._steps:
            self._line(
                f"note: no profile: --profile {self._steps} follows {self._warmup} steps of "
                f"warm-up, and the run took {self._done}"
            )
        self.close()

    def close(self) -> None:
        """Ends a running recording, without a report."""
        if self._profile:
            self._stop()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._on_gpu]
        self._profile = profile(activities=activities, schedule=lambda _: ProfilerAction.RECORD)
        self._profile.start()

    def _stop(self) -> profile:
        assert self._profile is not None
        if self._on_gpu:
            torch.cuda.synchronize()
        done, self._profile = self._profile, None
        done.stop()
        return done

    def _report(self, done: profile) -> None:
        for line in _longest(done, self._steps):
            self._line(line)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            self._line(f"note: no trace: {error}")
            return
        self._line(f"profile of {self._steps} steps: {self._path} (open it in ui.perfetto.dev)")
        if self._rank == 0:
            picture = self._path.with_name("profile-rank0.png")
            problem = draw_step(done.events() or [], picture)
            self._line(problem or f"profile of one step: {picture}")


def _longest(done: profile, steps: int) -> Iterable[str]:
    """Returns lines about the longest operators by their own time, without those they call."""
    found = [e for e in done.key_averages() if not e.key.startswith("ProfilerStep")]
    device = any(e.self_device_time_total for e in found)

    def time_of(event: Any) -> float:
        return event.self_device_time_total if device else event.self_cpu_time_total

    total = sum(map(time_of, found)) or 1.0
    yield f"operators that took longest on the {'GPU' if device else 'CPU'}, in ms a step:"
    for event in sorted(found, key=time_of, reverse=True)[:_LONGEST]:
        share, each = time_of(event) / total, time_of(event) / steps / 1000
        yield f"  {share:6.1%}  {each:8.3f}  {event.count / steps:6.1f} calls  {event.key[:60]}"


def category(name: str) -> str:
    """Returns the category of an operator or kernel, by its name."""
    fits = (kind for kind, parts in _CATEGORIES.items() if any(part in name for part in parts))
    return next(fits, _REST)


def timeline(events: Sequence[FunctionEvent]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Returns the operators and kernels of the last recorded step over time.

    Args:
        events: events of a profile, whose steps are named "ProfilerStep#<number>".

    Returns:
        ("CPU" or "GPU", category) -> start and duration of each operator or kernel, in ms since the
        step began. An operator that another one with a category calls is left out.
    """
    steps = [e for e in events if _is_step(e) and e.device_type == DeviceType.CPU]
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
    if not steps:
        return rows
    step = max(steps, key=lambda event: event.time_range.start).time_range
    for event in filter(_is_shown, events):
        begin = event.time_range.start - step.start
        if 0 <= begin <= step.elapsed_us():
            where = "CPU" if event.device_type == DeviceType.CPU else "GPU"
            row = rows.setdefault((where, category(event.name)), [])
            row.append((begin / 1000, event.time_range.elapsed_us() / 1000))
    return rows


def _is_step(event: FunctionEvent) -> bool:
    return event.name.startswith("ProfilerStep")


def _is_shown(event: FunctionEvent) -> bool:
    if _is_step(event):
        return False
    if event.device_type != DeviceType.CPU:
        return not event.is_user_annotation  # annotations span kernels
    caller = event.cpu_parent
    while caller is not None:
        if not _is_step(caller) and category(caller.name) != _REST:
            return False
        caller = caller.cpu_parent
    return category(event.name) != _REST or not event.cpu_children


def draw_step(events: Sequence[FunctionEvent], path: Path) -> str | None:
    """Draws the `timeline` of a profile, with a row for each category.

    Returns:
        None, or the reason why nothing was drawn.
    """
    rows, kinds = timeline(events), (*_CATEGORIES, _REST)
    order = sorted(rows, key=lambda row: (row[0], kinds.index(row[1])), reverse=True)

    def draw(figure: Any) -> None:
        figure.set_size_inches(12, 1.5 + 0.4 * len(order))
        axis = figure.subplots()
        labels = []
        for height, (where, kind) in enumerate(order):
            pieces = rows[where, kind]
            axis.broken_barh(pieces, (height - 0.4, 0.8), color=f"C{kinds.index(kind)}")
            labels.append(f"{where}: {kind} ({sum(ms for _, ms in pieces):.2f} ms)")
        axis.set_yticks(range(len(order)), labels)
        axis.set_xlabel("ms since the step began")
        axis.grid(alpha=0.3, axis="x")

    problem = write_picture(path, draw)
    return f"note: no picture of the profile: {problem}" if problem else None
