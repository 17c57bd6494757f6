#!/usr/bin/env bash
# Every GPU row of benchmarks/, in one go, on a machine with one otherwise idle card:
#   benchmarks/gpu.sh [RESULTS.csv] [MODEL ...]
# Needs torch, diffusers, transformers, accelerate, safetensors, pydantic, typer and matplotlib; no network and no
# store: weights are random, of the families' true sizes. Training is measured where pylance can be imported.
# CLIP's tokenizer comes from $DARKROOM_CLIP_TOKENIZER, a folder with vocab.json and merges.txt.
# QUICK=1 takes fewer repeats and smaller batches; PYTHON says which interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python="$PWD/.venv/bin/python"; fi
out="${1:-benchmarks/gpu-$(date +%Y-%m-%d).csv}"
shift || true
models=("$@")
if [ ${#models[@]} -eq 0 ]; then models=(sd15 sdxl); fi
repeats=7 most=64
if [ -n "${QUICK:-}" ]; then repeats=3 most=8; fi
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
for folder in shared/data/clip_tokenizer ../shared/data/clip_tokenizer; do
  if [ -z "${DARKROOM_CLIP_TOKENIZER:-}" ] && [ -d "$folder" ]; then export DARKROOM_CLIP_TOKENIZER="$folder"; fi
done
darkroom() { "$python" -c 'from darkroom.cli import main; main()' "$@"; }

"$python" - <<'CHECK'
import torch
if not torch.cuda.is_available():
    raise SystemExit("benchmarks/gpu.sh needs a CUDA card; benchmarks/cpu.sh is for machines without")
print(torch.cuda.get_device_name(), "torch", torch.__version__)
CHECK

for model in "${models[@]}"; do
  darkroom bench ladder "$model" --device cuda --precision fp16 --steps 20 --repeats "$repeats" --out "$out" \
    channels_last fused_attention fused_qkv cuda_graphs compile_regional compile attention_slicing vae_slicing \
    guidance_interval feature_cache offload_model offload_group auto auto,cuda_graphs auto,compile \
    auto,compile,cuda_graphs auto,cuda_graphs,guidance_interval
  darkroom bench batch "$model" --device cuda --steps 20 --most "$most" --repeats "$repeats" --out "$out"
done

# A step of pre-training on synthetic latents, switch by switch; no store is needed.
for resolution in 256 512; do
  darkroom bench train --model sd2 --resolution "$resolution" --batch auto --device cuda --repeats "$repeats" \
    --out "$out"
done

# The training loop reads a store, so it waits for a machine that has the package for one.
recipe="quickstart/runs/pretrain/recipe.yaml"
if "$python" -c 'import lance' 2>/dev/null && [ -f "$recipe" ]; then
  darkroom bench train "$recipe" train.log_every=20 --out "$out"
else
  echo "no training row: it needs pylance and the quickstart's run ($recipe)"
fi
darkroom report "$out" --out "${out%.csv}.html"
echo "rows: $out"
