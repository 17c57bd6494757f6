#!/usr/bin/env bash
# What full fine-tuning and LoRA need on a U-Net of 101 million parameters: costs.sh PHOTOS OUT
# The report's own base is so small that weights hardly count; here they do. Random weights: nothing is scored.
set -euo pipefail
photos="$1" out="$2"
root="$(cd "$(dirname "$0")/../.." && pwd)"
mkdir -p "$out"
if [ ! -d "$out/work/sd-101m" ]; then
  "$root/.venv/bin/python" - "$out/work/sd-101m" <<'PYTHON'
import sys

from darkroom import models

unet = {
    "block_out_channels": [160, 320, 640],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "cross_attention_dim": 128,
}
vae = {"block_out_channels": [16, 32, 64], "latent_channels": 4}
text = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
models.save(models.create("tiny", overrides={"unet": unet, "vae": vae, "text_encoder": text}), sys.argv[1])
PYTHON
fi
"$root/.venv/bin/darkroom" bench finetune "$out/work/sd-101m" "$photos/dog6" --class-word dog --out "$out" \
  --methods full,lora --resolution 64 --resolutions 64,128 --batches 1,4 --ranks 4,8,16 \
  --memory 3GB --planned none --costs-only
