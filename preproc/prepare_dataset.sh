#!/usr/bin/env bash
# Turns raw day files into a dataset. Checks that all day files exist, then processes them with Spark
# or, with ENGINE=local, with processes of this machine, without Java.
#
#     INPUT_PATH=/path/with/day_files OUTPUT_PATH=/path/to/write preproc/prepare_dataset.sh
#
# NVIDIA's arguments also work: preproc/prepare_dataset.sh 15 CPU Spark, or DGX2 15 of 2020.
#
# The dataset is $OUTPUT_PATH/binary_dataset. It appears there once it is complete, and only then
# replaces an earlier one. run_spark.sh describes the variables; further arguments are passed to
# spark_data_utils.py; --help shows both.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/environment.sh"
while [[ $# -gt 0 && $1 != -* ]]; do
  if [[ $1 =~ ^[0-9][0-9,:]*$ ]]; then
    export FREQUENCY_LIMIT=$1 USE_FREQUENCY_LIMIT=1
  elif [[ $1 == NVTabular ]]; then
    echo "error: NVTabular: expected Spark; preproc/prepare_dataset.sh 15 CPU Spark gives the same ids" >&2
    exit 1
  elif [[ $1 != Spark ]] && ! is_machine "$1"; then
    echo "error: $1: expected a frequency limit, CPU or GPU, and Spark, as in prepare_dataset.sh 15 CPU Spark" >&2
    exit 1
  fi
  shift
done
case " $* " in
  *" --help "* | *" -h "*) ;; # which need no days
  *) "$here/verify_criteo_downloaded.sh" ;;
esac
exec "$here/run_spark.sh" "$@"
