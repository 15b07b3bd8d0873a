"""Ends of training commands: exit codes, messages of errors, and signals of a launcher."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from dlrm.command_line import (
    Terminated,
    flush_output,
    name_standard_output,
    say_error,
    terminable,
)
from dlrm.distributed import OtherRankError, World, launch, shutdown
from dlrm.documents import one_line
from dlrm.flags import Values
from dlrm.remote.cache import Cache
from dlrm.remote.mirror import NOT_UPLOADED, NotUploadedError
from dlrm.remote.uri import Uri, is_uri
from dlrm.tasks.config import USER_ERRORS
from dlrm.train.checkpoints.directory import last_checkpoint
from dlrm.train.log import StoppedError
from dlrm.train.trainer import Trainer

STOPPED = 75  # EX_TEMPFAIL: stopped by a signal and saved; the same command with --resume continues
_PATIENCE = 2.0  # seconds that a failed rank waits for collectives
_LESS_MEMORY = (
    "A smaller --batch_size needs less, and --gradient_accumulation_steps computes it in parts; "
    "dlrm doctor says what is free"
)
_LOST = re.compile(r"connect|broken pipe|timed out|timeout", re.IGNORECASE)


def exit_with(run: Callable[[], object], values: Values) -> None:
    """Runs a command and ends the process with its exit code.

    Exit codes: 0; 1 after an error, which is printed on one line; 74 a training whose last
    checkpoint is not at its URI (`dlrm.remote.mirror`); 75 a training stopped by SIGTERM; 130
    interrupted from the keyboard; 143 terminated before or after the training. With several ranks
    SIGTERM ends a rank at once, since an exception would not end a rank that waits for another.
    """
    code: int | str = 0
    at_once = False  # without waiting for threads that wait for a store
    name_standard_output()
    try:
        with terminable(at_once=launch().size > 1):
            try:
                run()
            finally:
                flush_output()
    except OtherRankError:
        code = 1
    except StoppedError as stopped:
        code = STOPPED
        if _rank() == 0:
            print(stopped, file=sys.stderr, flush=True)
            _tell_launcher(str(stopped))
    except NotUploadedError as error:
        code, at_once = NOT_UPLOADED, True
        say_error(error, code)
        _tell_launcher(str(error))
    except USER_ERRORS as error:
        code = _named(one_line(error))
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0].partition(" Of the allocated")[0]
        code = _named(f"{reason} {_LESS_MEMORY}")
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error) or "alloc_cpu" in str(error):
            reason = str(error).splitlines()[0].partition("DefaultCPUAllocator: ")[2]
            code = _named(f"{reason or 'out of memory'}. {_LESS_MEMORY}")
        elif "dlrm/_ops_cuda.so" in str(error):  # its message has the remedy
            code = _named(str(error).splitlines()[0])
        elif dist.is_initialized() and _is_lost_connection(error):
            reason = str(error).splitlines()[0].partition(". This")[0]
            code = f"rank {_rank()} ends, since another rank has gone: {reason}"
        else:
            raise
    except (KeyboardInterrupt, Terminated) as stop:
        code, how = (143, "terminated") if isinstance(stop, Terminated) else (130, "interrupted")
        at_once = is_uri(values["save_checkpoint_path"])
        saves = " (--checkpoint_freq saves on the way, and SIGTERM before it ends a training)"
        last = _last_checkpoint(values)
        kept = f"--resume continues from {last}" if last else f"nothing was saved{saves}"
        if _rank() == 0:
            print(f"{how}; {kept}", file=sys.stderr)
    if isinstance(code, str):
        _tell_launcher(code)
    if dist.is_initialized():
        # A failed rank goes first where others wait for it: they end as its connections close.
        shutdown(World(dist.get_rank(), dist.get_world_size()), None if code == 0 else _PATIENCE)
    if at_once:
        _end_at_once(code)
    sys.exit(code)


def _is_lost_connection(error: RuntimeError) -> bool:
    """Returns whether a transfer failed because another rank ended; gloo has no own exception."""
    of_transfer = isinstance(error, dist.DistError) or "gloo/transport/" in str(error)
    return of_transfer and bool(_LOST.search(str(error)))


def _last_checkpoint(values: Values) -> Path | None:
    """Returns the newest checkpoint of a command, or of its training of a seed."""
    path = values["save_checkpoint_path"]
    if not path:
        return None
    if is_uri(path):
        path = Cache.of_flags(values).output_path(Uri.parse(path))
    runs = Path(path).glob("seed-*") if values.get("seeds") else [Path(path)]
    found = [last for run in runs if (last := last_checkpoint(run))]
    return max(found, key=lambda last: last.stat().st_mtime, default=None)


def _tell_launcher(message: str) -> None:
    """Gives torchrun the message of an error, which it prints at the end of its own report."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        facts = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": facts}), encoding="utf-8")


def _end_at_once(code: int | str) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):
            stream.flush()
    os._exit(int(code))


def _named(reason: str) -> str:
    """Returns the line of an error, with its rank unless that is the first."""
    named = _rank() == 0 or reason.startswith("rank")
    return f"error: {'' if named else f'rank {_rank()}: '}{reason}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def stopped_by_sigterm(trainer: Trainer) -> Iterator[None]:
    """Within the block SIGTERM ends the training after a step, with a checkpoint.

    After the training has ended this way, or one of several ranks has failed, SIGTERM no longer has
    an effect: each rank ends with its own exit code, and none by the signal.
    """

    def stop(*_: object) -> None:
        trainer.stop_requested = True

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException as error:
        if isinstance(error, StoppedError) or dist.is_initialized():
            before = signal.SIG_IGN  # torchrun sends it to all ranks once the first has ended
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
