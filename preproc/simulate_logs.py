#!/usr/bin/env python3
"""Runs `dlrm.scripts.simulate_logs`, whose former path this is; the next version removes it."""

from former_path import run

if __name__ == "__main__":
    run(__name__, "dlrm.scripts.simulate_logs.__main__")
