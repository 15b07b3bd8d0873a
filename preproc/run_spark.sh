#!/usr/bin/env bash
# Turns raw day files into a dataset: dictionary, train, test, validation, in one Spark application.
#
#     INPUT_PATH           folder of day_0, day_1, ... (default /data/dlrm/criteo); also download_dir
#     OUTPUT_PATH          where binary_dataset/ is written (default /data/dlrm); final_output_dir
#                          names binary_dataset/ itself
#     ENGINE               spark, or local: the same without Spark and Java (default spark)
#     SPARK_LOCAL_DIRS     folder for Spark's temporary files (default $OUTPUT_PATH/spark-tmp, removed at the end)
#     TOTAL_CORES          total number of cores (default, and limit without a cluster: this machine's)
#     TOTAL_MEMORY         memory in GiB (default: half of this machine's); on a cluster, memory of the
#                          driver and of each executor
#     FREQUENCY_LIMIT      number of rows in which a value must occur to get an id (default 15)
#     USE_FREQUENCY_LIMIT  0: no limit; 1 or unset: FREQUENCY_LIMIT; larger: the limit itself
#     NUM_DAYS             required number of day files (default: any number)
#     SPARK_MASTER         a cluster, such as spark://host:7077 (default local[TOTAL_CORES])
#     PYTHON               interpreter (default .venv/bin/python of this repository, else python3)
#
# The same command resumes a run that was stopped. Until a run is complete, its finished stages are kept
# in $OUTPUT_PATH/binary_dataset.unfinished.
#
# On a cluster, executors read INPUT_PATH and write OUTPUT_PATH: every node must mount both under the
# same name. The same holds for PYTHON, with its packages, and for this repository.
#
# NVIDIA's form also works: run_spark.sh [CPU] INPUT_PATH OUTPUT_PATH [FREQUENCY_LIMIT]. Further
# arguments are passed to spark_data_utils.py, whose flags (--help) follow.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/environment.sh"

case " $* " in
  *" --help "* | *" -h "*)
    sed -n '2,/^set /s/^# \{0,1\}//p' "$here/run_spark.sh"
    exec "$PYTHON" "$here/spark_data_utils.py" --help
    ;;
esac

if [[ $# -gt 0 && $1 != -* ]] && is_machine "$1"; then shift; fi
if [[ $# -gt 0 && $1 != -* ]]; then
  if [[ $# -lt 2 || $2 == -* ]]; then
    echo "error: $1: expected [CPU] INPUT_PATH OUTPUT_PATH [FREQUENCY_LIMIT], got one path" >&2
    exit 1
  fi
  INPUT_PATH=$1 OUTPUT_PATH=$2
  shift 2
  if [[ ${1:-} =~ ^[0-9][0-9,:]*$ ]]; then
    FREQUENCY_LIMIT=$1
    shift
  fi
fi
for name in spark_output_path conversion_intermediate_dir; do
  if [[ -n ${!name:-} ]]; then
    echo "note: $name is not used: nothing is written there"
  fi
done

case " $* " in
  *" --engine local "* | *" --engine=local "*) ENGINE=local ;;
esac
if [[ $ENGINE != local ]]; then "$here/check_java.sh"; fi

cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # which takes these for a number of cores
TOTAL_CORES=${TOTAL_CORES:-$cores}
if [[ -z ${TOTAL_MEMORY:-} ]]; then
  TOTAL_MEMORY=$(awk '/^MemTotal:/ { gib = int($2 / 2 / 1048576); print gib < 2 ? 2 : gib }' /proc/meminfo)
fi
for name in TOTAL_CORES TOTAL_MEMORY; do
  if [[ ! ${!name} =~ ^[1-9][0-9]*$ ]]; then
    echo "error: $name=${!name}: expected a whole number, 1 or more" >&2
    exit 1
  fi
done
if [[ -z ${SPARK_MASTER:-} ]] && ((TOTAL_CORES > cores)); then
  echo "note: TOTAL_CORES=$TOTAL_CORES: this machine has $cores, which are used"
  TOTAL_CORES=$cores
fi
export SPARK_LOCAL_DIRS=${SPARK_LOCAL_DIRS:-$OUTPUT_PATH/spark-tmp}

exec "$PYTHON" "$here/spark_data_utils.py" --mode prepare \
  --input_folder "$INPUT_PATH" --output_folder "$OUTPUT_PATH" ${NUM_DAYS:+--num_days "$NUM_DAYS"} \
  --engine "$ENGINE" --cores "$TOTAL_CORES" \
  --frequency_limit "$FREQUENCY_LIMIT" --memory_gib "$TOTAL_MEMORY" \
  --master "${SPARK_MASTER:-local[$TOTAL_CORES]}" --conf "spark.cores.max=$TOTAL_CORES" "$@"
