"""Storage services: objects are listed, read in ranges, written whole, copied to files and back.

S3, Google Cloud Storage, Azure and web servers are reached by obstore, which signs requests, keeps
connections, and repeats failed ones after growing, random pauses. Credentials are found as it finds
them. None is in a message, a manifest or a checkpoint.
"""

import fnmatch
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.command_line import missing_extra
from dlrm.documents import one_line
from dlrm.locks import new_suffix
from dlrm.manifest import BLOCK_BYTES, Checksum, damaged
from dlrm.remote.uri import Uri

IN_FLIGHT = 32  # requests; 10,000 small objects of a local server took as long with 64
PART_BYTES = 2 * BLOCK_BYTES  # of a large object, in one request
NEW = "new"  # of `Store.write`: only if there is no such object
_WAIT = {"connect_timeout": "10s", "timeout": "5m", "pool_max_idle_per_host": "64"}
# A pause is random up to 3 times the last one; with 2 they hardly grow.
_PAUSES = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=10), "base": 3}
_RETRIES = {"max_retries": 25, "retry_timeout": timedelta(seconds=120), "backoff": _PAUSES}
_SOUGHT = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_PROFILE or ~/.aws (with boto3), a web identity, and the role of "
    "the container or machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, gcloud's login, and the service account of the machine",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with a key, a token or a client, and the managed identity",
    "http": "none",
}
_connected_in: set[int] = set()  # processes that have used obstore, before a fork
_REPLACED = "{}: another process has written it meanwhile"
_NO_BUCKET = "NoSuchBucket|ContainerNotFound|bucket does not exist"
_REFUSED = r"credential|\b40[13]\b|AccessDenied"
# The last is of a HEAD.
_EXPIRED = "ExpiredToken|RequestExpired|TokenRefreshRequired|InvalidToken|400 Bad Request: \n"
_PREAMBLE = (  # of obstore's messages, which the URI and the class of the error say
    r"Error performing \w+ \S+ in \S+( -)? ?|^Generic \w+ error: "
    r"|^The operation lacked the necessary privileges .*?: |Server returned non-2xx status code: "
    r"|Debug source.*"
)


class Entry(NamedTuple):
    """An object of a listing."""

    key: str
    size: int  # bytes
    version: str  # the ETag, or else size and time
    modified: float  # seconds since 1970


def open_store(uri: Uri) -> "Store":
    """Returns the store of a URI's bucket, with connections that a process keeps.

    Raises:
        ValueError: the library is missing, or settings in the environment contradict each other.
    """
    return _opened(replace(uri, key=""), os.getpid())


@lru_cache(maxsize=16)
def _opened(root: Uri, process: int) -> "Store":
    if _connected_in - {process}:
        return _ForkedStore(root)  # type: ignore[return-value]
    _connected_in.add(process)
    return Store(root)


def find_entries(uri: Uri) -> list[Entry]:
    """Returns the objects of a URI: the one with its key, all below it, or those of a pattern.

    Raises:
        FileNotFoundError: there is none.
    """
    store = open_store(uri)
    if uri.has_pattern:
        listed = store.entries(uri.before_pattern())
        parts = [
            ".*" if part == "**" else fnmatch.translate(part)[4:-3].replace(".*", "[^/]*")
            for part in uri.key.rstrip("/").split("/")
        ]
        pattern = re.compile(f"{'/'.join(parts)}(/.*)?\\Z")  # with or without more below it
        if found := [entry for entry in listed if pattern.match(entry.key)]:
            return found
        raise FileNotFoundError(f"{uri}: no object of this pattern among {len(listed):,}")
    if uri.key and not uri.key.endswith("/"):
        try:
            return [store.entry(uri.key)]
        except FileNotFoundError:
            if uri.kind == "http":
                raise
    if found := store.entries(uri.folder):
        return found
    raise FileNotFoundError(f"{uri}: no such object, and none below it")


