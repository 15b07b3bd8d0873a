#!/usr/bin/env bash
# From raw day files to a dataset: checks that they are all there, then runs Spark on them, or with
# ENGINE=local processes of this machine, without Java.
#
#     INPUT_PATH=/path/with/day_files OUTPUT_PATH=/path/to/write preproc/prepare_dataset.sh
#
# The dataset is $OUTPUT_PATH/binary_dataset. It appears there when it is whole; an earlier one stays
# until then, and stays for good if this fails. What can be set is described in run_spark.sh; further
# arguments go on to spark_data_utils.py; --help shows both.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case " $* " in
  *" --help "* | *" -h "*) ;; # which need no days
  *) "$here/verify_criteo_downloaded.sh" ;;
esac
exec "$here/run_spark.sh" "$@"
