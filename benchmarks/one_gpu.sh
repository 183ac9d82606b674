#!/usr/bin/env bash
# What one GPU can show in half an hour, a stage a command of less than nine minutes:
#
#   benchmarks/one_gpu.sh STAGE [FOLDER]       # 1 build and kernels, 2 ranks, 3 direct path, 4 speed
#   benchmarks/one_gpu.sh STAGE --list
#   benchmarks/one_gpu.sh 1,2,3 --jobs 6       # several stages, steps side by side
#
# Results go to $OUT, or to FOLDER: results.md, results.json, logs.tar.gz and state.tar.gz. The last
# of these holds the build and all results so far. A machine that keeps nothing gets it as
# build/one_gpu/state.tar.gz, or by --state PATH, and does not build again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then
    PYTHON=.venv/bin/python
  fi
fi
exec "$PYTHON" benchmarks/_one_gpu.py "$@"
