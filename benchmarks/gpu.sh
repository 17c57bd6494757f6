#!/usr/bin/env bash
# Every GPU row of benchmarks/, a few minutes a call, going on where it stopped: see benchmarks/gpu.py.
#   benchmarks/gpu.sh --plan
#   benchmarks/gpu.sh --out rows.csv --minutes 9 [--wheels FOLDER]
# PYTHON says which interpreter.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-python3}"
if [ -z "${PYTHON:-}" ] && [ -x "$root/.venv/bin/python" ]; then python="$root/.venv/bin/python"; fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "$python is no Python 3.11 or newer: PYTHON=/path/to/python3.12 benchmarks/gpu.sh ..." >&2
  exit 2
fi
exec "$python" "$root/benchmarks/gpu.py" "$@"