class Store:
    """Objects of one bucket, by obstore.

    Methods raise OSError with the URI: FileNotFoundError for a missing bucket or object,
    PermissionError, and FileExistsError for a write that the condition refuses.
    """

    def __init__(self, root: Uri) -> None:
        self.root, self._kind = root, root.kind
        try:
            import obstore
        except ImportError as error:
            raise ValueError(f"{root}: {missing_extra(error, 'cloud')}") from error
        self._ops = obstore
        self._store = self._connect()

    def _connect(self) -> Any:
        from obstore.store import from_url

        options: dict[str, Any] = {"client_options": dict(_WAIT), "retry_config": _RETRIES}
        endpoint = {
            "s3": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", ""),
            "gs": os.environ.get("STORAGE_EMULATOR_HOST", ""),
            "http": str(self.root),
        }.get(self._kind, "")
        if endpoint and not re.match("https?://[^/]", endpoint):  # obstore would panic
            expected = "address of the service in the environment to begin with http:// or https://"
            raise ValueError(f"{self.root}: expected the {expected}")
        if endpoint.startswith("http://"):  # which the user has chosen
            options["client_options"]["allow_http"] = True
        if self._kind == "gs" and endpoint:
            fields = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
            account = {"gcs_base_url": endpoint, "disable_oauth": True, **fields}
            options["service_account_key"] = json.dumps(account)
        try:
            if self._kind == "s3":
                options |= _aws_options(endpoint)
            return from_url(str(self.root).rstrip("/"), **options)
        except Exception as error:  # obstore's and boto3's have no common class
            raise ValueError(f"{self.root}: {_reason(error)}") from error

    def entries(self, prefix: str) -> list[Entry]:
        """Returns all objects whose keys begin with a prefix, by key."""
        if self._kind == "http":
            place = replace(self.root, key=prefix)
            raise ValueError(f"{place}: expected the URI of a single file of a web server")

        folder = prefix.rpartition("/")[0]  # obstore takes a prefix for whole parts of keys

        def listed() -> list[Entry]:
            chunks = self._ops.list(self._store, folder or None, chunk_size=1000)
            return [_entry(facts) for chunk in chunks for facts in chunk]

        return sorted(one for one in self._call(prefix, listed) if one.key.startswith(prefix))

    def entry(self, key: str) -> Entry:
        """Returns an object's size and version."""
        return _entry(self._call(key, lambda: self._ops.head(self._store, key)))

    def read(self, entry: Entry, begin: int = 0, end: int | None = None) -> Any:
        """Returns bytes of an object as a buffer; OSError if it is no longer this version."""
        end = entry.size if end is None else end
        if begin >= end:
            return b""
        options: Any = {"range": (begin, end)}
        if self._kind != "http" and not entry.version.startswith("size "):
            options["if_match"] = entry.version

        def get() -> Any:
            content = self._ops.get(self._store, entry.key, options=options).bytes()
            if len(content) != end - begin:
                raise OSError(f"expected {end - begin:,} bytes, got {len(content):,}")
            return content

        return self._call(entry.key, get, reading=True)

    def content(self, key: str) -> bytes:
        """Returns all bytes of an object."""
        return bytes(self.read(self.entry(key)))

    def write(self, key: str, content: bytes | Path, only_if: str | None = None) -> str:
        """Writes an object whole, and returns its version.

        Args:
            only_if: `NEW`, or the version that it must have now; None replaces any.
        """
        mode: Any = {None: "overwrite", NEW: "create"}.get(only_if, {"e_tag": only_if})
        if only_if is not None and isinstance(content, Path):
            content = content.read_bytes()  # conditions need a request of one part
        if self._kind == "gs" and isinstance(mode, dict):  # whose conditions are by generation
            facts = self._call(key, lambda: self._ops.head(self._store, key))
            if facts["e_tag"] != only_if:
                raise FileExistsError(_REPLACED.format(replace(self.root, key=key)))
            mode = {"version": facts["version"]}

        def put() -> str:
            return self._ops.put(self._store, key, content, mode=mode)["e_tag"] or ""

        try:
            return self._call(key, put)
        except OSError:
            if only_if is not None:  # a repetition after a lost answer is refused
                with suppress(OSError):
                    if bytes(self.read(entry := self.entry(key))) == content:
                        return entry.version
            raise

    def remove(self, key: str) -> None:
        """Deletes an object; one that is gone already is no error."""
        with suppress(FileNotFoundError):
            self._call(key, lambda: self._ops.delete(self._store, key))

    def _call(self, key: str, act: Callable[[], Any], reading: bool = False) -> Any:
        """Returns the result of a request, made again with a new client after expired credentials.

        Errors of obstore get their URI, and a class that Python's own have.
        """
        try:
            try:
                return act()
            except self._ops.exceptions.BaseError as error:
                if not re.search(_EXPIRED, str(error)):
                    raise
                self._store = self._connect()
                return act()
        except (OSError, self._ops.exceptions.BaseError) as error:
            raise self._error(replace(self.root, key=key), error, reading) from error

    def _error(self, uri: Uri, error: Exception, reading: bool) -> OSError:
        errors, text = self._ops.exceptions, str(error)
        if re.search(_NO_BUCKET, text):
            return FileNotFoundError(f"{uri.root}: no such bucket")
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(f"{uri}: no such object")
        if isinstance(error, errors.AlreadyExistsError | errors.PreconditionError):
            if reading:
                return OSError(f"{uri}: was replaced by another object while it was read")
            return FileExistsError(_REPLACED.format(uri))
        refused = isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError)
        if refused or re.search(f"{_EXPIRED}|(?i:{_REFUSED})", text):
            sought = f"credentials were looked for in {_SOUGHT[self._kind]}"
            return PermissionError(f"{uri}: no permission ({_reason(error)}); {sought}")
        return OSError(f"{uri}: {_reason(error)}")


