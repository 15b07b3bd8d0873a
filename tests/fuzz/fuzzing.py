"""Mutated files for readers, which must return or raise ValueError or OSError in time.

Forks of this process run several cases each, under a memory limit and an alarm per case. A case
depends only on its seed, which the failure names.
"""

import os
import random
import resource
import shutil
import signal
import traceback
from pathlib import Path

CASES = 1000  # per format
SECONDS, MEMORY = 10, 1 << 30  # time for a case; memory beyond the process's own
_PER_FORK = 50
_TOKENS = [
    *(b"9" * 30, b"-1", b"1e999", b"nan", b"null", b"[", b"{", b"]", b'"', b"\n", b"\0"),
    b"\xff\xfe",
    *(
        b"&a ",
        b"*a",
        b"../../x",
        b"true",
        b",",
        b"\t",
        b"\x7f\xff\xff\xff",
        b"\x00" * 8,
        b"\xff" * 8,
    ),
]


def mutated(content: bytes, seed: int) -> bytes:
    """Returns content with one to six changes: bits flipped, pieces cut, copied or inserted."""
    chance, found = random.Random(seed), bytearray(content)
    for _ in range(chance.randint(1, 6)):
        begin = chance.randrange(len(found) + 1)
        end = min(begin + chance.choice([1, 2, 8, 64, 1024]), len(found))
        kind = chance.randrange(6)
        if kind == 0 and begin < end:
            found[begin] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del found[begin:end]
        elif kind == 2:
            found[begin:begin] = found[begin:end] * chance.choice([1, 3, 100])
        elif kind == 3:
            found[begin:end] = chance.choice(_TOKENS)
        elif kind == 4:
            found[begin:begin] = chance.choice(_TOKENS)
        else:
            del found[begin if chance.random() < 0.2 else len(found) :]
    return bytes(found)


def write(content, path: Path, seed: int) -> None:
    """Writes a mutated file, or a directory with one mutated file."""
    if isinstance(content, bytes):
        path.write_bytes(mutated(content, seed))
        return
    shutil.rmtree(path, ignore_errors=True)
    chosen = random.Random(~seed).choice(sorted(content))
    for name, whole in content.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(mutated(whole, seed) if name == chosen else whole)


def failures(
    read, content, path: Path, first: int = 0, cases: int = CASES, seconds: int = SECONDS
) -> list[str]:
    """Runs cases; returns the unexpected exception or exit status of each that failed.

    Args:
        read: function of the path of a mutated file or directory.
        content: the unmodified file; for a directory, the contents by file name.
        path: the file or directory to write, in its own folder.
        first: seed of the first case.
        cases: their number.
        seconds: time limit of each.
    """
    found, seed, end = [], first, first + cases
    while seed < end:
        last = min(seed + _PER_FORK, end)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            try:
                _run(read, content, path, range(seed, last), writer, seconds)
            except BaseException:
                traceback.print_exc()
            os._exit(1)  # the fork must not continue the tests
        os.close(writer)
        with os.fdopen(reader) as stream:
            said = stream.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        blocks = said.split("\f")
        found += [block for block in blocks if "\n" in block]
        done = int(blocks[-1].split("\n")[0] or seed) if blocks[-1] else last - 1
        if status:
            found.append(f"seed {done}: ended with {status}")
            seed = done + 1
        else:
            seed = last
    return found


def _run(read, content, path: Path, seeds: range, writer: int, seconds: int) -> None:
    """Runs cases in the child: writes the seed and any unexpected exception of each."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for seed in seeds:
        os.write(writer, f"\f{seed}".encode())
        write(content, path, seed)
        signal.alarm(seconds)
        try:
            read(path)
        except (ValueError, OSError) as error:
            if len(str(error)) > 4000:
                said = f"a message of {len(str(error))} characters"
                os.write(writer, f"\nseed {seed}: {said}".encode())
        except BaseException:
            os.write(writer, f"\nseed {seed}: {traceback.format_exc()[-1500:]}".encode())
        signal.alarm(0)
    os._exit(0)  # skips the exit handlers of the tests
