#!/usr/bin/env bash
# Runs a rank's command on its own share of the cores, as NVIDIA's script of this name does:
#
#     torchrun --no_python --nproc_per_node 8 ./bind.sh --cpu=exclusive -- python -m dlrm.scripts.main ...
#
#     --cpu=exclusive  as many cores for each rank (default)
#     --cpu=node       the cores of one NUMA node, the nodes in turn
#     --cpu=off        all cores
#     --mem, --ib      accepted, and unused: the kernel gives a bound process memory of its node
set -euo pipefail

cpu=exclusive
while [[ $# -gt 0 && $1 != -- ]]; do
  case $1 in
    --cpu=*) cpu=${1#*=} ;;
    --mem=* | --ib=*) ;;
    *) echo "error: bind.sh: expected --cpu=exclusive|node|off, -- and a command, got $1" >&2 && exit 2 ;;
  esac
  shift
done
if [[ $# -lt 2 ]]; then
  echo "error: bind.sh: expected -- and a command after the options" >&2
  exit 2
fi
shift

rank=${LOCAL_RANK:-${OMPI_COMM_WORLD_LOCAL_RANK:-0}}
ranks=${LOCAL_WORLD_SIZE:-${OMPI_COMM_WORLD_LOCAL_SIZE:-1}}
case $cpu in
  off) exec "$@" ;;
  node)
    nodes=(/sys/devices/system/node/node[0-9]*)
    if [[ ! -e ${nodes[0]}/cpulist ]]; then
      echo "error: bind.sh: --cpu=node: this machine does not say its NUMA nodes; --cpu=exclusive needs none" >&2
      exit 2
    fi
    exec taskset -c "$(cat "${nodes[rank % ${#nodes[@]}]}/cpulist")" "$@"
    ;;
  exclusive)
    # The cores that this process may use, one a line; nproc would count OMP_NUM_THREADS.
    mapfile -t cores < <(taskset -pc $$ | sed 's/.*: //' | tr , '\n' |
      while IFS=- read -r first last; do seq "$first" "${last:-$first}"; done)
    share=$((${#cores[@]} / ranks))
    if ((share == 0)); then
      echo "error: bind.sh: expected at most ${#cores[@]} ranks, one a core, got $ranks; --cpu=off binds none" >&2
      exit 2
    fi
    own=("${cores[@]:rank * share:share}")
    exec taskset -c "$(IFS=, && echo "${own[*]}")" "$@"
    ;;
  *) echo "error: bind.sh: --cpu=$cpu: expected exclusive, node or off" >&2 && exit 2 ;;
esac