class _ForkedStore:
    """A store for a process that was forked from one that has used obstore.

    obstore's threads do not exist there, so a new process makes the calls, one at a time.
    """

    def __init__(self, root: Uri) -> None:
        self.root, self._lock = root, threading.Lock()
        self._pipe, theirs = Pipe()
        program = f"from dlrm.remote.objects import serve; serve({theirs.fileno()})"
        command = [sys.executable, "-c", program]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self._process = subprocess.Popen(command, env=variables, pass_fds=[theirs.fileno()])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._ask, name)

    def _ask(self, *call: Any) -> Any:
        with self._lock:
            try:
                self._pipe.send((self.root, *call))
                result, error = self._pipe.recv()
            except EOFError:
                raise OSError(f"{self.root}: the process that reads it has ended") from None
        if error is not None:
            raise error
        return result


def serve(descriptor: int) -> None:
    """Answers the calls of a process that was forked, until it ends."""
    pipe = Connection(descriptor)
    with suppress(EOFError):
        while True:
            root, name, *arguments = pipe.recv()
            try:
                value = getattr(open_store(root), name)(*arguments)
                pipe.send((bytes(value) if name == "read" else value, None))
            except (OSError, ValueError) as error:
                pipe.send((None, type(error)(str(error))))


def _aws_options(endpoint: str) -> dict[str, Any]:
    """Returns settings of S3 that obstore does not take from the environment itself."""
    options: dict[str, Any] = {}
    if endpoint:
        options["endpoint"] = endpoint
    if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        options["region"] = "us-east-1"
    files = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    has_profile = os.environ.get("AWS_PROFILE") or files.is_file()
    if has_profile and not os.environ.get("AWS_ACCESS_KEY_ID"):
        with suppress(ImportError):
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider()
    return options


