#!/usr/bin/env bash
# Runs Spark on raw day files: dictionary, train, test, validation, in one application.
#
#     INPUT_PATH           folder of day_0, day_1, ... (default /data/dlrm/criteo)
#     OUTPUT_PATH          where binary_dataset/ is written (default /data/dlrm)
#     SPARK_LOCAL_DIRS     where Spark shuffles (default $OUTPUT_PATH/spark-tmp, removed at the end)
#     TOTAL_CORES          cores in all (default: those of this machine)
#     TOTAL_MEMORY         memory in all, in GiB (default: half of this machine's); on a cluster that
#                          of the driver and of each executor
#     FREQUENCY_LIMIT      how often a value must occur to get an id (default 15)
#     USE_FREQUENCY_LIMIT  0: no limit; 1 or unset: FREQUENCY_LIMIT; larger: the limit itself
#     NUM_DAYS             how many day files there must be (default: any number)
#     SPARK_MASTER         a cluster, such as spark://host:7077 (default local[TOTAL_CORES])
#     PYTHON               interpreter (default .venv/bin/python of this repository, else python3)
#
# On a cluster INPUT_PATH and OUTPUT_PATH must lie on storage that every node sees under that name:
# tasks read and write files there. So must PYTHON, with its packages, and this repository.
#
# Arguments go on to spark_data_utils.py; its flags (--help) follow.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/environment.sh"

case " $* " in
  *" --help "* | *" -h "*)
    sed -n '2,/^set /s/^# \{0,1\}//p' "$here/run_spark.sh"
    exec "$PYTHON" "$here/spark_data_utils.py" --help
    ;;
esac

"$here/check_java.sh"

TOTAL_CORES=${TOTAL_CORES:-$(nproc)}
if [[ -z ${TOTAL_MEMORY:-} ]]; then
  TOTAL_MEMORY=$(awk '/^MemTotal:/ { gib = int($2 / 2 / 1048576); print gib < 2 ? 2 : gib }' /proc/meminfo)
fi
for name in TOTAL_CORES TOTAL_MEMORY; do
  if [[ ! ${!name} =~ ^[1-9][0-9]*$ ]]; then
    echo "error: $name=${!name}: expected a whole number, 1 or more" >&2
    exit 1
  fi
done
export SPARK_LOCAL_DIRS=${SPARK_LOCAL_DIRS:-$OUTPUT_PATH/spark-tmp}

exec "$PYTHON" "$here/spark_data_utils.py" --mode prepare \
  --input_folder "$INPUT_PATH" --output_folder "$OUTPUT_PATH" ${NUM_DAYS:+--num_days "$NUM_DAYS"} \
  --frequency_limit "$FREQUENCY_LIMIT" --memory_gib "$TOTAL_MEMORY" \
  --master "${SPARK_MASTER:-local[$TOTAL_CORES]}" --conf "spark.cores.max=$TOTAL_CORES" "$@"
