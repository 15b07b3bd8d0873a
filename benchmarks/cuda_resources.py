"""Prints registers, stack and shared memory of the CUDA kernels for each architecture.

    python benchmarks/cuda_resources.py [dlrm/_ops_cuda.so] [--cuobjdump cuobjdump] [--archs 80 90]
    python benchmarks/cuda_resources.py --access    also what the machine code does to memory

It reads the file with CUDA's cuobjdump and needs no GPU. A kernel is compiled for several element
types; the largest figures of all are shown: registers of a thread, bytes of its stack, bytes of a
block's static shared memory. Spilled registers are on the stack, so 0 means that none was spilled.
Our kernels request shared memory at the launch, by the sizes of the call. --access counts
instructions: atomic operations on global memory that return the old value (ATOM) or do not (RED,
which no thread waits for), and loads and stores of local memory (LDL, STL), which has spilled
values and parameters that a kernel indexes by a variable.
"""

import argparse
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

ACCESSES = ("ATOM", "RED", "LDL", "STL")
LIBRARY = Path(__file__).parents[1] / "dlrm" / "_ops_cuda.so"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", nargs="?", default=str(LIBRARY))
    parser.add_argument("--cuobjdump", default="cuobjdump")
    parser.add_argument("--archs", nargs="*", default=["80", "90", "120"])
    parser.add_argument("--access", action="store_true", help="count atomics and local memory")
    options = parser.parse_args()

    def dumped(what: str) -> str:
        command = [options.cuobjdump, what, options.library]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    print(table(usage(dumped("--dump-resource-usage")), options.archs, cell))
    if options.access:
        print(f"\nMost instructions of any variant: {', '.join(ACCESSES)}.\n")
        print(table(accesses(dumped("--dump-sass")), options.archs, access_cell))


def usage(text: str) -> dict[str, dict[str, list[dict[str, int]]]]:
    """Parses the output of cuobjdump: kernel -> architecture -> resources of each variant."""
    found: dict = defaultdict(lambda: defaultdict(list))
    arch, name = "", ""
    for line in text.splitlines():
        if match := re.search(r"arch = sm_(\w+)", line):
            arch = match[1]
        elif match := re.search(r"Function (\S+):", line):
            name = kernel_name(match[1])
        elif "REG:" in line and name:
            pairs = re.findall(r"(\w+(?:\[\d+\])?):(\d+)", line)
            found[name][arch].append({key: int(value) for key, value in pairs})
    return found


def accesses(text: str) -> dict[str, dict[str, list[dict[str, int]]]]:
    """The same of the machine code: kernel -> architecture -> counts of each of its variants."""
    found: dict = defaultdict(lambda: defaultdict(list))
    arch = ""
    for line in text.splitlines():
        if match := re.search(r"(?:arch = |code for )sm_(\w+)", line):
            arch = match[1]
        elif match := re.search(r"Function : (\S+)", line):
            counts = dict.fromkeys(ACCESSES, 0)
            found[kernel_name(match[1])][arch].append(counts)
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z]+)", line):
            name = {"ATOMG": "ATOM", "REDG": "RED"}.get(match[1], match[1])
            if name in ACCESSES:
                counts[name] += 1
    return found


def kernel_name(mangled: str) -> str:
    """The name of one of our kernels out of its mangled one; those of CUB are taken as one."""
    if "3cub" in mangled:
        return "CUB's sort and sums"
    parts, rest = [], re.sub(r"^_ZN", "", mangled)
    while match := re.match(r"(\d+)", rest):
        end = match.end() + int(match[1])
        parts.append(rest[match.end() : end])
        rest = rest[end:]
    return parts[-1]


def table(found: dict, archs: list[str], cell: Callable[[list[dict[str, int]]], str]) -> str:
    lines = [
        "| kernel (variants) | " + " | ".join(f"sm_{arch}" for arch in archs) + " |",
        "|---|" + "---|" * len(archs),
    ]
    for name in sorted(found):
        cells = [cell(found[name].get(arch, [])) for arch in archs]
        count = max(map(len, found[name].values()))
        lines.append(f"| {name} ({count}) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(variants: list[dict[str, int]]) -> str:
    """Registers, bytes of stack, bytes of static shared memory; the most of any variant."""
    if not variants:
        return "-"
    return most(variants, ("REG", "STACK", "SHARED"))


def access_cell(variants: list[dict[str, int]]) -> str:
    return most(variants, ACCESSES) if variants else "-"


def most(variants: list[dict[str, int]], keys: tuple[str, ...]) -> str:
    return ", ".join(str(max(variant.get(key, 0) for variant in variants)) for key in keys)


if __name__ == "__main__":
    main()