def _entry(facts: Any) -> Entry:
    modified = facts["last_modified"].timestamp()
    version = facts.get("e_tag") or f"size {facts['size']}, time {modified}"
    if re.fullmatch(r"\w+", version):  # in listings of Azure
        version = f'"{version}"'
    return Entry(facts["path"], facts["size"], version, modified)


def _reason(error: BaseException) -> str:
    """Returns why a request failed, without addresses, which may be signed, and keys."""
    text = str(error)
    code, said = re.search("<Code>(.*?)</Code>", text), re.search("<Message>(.*?)</Message>", text)
    if code is not None:
        return one_line(": ".join(found[1] for found in (code, said) if found is not None))
    first = re.sub(_PREAMBLE, "", text.strip().partition("\n")[0])
    first = re.sub(r", max_retries: \d+, retry_timeout: \d+s *-?", ":", first)
    first = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", first)
    return one_line(first).rstrip(": ")[:300]


class Wanted(NamedTuple):
    """An object to fetch."""

    entry: Entry
    path: str  # of the file, which appears whole
    checksum: str | None = None  # as of `dlrm.manifest.Checksum`, where a manifest has it
    name: str = ""  # a second path of the file


def download(store: Store, wanted: Sequence[Wanted]) -> None:
    """Copies objects to files in folders that exist, each with the object's time.

    Nothing waits until they are on the disk: after a power failure a file may be shorter.

    Raises:
        OSError: an object is gone, was replaced, or cannot be read or stored.
        ValueError: a checksum differs; the message has the URI and the bytes.
    """
    left, failed = iter(wanted), list[bool]()

    def work(_: int) -> None:
        for one in left:
            try:
                if not failed:
                    _copy(store, one, parts)
            except BaseException:
                failed.append(True)
                raise

    objects = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="fetch")
    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="parts") as parts, objects:
        list(objects.map(work, range(min(IN_FLIGHT, len(wanted)))))


def _copy(store: Store, wanted: Wanted, pool: ThreadPoolExecutor) -> None:
    entry, path, checksum, name = wanted
    uri, partial_path = replace(store.root, key=entry.key), f"{path}.partial-{new_suffix()}"

    def fetch(begin: int) -> str:
        content, sums = store.read(entry, begin, min(begin + PART_BYTES, entry.size)), Checksum()
        write_at(file.fileno(), content, begin)
        if checksum:
            sums.update(content)
        return str(sums)

    try:
        with open(partial_path, "xb", buffering=0) as file:
            parts = range(0, max(entry.size, 1), PART_BYTES)
            sums = "".join(map(fetch, parts) if len(parts) == 1 else pool.map(fetch, parts))
        if checksum is not None and checksum != sums:
            raise damaged(str(uri), checksum, sums)
        os.utime(partial_path, (entry.modified, entry.modified))
        os.rename(partial_path, path)
        if name:
            link(path, name)
    except BaseException as error:
        Path(partial_path).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:  # not of the store
            folder = os.path.dirname(path)
            raise OSError(f"{uri}: cannot be stored in {folder}: {error.strerror}") from error
        raise


def link(target: str, path: str) -> None:
    """Gives a file a second name, which may be another file's so far."""
    try:
        os.link(target, path)
    except FileExistsError:
        with suppress(FileNotFoundError):  # another process does the same
            os.unlink(path)
        os.link(target, path)


def write_at(descriptor: int, content: Any, begin: int) -> None:
    """Writes all bytes of a buffer from a place in a file on."""
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, begin)
        view, begin = view[written:], begin + written


def upload(store: Store, files: Mapping[str, Path]) -> None:
    """Writes files, by key, as objects, several at a time."""
    with ThreadPoolExecutor(8, thread_name_prefix="upload") as pool:  # each has several parts
        list(pool.map(store.write, files.keys(), files.values()))


def remove_all(store: Store, keys: Sequence[str]) -> None:
    """Deletes objects, several at a time, as far as it is permitted."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool, suppress(OSError):
        list(pool.map(store.remove, keys))
