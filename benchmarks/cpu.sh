#!/usr/bin/env bash
# Every CPU row of benchmarks/, in one go, on an otherwise idle machine: benchmarks/cpu.sh [RESULTS.csv]
# The training row uses the quickstart's model and latents; without them the quickstart runs first.
set -euo pipefail
cd "$(dirname "$0")/.."
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
out="${1:-benchmarks/cpu-$(date +%Y-%m-%d).csv}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
darkroom="$PWD/.venv/bin/darkroom"

uptime
"$darkroom" bench import --out "$out"
"$darkroom" bench loader --out "$out"

# The loop's overhead is measured on the quickstart's own U-Net and latents.
if [ ! -f quickstart/result.json ]; then "$darkroom" quickstart --out quickstart; fi
"$darkroom" bench train quickstart/runs/pretrain/recipe.yaml train.log_every=20 --out "$out"

# Backends: SD 1.5 at full size takes up to 22 GB and an hour; the tiny model shows the loop's overhead.
benchmarks/backends.sh "$out"
"$darkroom" bench backends tiny --steps 50 --repeats 15 --pictures 15 --out "$out"
uptime
"$darkroom" report "$out" --out "$work/report.html"
echo "rows: $out"
