# Read by the other scripts: what may be set in the environment, with its default.

INPUT_PATH=${INPUT_PATH:-/data/dlrm/criteo} # day_0, day_1, ..., or train.txt
OUTPUT_PATH=${OUTPUT_PATH:-/data/dlrm}      # binary_dataset/ is written there
NUM_DAYS=${NUM_DAYS:-}                      # how many day files there must be; empty: any number

ENGINE=${ENGINE:-spark}
if [[ $ENGINE != spark && $ENGINE != local ]]; then
  echo "error: ENGINE=$ENGINE: expected spark, or local (the same without Spark and Java)" >&2
  exit 1
fi

FREQUENCY_LIMIT=${FREQUENCY_LIMIT:-15}
case ${USE_FREQUENCY_LIMIT:-1} in
  0) FREQUENCY_LIMIT=0 ;; # every value gets an id
  1) ;;
  *) FREQUENCY_LIMIT=$USE_FREQUENCY_LIMIT ;;
esac

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=$repository/.venv/bin/python
  [[ -x $PYTHON ]] || PYTHON=python3
fi
