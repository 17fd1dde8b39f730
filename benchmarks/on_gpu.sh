#!/usr/bin/env bash
# Everything that needs a GPU, in under eight minutes, on a machine that has PyTorch and Triton and nothing to install:
#   benchmarks/on_gpu.sh                                  on a GPU
#   benchmarks/on_gpu.sh --lane interpret --seconds 10    a rehearsal without one
# What each line of its table says stands in on_gpu.py. PYTHON names the interpreter, python3 if it is not set.
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
status=0
timeout --kill-after=5 475 "${PYTHON:-python3}" benchmarks/on_gpu.py "$@" || status=$?
if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
    echo "on_gpu.sh: stopped after 475 seconds; what was done stands above" >&2
fi
exit "$status"
