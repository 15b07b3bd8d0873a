"""Prints constraints.txt with the oldest versions that pyproject.toml allows."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[0]
# Spark, which only the tests need here, would require a newer pyarrow.
OLDEST = {"pyspark": "4.0.0", **dict(re.findall(r'"([\w-]+)>=([\d.]+)"', HEAD))}
NAMES = {name.lower() for name in OLDEST}

for pin in (ROOT / "constraints.txt").read_text().splitlines():
    if pin.partition("==")[0].lower() not in NAMES:
        print(pin)
for name, version in OLDEST.items():
    print(f"{name}=={version}")
