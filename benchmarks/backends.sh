#!/usr/bin/env bash
# SD 1.5's backends at 512 px, a few at a time so that 24 GiB bear them: benchmarks/backends.sh RESULTS.csv [TINY_VAE]
# TINY_VAE is the folder of a diffusers AutoencoderTiny; with it the lossy case is measured too.
set -euo pipefail
cd "$(dirname "$0")/.."
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
out="$1"
bench=(.venv/bin/darkroom bench backends sd15 --size 512x512 --steps 20 --out "$out")

"${bench[@]}" --pictures 0
"${bench[@]}" --case "torch bf16" --case "openvino bf16"
if [ -n "${2:-}" ]; then "${bench[@]}" --case "openvino bf16,guidance_interval:0.28-1.61,tiny_vae:$2"; fi
