"""Serves a folder with the interface of S3 on 127.0.0.1, for benchmarks and tests.

    python benchmarks/s3_server.py FOLDER [--latency 0.02] [--failing 0.02] ...

Prints its address. It has what this package asks of a store: objects with ETags, ranges,
conditions, uploads in parts, listings and deletions, and the generations of Google's interface of
the same form. It checks no signature, and needs a fraction of the time of moto's server. With
--keep it has its objects again when it is restarted. `Settings` are flags, and change while it runs
by a PUT of JSON to `/-/settings`; `/-/facts` answers with counts and processor time.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote
from urllib.request import Request as URLRequest, urlopen
from xml.sax.saxutils import escape

_INLINE = 1 << 16  # bytes of an object that go out with its head, in one packet
_PAGE = 1000  # objects of a listing's answer
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content"}


@dataclass(frozen=True)
class Settings:
    """The treatment of requests."""

    latency: float = field(default=0.0, metadata={"help": "seconds that each answer waits"})
    failing: float = field(default=0.0, metadata={"help": "share of requests answered 503"})
    cut: float = field(default=0.0, metadata={"help": "share of bodies that end early"})
    throttle: float = field(default=0.0, metadata={"help": "requests a second; 0 is no limit"})
    token: str = field(default="", metadata={"help": "session token; others have expired"})
    denied: str = field(default="", metadata={"help": "prefix of keys without permission"})
    lost: str = field(
        default="", metadata={"help": "end of keys of whose writes every other is answered 503"}
    )
    dropped: float = field(default=0.0, metadata={"help": "1 drops connections in place of 503"})
    seed: int = field(default=0, metadata={"help": "of the failures"})


class Object(NamedTuple):
    """A stored object; its file never changes."""

    path: Path
    size: int
    etag: str
    modified: float
    generation: int  # of Google's interface

    @property
    def versions(self) -> dict[str, str]:
        """Headers of answers."""
        return {"ETag": self.etag, "x-goog-generation": str(self.generation)}


class Request(NamedTuple):
    """A request without its body."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]


class Answer(NamedTuple):
    """An answer with a text, or with a range of an object."""

    status: int
    headers: dict[str, str] = {}
    text: bytes = b""
    found: Object | None = None
    begin: int = 0
    end: int = 0


def refusal(status: int, code: str, message: str = "") -> Answer:
    text = f"<Error><Code>{code}</Code><Message>{escape(message or code)}</Message></Error>"
    return Answer(status, {"Content-Type": "application/xml"}, text.encode())


def xml(name: str, *parts: str) -> Answer:
    space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name} {space}>{"".join(parts)}</{name}>'
    return Answer(200, {"Content-Type": "application/xml"}, text.encode())


def tag(name: str, value: object) -> str:
    return f"<{name}>{escape(str(value))}</{name}>"


