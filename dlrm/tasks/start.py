"""The start of a command: its processes join, and agree on flags, datasets and checkpoints."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dlrm.distributed import (
    World,
    agreed,
    check_same,
    choose_device,
    from_first,
    join_world,
    launch,
)
from dlrm.flags import Values
from dlrm.manifest import digest
from dlrm.remote.cache import Cache
from dlrm.remote.config import CacheConfig
from dlrm.remote.localize import OWN, READ, localized, show_uris, uris_among
from dlrm.remote.mirror import Mirror, mirrored
from dlrm.remote.objects import open_store, upload
from dlrm.remote.uri import Local, Uri, values_with_uris
from dlrm.settings import settings_of
from dlrm.tasks.config import USER_ERRORS
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.log import StoppedError
from dlrm.version import __version__

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Start(NamedTuple):
    """A command whose processes have joined.

    Attributes:
        values: the flags, with local paths in place of URIs.
        world: the processes.
        mirror: uploads the checkpoints of a training that saves to a URI; None on other ranks.
    """

    values: Values
    world: World
    mirror: Mirror | None


@contextmanager
def started(
    values: Values,
    uris: Mapping[str, str],
    trains: bool,
    ranks_may_differ: frozenset[str] = frozenset(),
    check: Callable[[Values, World], object] = lambda values, world: None,
) -> Iterator[Start]:
    """Joins the processes of a command, which have the same flags, data and checkpoints.

    Args:
        uris: flags that may be URIs, with their roles; see `dlrm.remote.localize.run_locally`.
        trains: whether the command trains.
        ranks_may_differ: flags that may differ between ranks.
        check: raises errors about the flags of a rank.

    Raises:
        ValueError, OSError: the user's error, on all ranks.
    """
    set_deterministic(values["deterministic"])
    world = join(values["base_device"], values["backend"], "backend" in values.given)
    with ExitStack() as stack:
        with agreed(world, *USER_ERRORS):
            values, mirror = _enter_local_paths(stack, values, uris, trains, world)
        values = _with_log_path(values)
        _check_copies({name: values.get(name) for name in ("dataset", "test_dataset")}, world)
        with agreed(world, *USER_ERRORS):
            check(values, world)
        named = values_with_uris(values)  # as hosts may have caches at other places
        shared = {f"--{name}": v for name, v in named.items() if name not in ranks_may_differ}
        check_same({"version of dlrm": __version__, **shared}, world)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = values["tf32"]
        yield Start(values, world, mirror)


def _enter_local_paths(
    stack: ExitStack, values: Values, roles: Mapping[str, str], trains: bool, world: World
) -> tuple[Values, Mirror | None]:
    """Fetches what the flags read by URI, and gives what they write there a local place.

    Checkpoints are uploaded during the training, see `mirrored`, and other files as `stack` ends,
    after the log and the checkpoints are closed. The first rank writes, and has the mirror.
    """
    own_values, mirror = values.without(settings_of(CacheConfig)), None
    if not (uris := uris_among(values, roles)):
        return own_values, mirror
    show_uris()
    cache, held, changed = Cache.of_flags(values), list[Local](), dict[str, Any]()
    stack.callback(held.clear)
    run = uris["save_checkpoint_path"][0] if "save_checkpoint_path" in uris and trains else None
    if run and world.rank == 0:
        how = values["keep_checkpoints"], values["resume"], (StoppedError,)
        mirror = stack.enter_context(mirrored(cache, run, *how))
    for name, (uri, *_) in uris.items():
        act, *words = roles[name].split(", ")
        if act == READ:
            changed[name] = localized(values[name], cache, held, words)
        elif act != OWN:
            inside = run and f"{uri}/".startswith(f"{run.below('')}")  # uploaded with the run
            path = Local.within(cache.output_folder(run if run and inside else uri), uri)
            if world.rank == 0:
                if not inside:
                    stack.enter_context(_uploaded(cache, uri))
                if name == "log_path" and not Path(path).exists():
                    _fetch_log(uri, Path(path))
            changed[name] = path
    return own_values.replaced(changed), mirror


def _fetch_log(uri: Uri, path: Path) -> None:
    """Fetches the lines of earlier runs, which a log keeps."""
    with suppress(FileNotFoundError):
        content = open_store(uri).content(uri.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@contextmanager
def _uploaded(cache: Cache, uri: Uri) -> Iterator[None]:
    """Uploads the output for a URI, with what is written beside it, also after an error."""
    with cache.output(uri):
        root = Path(Local.within(cache.output_folder(uri), uri.root))

        def put() -> None:
            files = (file for file in sorted(root.rglob("*")) if file.is_file())
            upload(open_store(uri), {file.relative_to(root).as_posix(): file for file in files})

        try:
            yield
        except Exception:
            with suppress(OSError):
                put()
            raise
        put()


def _with_log_path(values: Values) -> Values:
    """Puts the log beside the checkpoints, if some are saved and --log_path is not given."""
    folder = values["save_checkpoint_path"]
    if not folder:
        return values
    return values.filled({"log_path": str(Path(folder, Path(values["log_path"]).name))})


def set_deterministic(wanted: bool) -> None:
    """Makes all operators reproducible bit for bit, or as fast as possible.

    Call it before CUDA starts, since cuBLAS reads its variable then. cuDNN follows torch's setting.
    """
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Do not fill memory that is overwritten anyway.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted)


def join(asked: str | None, backend: str, backend_given: bool) -> World:
    """Joins the world of the launcher's variables.

    Args:
        asked: device, or None for CUDA if available.
        backend_given: whether the user chose that backend.
    """
    if launch().size > 1:
        end_with_launcher()
    chosen = choose_device(asked)
    if chosen == "cpu" and backend_given and backend != "gloo" and launch().size > 1:
        raise ValueError(f"--backend {backend}: expected gloo for --base_device cpu")
    if chosen.startswith("cuda:"):
        torch.cuda.set_device(chosen)  # for code that names no device, such as a stream
    return join_world(chosen, backend)


def end_with_launcher() -> None:
    """Sends this process SIGTERM when its launcher dies, so that it saves and ends (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


@contextmanager
def held_checkpoint(
    path: str | None, world: World, newest: bool = False
) -> Iterator[Checkpoint | None]:
    """Yields the checkpoint at a path, the same on every rank; it is not pruned within the block.

    The path may be another on each host, as long as all have copies of the same directory.

    Args:
        newest: see `Checkpoint.open`.
    """
    with ExitStack() as held:
        inside = None
        with agreed(world, ValueError, OSError):
            if path and world.rank == 0:
                found = held.enter_context(Checkpoint.held(path, newest))
                inside = os.path.relpath(found.path, path)
        inside = from_first(inside, world)
        here = Path(path, inside) if path and inside else None
        _check_copies({"checkpoint": here}, world)
        yield Checkpoint(here) if here else None


def _check_copies(paths: Mapping[str, str | os.PathLike | None], world: World) -> None:
    """Checks that all ranks have the same datasets or checkpoints, by their manifests."""
    digests = {
        f"SHA-256 of the {name}'s manifest.json": (path and digest(path)) or "none"
        for name, path in paths.items()
    }
    check_same(digests, world)
