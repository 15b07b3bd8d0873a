"""The Java that Spark would run on."""

import os
import re
import shutil
import subprocess
from pathlib import Path


def java_version() -> tuple[str | None, str | None]:
    """Reports the version of the Java that Spark would run on, or its problem."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    if shutil.which(java) is None:
        return None, f"there is no {java}" + (" (JAVA_HOME)" if home else "")
    done = subprocess.run(
        [java, "-version"], capture_output=True, text=True, check=False, timeout=60
    )
    found = re.search(r'version "((?:1\.)?(\d+)[^"]*)"', done.stderr + done.stdout)
    if found is None:
        return None, f"cannot read the version of {java}"
    if int(found.group(2)) < 17:
        return None, f"{java} is Java {found.group(1)}; Spark needs 17 or newer"
    return found.group(1), None
