# Read by the other scripts: what may be set in the environment, with its default. The names in lower
# case are those of NVIDIA's scripts.

INPUT_PATH=${INPUT_PATH:-${download_dir:-/data/dlrm/criteo}} # day_0, day_1, ..., or train.txt
final_output_dir=${final_output_dir:-/data/dlrm/binary_dataset}
final_output_dir=${final_output_dir%/}
if [[ -z ${OUTPUT_PATH:-} && ${final_output_dir##*/} != binary_dataset ]]; then
  echo "error: final_output_dir=$final_output_dir: expected a folder called binary_dataset" >&2
  exit 1
fi
OUTPUT_PATH=${OUTPUT_PATH:-$(dirname "$final_output_dir")} # binary_dataset/ is written there
NUM_DAYS=${NUM_DAYS:-}                                     # how many day files there must be; empty: any number

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

# Is a word one of NVIDIA's names of a machine?
is_machine() {
  case $1 in
    CPU) ;;
    GPU | DGX2 | DGX-2 | DGX-A100) echo "note: $1: preprocessing runs on processor cores here" ;;
    *) return 1 ;;
  esac
}

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=$repository/.venv/bin/python
  [[ -x $PYTHON ]] || PYTHON=python3
fi
