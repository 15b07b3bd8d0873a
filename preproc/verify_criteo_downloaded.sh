#!/usr/bin/env bash
# Are day_0, day_1, ... all in a folder, none empty, and NUM_DAYS of them if it is set?
#
#     preproc/verify_criteo_downloaded.sh [FOLDER]    (default INPUT_PATH)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/environment.sh"
if [[ $# -gt 1 || ${1:-} == -* ]]; then
  echo "error: $*: expected one folder of day files, or none for $INPUT_PATH" >&2
  exit 1
fi
INPUT_PATH=${1:-$INPUT_PATH}

exec "$PYTHON" "$here/spark_data_utils.py" --mode verify --input_folder "$INPUT_PATH" \
  ${NUM_DAYS:+--num_days "$NUM_DAYS"}
