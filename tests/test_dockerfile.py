"""The Dockerfile calls existing make targets and installs the README's packages."""

import re

IN_THE_IMAGE = {"python3-dev", "python3-venv"}  # python:*-slim has Python with both


def packages(text):
    installs = re.findall(r"apt-get install -y ([^`\n]+)", text.replace("\\\n", " "))
    assert len(installs) == 1
    words = installs[0].partition("&&")[0].split()
    return {word for word in words if not word.startswith("-")}


def test_its_make_targets_exist(root):
    text = (root / "Dockerfile").read_text()
    used = set(re.findall(r"^RUN make (\w+)$", text, re.M))
    used |= set(re.findall(r'^CMD \["make", "(\w+)"\]$', text, re.M))
    targets = set(re.findall(r"^(\w+):", (root / "Makefile").read_text(), re.M))
    assert used == {"venv", "demo"}
    assert used <= targets


def test_its_packages_are_those_of_the_readme(root):
    documented = packages((root / "README.md").read_text())
    assert packages((root / "Dockerfile").read_text()) | IN_THE_IMAGE == documented


def test_the_image_of_the_server_has_the_pinned_packages(root):
    words = re.findall(
        r"^RUN pip install (.*)$", (root / "triton" / "Dockerfile").read_text(), re.M
    )
    packages = [word for word in words[0].split() if not word.startswith("--")]
    assert {package.partition("==")[0] for package in packages} == {
        "numpy",
        "onnxruntime",
        "pyarrow",
    }
    assert set(packages) <= set((root / "constraints.txt").read_text().splitlines())
