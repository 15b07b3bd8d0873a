"""Prints a table of coverage by folder, from the summaries of coverage.py and gcovr."""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

python, cpp = (json.loads(Path(path).read_text())["files"] for path in sys.argv[1:])
rooms = defaultdict(Counter)
for path, file in python.items():
    found = file["summary"]
    rooms["/".join(Path(path).parts[:-1][:2])] += Counter(
        lines=found["num_statements"],
        covered_lines=found["covered_lines"],
        branches=found["num_branches"],
        covered_branches=found["covered_branches"],
    )
for found in cpp:
    rooms["/".join(Path(found["filename"]).parts[:-1])] += Counter(
        lines=found["line_total"],
        covered_lines=found["line_covered"],
        branches=found["branch_total"],
        covered_branches=found["branch_covered"],
    )


def share(room, kind):
    return f"{100 * room['covered_' + kind] / (room[kind] or 1):.1f}% of {room[kind]}"


print(f"{'room':20} {'lines':>16} {'branches':>16}")
for name, room in sorted(rooms.items()):
    if room["covered_lines"]:  # others were not what these tests are of
        print(f"{name:20} {share(room, 'lines'):>16} {share(room, 'branches'):>16}")
