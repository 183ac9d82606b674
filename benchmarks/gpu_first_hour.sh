#!/usr/bin/env bash
# The first hour on a GPU: every experiment of docs/gpu.md's table, the most decisive first.
#
#   benchmarks/gpu_first_hour.sh                              # 60 minutes
#   benchmarks/gpu_first_hour.sh --list
#   benchmarks/gpu_first_hour.sh --minutes 9                  # a piece of it, and then the next one:
#   benchmarks/gpu_first_hour.sh --minutes 9 --from streams
#   benchmarks/gpu_first_hour.sh --only kernels,memcheck
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then
    PYTHON=.venv/bin/python
  fi
fi
exec "$PYTHON" benchmarks/_first_hour.py "$@"
