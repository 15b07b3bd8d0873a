#!/usr/bin/env bash
# The name of run_spark.sh in later versions of NVIDIA's scripts.
exec "$(dirname "${BASH_SOURCE[0]}")/run_spark.sh" "$@"
