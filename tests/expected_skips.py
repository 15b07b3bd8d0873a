"""Fails a run that skips tests which should run, such as all those of a missing package.

    pytest --expected-skips tests/expected_skips.txt

Each line of the file is `NODE: REASON`. The node is without its parameters, and `*` stands for any
text. A skip that matches no line fails the run, and so does a line that matches no skip, unless it
begins with `may `. The run must therefore be of all tests.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

COLLECTED = "skips of collection"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--expected-skips", metavar="FILE", help="skip nothing else")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.expected_skips is not None:
        config.pluginmanager.register(ExpectedSkips(config))


class ExpectedSkips:
    """Compares the skips of a run with the lines of a file."""

    def __init__(self, config: pytest.Config):
        self.path, self.config = Path(config.option.expected_skips), config
        lines = self.path.read_text(encoding="utf-8").splitlines()
        self.lines = [line for line in lines if line.strip() and not line.startswith("#")]
        self.skips: set[tuple[str, str]] = set()
        self.faults: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
            self.skips.add((report.nodeid.partition("[")[0], " ".join(reason.split())))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        """Takes the modules that a worker of xdist has skipped, of which it sends no report."""
        self.skips.update(map(tuple, getattr(node, "workeroutput", {}).get(COLLECTED, ())))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[COLLECTED] = sorted(self.skips)
            return
        self.faults = list(self._compare())
        if self.faults and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _compare(self) -> Iterator[str]:
        matched = {line: [*filter(matches(line), self.skips)] for line in self.lines}
        known = {skip for skips in matched.values() for skip in skips}
        for node, reason in sorted(self.skips - known):
            yield f"unexpected skip; install what it needs, or add the line\n    {node}: {reason}"
        for line, skips in matched.items():
            if not skips and not line.startswith("may "):
                yield f"no such skip; remove the line\n    {line}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.faults:
            terminalreporter.section(f"skips that differ from {self.path}", red=True)
            for fault in self.faults:
                terminalreporter.line(fault)


def matches(line: str) -> Callable[[tuple[str, str]], bool]:
    """Returns whether a line matches the node and the reason of a skip."""
    parts = [".*".join(map(re.escape, part.split("*"))) for part in line.split(": ", 1)]
    node, reason = re.compile(parts[0].removeprefix(r"may\ ")), re.compile(parts[-1])
    return lambda skip: bool(node.fullmatch(skip[0]) and reason.fullmatch(skip[1]))
