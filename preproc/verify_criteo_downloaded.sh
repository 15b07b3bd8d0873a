#!/usr/bin/env bash
# Are day_0, day_1, ... all in INPUT_PATH, none empty, and NUM_DAYS of them if it is set?
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/environment.sh"

exec "$PYTHON" "$here/spark_data_utils.py" --mode verify --input_folder "$INPUT_PATH" \
  ${NUM_DAYS:+--num_days "$NUM_DAYS"}