class Buckets:
    """Objects by bucket and key, each in a file of its own.

    Args:
        folder: where the files are.
        settings: the treatment of requests.
        keep: whether a later server has the objects too, by a journal of changes.
    """

    def __init__(self, folder: Path, settings: Settings, keep: bool = False) -> None:
        self.folder, self.settings = folder, settings
        self.counts: Counter[str] = Counter()
        self._objects: dict[str, dict[str, Object]] = {}
        self._parts: dict[str, dict[int, Object]] = {}
        self._numbers = itertools.count(1)
        self._random = random.Random(settings.seed)
        self._began, self._second = 0, 0
        self._lost: set[str] = set()  # keys whose last answer to a write was lost
        self._journal = None
        if keep:
            self._replay(folder / "journal")
            self._journal = open(folder / "journal", "a", buffering=1)  # noqa: SIM115

    def _replay(self, journal: Path) -> None:
        last = 0
        for line in journal.read_text().splitlines() if journal.exists() else ():
            bucket, key, name, *facts = json.loads(line)
            objects = self._objects.setdefault(bucket, {})
            if name:
                objects[key] = Object(self.folder / name, *facts)
                last = max(last, facts[-1])
            elif key:
                objects.pop(key, None)
        files = (int(path.name) for path in self.folder.glob("[0-9]*"))
        self._numbers = itertools.count(max(last, 0, *files) + 1)

    def _note(self, bucket: str, key: str, found: Object | None) -> None:
        """Writes a change to the journal."""
        if self._journal is not None:
            facts = (found.path.name, *found[1:]) if found else (None,)
            self._journal.write(json.dumps([bucket, key, *facts]) + "\n")

    def new_file(self) -> Path:
        """Returns the place of a body."""
        return self.folder / f"{next(self._numbers):08d}"

    def body_cut(self) -> bool:
        """Returns whether the next body ends early."""
        return self._random.random() < self.settings.cut

    def answer(self, request: Request, body: Path | None) -> Answer:
        """Carries a request out.

        Args:
            request: its head.
            body: the file with its body, if it has one; kept or removed.
        """
        if request.bucket == "-":
            return self._control(request, body)
        answer = self._refused(request)
        if answer is None:
            self.counts[request.method] += 1
            act: dict[str, Callable[[Request, Path | None], Answer]] = {
                "GET": self._get,
                "HEAD": self._get,
                "PUT": self._put,
                "POST": self._post,
                "DELETE": self._delete,
            }
            answer = act[request.method](request, body)
        if body is not None and (answer.status >= 300 or request.method == "POST"):
            body.unlink(missing_ok=True)
        return self._lost_of(request, answer)

    def _lost_of(self, request: Request, answer: Answer) -> Answer:
        """Returns the answer to a write that is carried out, of which the settings lose some."""
        lost = self.settings.lost
        if request.method != "PUT" or answer.status != 200 or not lost:
            return answer
        if request.key.endswith(lost):
            self._lost ^= {request.key}
            if request.key in self._lost:
                self.counts["lost"] += 1
                return Answer(0) if self.settings.dropped else refusal(503, "SlowDown")
        return answer

    def _control(self, request: Request, body: Path | None) -> Answer:
        if request.method == "PUT" and body is not None:
            self.settings = replace(self.settings, **json.loads(body.read_bytes()))
            body.unlink()
        facts = {
            "settings": asdict(self.settings),
            "counts": self.counts,
            "processor_seconds": time.process_time(),
        }
        return Answer(200, {"Content-Type": "application/json"}, json.dumps(facts).encode())

    def _refused(self, request: Request) -> Answer | None:
        """Returns the answer to a request that fails as the settings have it."""
        settings, second = self.settings, int(time.monotonic())
        if second != self._began:
            self._began, self._second = second, 0
        self._second += 1
        if settings.throttle and self._second > settings.throttle:
            self.counts["throttled"] += 1
            return refusal(503, "SlowDown", "Please reduce your request rate.")
        if settings.failing and self._random.random() < settings.failing:
            self.counts["failed"] += 1
            return refusal(503, "ServiceUnavailable")
        if settings.token and request.headers.get("x-amz-security-token") != settings.token:
            self.counts["expired"] += 1
            return refusal(400, "ExpiredToken", "The provided token has expired.")
        if settings.denied and request.key.startswith(settings.denied):
            self.counts["denied"] += 1
            return refusal(403, "AccessDenied", "Access Denied")
        if request.bucket not in self._objects and (request.method, request.key) != ("PUT", ""):
            return refusal(404, "NoSuchBucket", "The specified bucket does not exist")
        return None

    def _get(self, request: Request, body: Path | None) -> Answer:
        if not request.key:
            return self._list(request)
        found = self._objects[request.bucket].get(request.key)
        if found is None:
            return refusal(404, "NoSuchKey", "The specified key does not exist.")
        wanted = request.headers.get("if-match")
        if wanted is not None and wanted != found.etag:
            return refusal(412, "PreconditionFailed")
        headers = {
            **found.versions,
            "Last-Modified": formatdate(found.modified, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if asked is None:
            return Answer(200, headers, found=found, end=found.size)
        if asked[1]:
            begin, end = int(asked[1]), min(int(asked[2] or found.size) + 1, found.size)
        else:
            begin, end = max(found.size - int(asked[2]), 0), found.size
        if begin >= found.size:
            return refusal(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{found.size}"
        return Answer(206, headers, found=found, begin=begin, end=end)

    def _list(self, request: Request) -> Answer:
        prefix = request.query.get("prefix", "")
        after = request.query.get("continuation-token") or request.query.get("start-after", "")
        objects = self._objects[request.bucket]
        keys = sorted(key for key in objects if key.startswith(prefix) and key > after)
        shown = keys[: min(int(request.query.get("max-keys", _PAGE)), _PAGE)]
        cut = len(shown) < len(keys)
        contents = (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso(one.modified)}</LastModified>"
            f"<ETag>{escape(one.etag)}</ETag><Size>{one.size}</Size></Contents>"
            for key in shown
            for one in [objects[key]]
        )
        return xml(
            "ListBucketResult",
            tag("Name", request.bucket),
            tag("Prefix", prefix),
            tag("KeyCount", len(shown)),
            tag("IsTruncated", str(cut).lower()),
            tag("NextContinuationToken", shown[-1]) if cut else "",
            *contents,
        )

    def _put(self, request: Request, body: Path | None) -> Answer:
        if not request.key:
            self._objects.setdefault(request.bucket, {})
            self._note(request.bucket, "", None)
            return Answer(200)
        if "uploadId" in request.query:
            parts = self._parts.get(request.query["uploadId"])
            if parts is None:
                return refusal(404, "NoSuchUpload")
            stored = self._stored(body)
            parts[int(request.query["partNumber"])] = stored
            return Answer(200, stored.versions)
        return self._replaced(request, lambda: self._stored(body))

    def _replaced(self, request: Request, make: Callable[[], Object]) -> Answer:
        """Makes an object the one of a key, if the conditions hold."""
        objects = self._objects[request.bucket]
        old, headers = objects.get(request.key), request.headers
        if old is not None and headers.get("if-none-match") == "*":
            return refusal(412, "PreconditionFailed", "the object exists")
        if "if-match" in headers and (old is None or headers["if-match"] != old.etag):
            return refusal(412, "PreconditionFailed", "the object is another")
        generation = 0 if old is None else old.generation
        if headers.get("x-goog-if-generation-match", str(generation)) != str(generation):
            return refusal(412, "PreconditionFailed", "the object has another generation")
        objects[request.key] = stored = make()
        self._note(request.bucket, request.key, stored)
        if old is not None:
            old.path.unlink(missing_ok=True)
        return Answer(200, stored.versions)

    def _stored(self, body: Path | None) -> Object:
        if body is None:
            body = self.new_file()
            body.touch()
        etag = f'"{self._random.getrandbits(128):032x}"'
        return Object(body, body.stat().st_size, etag, time.time(), next(self._numbers))

    def _post(self, request: Request, body: Path | None) -> Answer:
        objects = self._objects[request.bucket]
        if "delete" in request.query and body is not None:
            keys = re.findall(r"<Key>(.*?)</Key>", body.read_text())
            named = [_unescaped(key) for key in keys]
            for key in named:
                self._note(request.bucket, key, None)
                self._drop(objects.pop(key, None))
            return xml("DeleteResult", *(f"<Deleted>{tag('Key', key)}</Deleted>" for key in named))
        if "uploads" in request.query:
            upload = f"upload{next(self._numbers)}"
            self._parts[upload] = {}
            return xml("InitiateMultipartUploadResult", tag("UploadId", upload))
        parts = self._parts.get(request.query.get("uploadId", ""))
        if parts is None:
            return refusal(404, "NoSuchUpload")

        def joined() -> Object:
            path = self.new_file()
            with open(path, "wb") as whole:
                for number in sorted(parts):
                    with open(parts[number].path, "rb") as part:
                        while os.sendfile(whole.fileno(), part.fileno(), None, 1 << 30):
                            pass
                    parts[number].path.unlink()
            return self._stored(path)

        answer = self._replaced(request, joined)
        if answer.status != 200:
            return answer
        del self._parts[request.query["uploadId"]]
        etag = answer.headers["ETag"]
        return xml("CompleteMultipartUploadResult", tag("Key", request.key), tag("ETag", etag))

    def _delete(self, request: Request, body: Path | None) -> Answer:
        if "uploadId" in request.query:
            for part in self._parts.pop(request.query["uploadId"], {}).values():
                self._drop(part)
        else:
            self._note(request.bucket, request.key, None)
            self._drop(self._objects[request.bucket].pop(request.key, None))
        return Answer(204)

    def _drop(self, gone: Object | None) -> None:
        if gone is not None:
            gone.path.unlink(missing_ok=True)


def _iso(moment: float) -> str:
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{int(moment % 1 * 1e3):03d}Z"
    )


def _unescaped(text: str) -> str:
    for name, letter in (("lt", "<"), ("gt", ">"), ("quot", '"'), ("apos", "'"), ("amp", "&")):
        text = text.replace(f"&{name};", letter)
    return text


class Connection(asyncio.Protocol):
    """Reads the requests of a connection, one after the other, and writes answers."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets, self._buffer = buckets, bytearray()
        self._request: Request | None = None
        self._left, self._path, self._descriptor = 0, None, -1
        self._sending: asyncio.Task | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._path.unlink(missing_ok=True)

    def data_received(self, data: bytes) -> None:
        if self._request is None:
            self._buffer += data
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._begin(bytes(self._buffer[:end]).decode("latin-1"))
            data = bytes(self._buffer[end + 4 :])
            self._buffer.clear()
        if self._left:
            if data:
                os.write(self._descriptor, data)
            self._left -= len(data)
        if not self._left:
            self._end()

    def _begin(self, head: str) -> None:
        """Reads the head of a request."""
        first, *lines = head.split("\r\n")
        method, target, _ = first.split(" ")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        place, _, query = target.partition("?")
        bucket, _, key = unquote(place.lstrip("/")).partition("/")
        asked = {k: v[0] for k, v in parse_qs(query, keep_blank_values=True).items()}
        self._request = Request(method, bucket, key, asked, headers)
        self._left = int(headers.get("content-length", 0))
        if self._left:
            self._path = self._buckets.new_file()
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        if "100-continue" in headers.get("expect", ""):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _end(self) -> None:
        """Answers a request whose body is here."""
        request, body = self._request, self._path
        assert request is not None
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._request, self._path, self._descriptor = None, None, -1
        latency = self._buckets.settings.latency
        if latency and request.bucket != "-":
            asyncio.get_running_loop().call_later(latency, self._answer, request, body)
        else:
            self._answer(request, body)

    def _answer(self, request: Request, body: Path | None) -> None:
        answer = self._buckets.answer(request, body)
        if not answer.status:
            self._transport.close()
            return
        size = len(answer.text) if answer.found is None else answer.end - answer.begin
        head = f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Refused')}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        if answer.status != 204:
            head += f"Content-Length: {size}\r\n"
        packet = f"{head}\r\n".encode()
        if request.method == "HEAD":
            self._transport.write(packet)
            return
        if answer.found is not None and size and self._buckets.body_cut():
            self._buckets.counts["cut"] += 1
            self._transport.write(packet + _read(answer, size // 2))
            self._transport.close()
            return
        if answer.found is not None and size > _INLINE:
            self._transport.write(packet)
            file = open(answer.found.path, "rb")  # noqa: SIM115  # closed by the task
            self._sending = asyncio.ensure_future(self._send(file, answer.begin, size))
            return
        self._transport.write(packet + (answer.text or _read(answer, size)))

    async def _send(self, file, begin: int, size: int) -> None:
        with file:
            try:
                await asyncio.get_running_loop().sendfile(self._transport, file, begin, size)
            except (ConnectionError, RuntimeError):  # the client has ended
                self._transport.abort()


def _read(answer: Answer, size: int) -> bytes:
    if answer.found is None or not size:
        return b""
    with open(answer.found.path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), size, answer.begin)


async def serve(
    folder: Path, settings: Settings, port: int, buckets: Iterable[str], keep: bool
) -> None:
    """Serves until the process ends."""
    stored = Buckets(folder, settings, keep)
    for name in buckets:
        stored.answer(Request("PUT", name, "", {}, {}), None)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(stored), "127.0.0.1", port, backlog=512)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


class Endpoint:
    """A server in a process of its own. Use it in a `with` block.

    Args:
        folder: an empty folder for the objects.
        keep: whether it can be restarted.
        settings: fields of `Settings`.

    Attributes:
        url: its address.
        environment: variables with which S3's clients use it.
    """

    def __init__(self, folder: Path, keep: bool = False, **settings: float | str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        flags = [f"--{name}={value}" for name, value in settings.items()] + ["--keep"] * keep
        self._command = [sys.executable, __file__, str(folder), *flags]

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        self.url = self._process.stdout.readline().strip()

    def restart(self, seconds: float = 1.0) -> None:
        """Kills the server, and starts one with its objects at its address after some time."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        time.sleep(seconds)
        self._command.append(f"--port={self.url.rpartition(':')[2]}")
        self._start()

    def __enter__(self) -> "Endpoint":
        self._start()
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
            "AWS_REGION": "us-east-1",
        }
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def make(self, bucket: str) -> None:
        """Makes an empty bucket."""
        urlopen(URLRequest(f"{self.url}/{bucket}", method="PUT")).close()

    def set(self, **changes: float | str) -> None:
        """Changes settings."""
        body = json.dumps(changes).encode()
        urlopen(URLRequest(f"{self.url}/-/settings", body, method="PUT")).close()

    def facts(self) -> dict:
        """Returns its settings, its counts of requests and its processor time."""
        with urlopen(f"{self.url}/-/facts") as answer:
            return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="an empty folder for the objects")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="have the objects after a restart")
    parser.add_argument("--bucket", nargs="*", default=["bench"])
    for one in fields(Settings):
        kind = type(one.default)
        parser.add_argument(f"--{one.name}", type=kind, default=one.default, **one.metadata)
    options = parser.parse_args()
    settings = Settings(**{one.name: getattr(options, one.name) for one in fields(Settings)})
    asyncio.run(serve(options.folder, settings, options.port, options.bucket, options.keep))


if __name__ == "__main__":
    main()
