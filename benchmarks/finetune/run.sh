#!/usr/bin/env bash
# The report on one subject at 64 px, from nothing: benchmarks/finetune/run.sh BASE PHOTOS EMOJI OUT
#   BASE    a model at 64 px, such as runs/emoji/model of recipes/emoji.yaml
#   PHOTOS  the DreamBooth photographs (backpack and, for the extractors, dog2, duck_toy, teapot)
#   EMOJI   a store of captioned pictures for the extractor of prompt fidelity; a copy is added to
# The extractors never see the subject. Runs are kept in OUT/work: move OUT/*.csv away and it goes on.
set -euo pipefail
base="$1" photos="$2" emoji="$3" out="$4"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
here="$(cd "$(dirname "$0")/../.." && pwd)"
darkroom="$here/.venv/bin/darkroom"
mkdir -p "$out/others"
for pair in dog2:dog duck_toy:toy teapot:teapot; do
  name="${pair%%:*}"
  for file in "$photos/$name"/*.jpg; do
    target="$out/others/$name-$(basename "$file" .jpg)"
    cp "$file" "$target.jpg"
    echo "a photo of a ${pair##*:}" > "$target.txt"
  done
done
[ -d "$out/captioned.lance" ] || cp -r "$emoji" "$out/captioned.lance"
"$darkroom" import "$out/others" "$out/captioned.lance"
"$darkroom" import "$out/others" "$out/photos.lance"
# Likeness to the subject: photographs alone. Likeness to words: emoji with their names and the photographs.
"$darkroom" train "$here/recipes/extractor.yaml" data.store="$out/photos.lance" data.holdout=0 train.steps=90 \
  train.global_batch=15 optim.warmup_steps=10 checkpoint.every=90 evaluate.every=0 \
  objective.extractor.network.width=16 objective.extractor.caption_weight=0 --out "$out/extractor-photos"
"$darkroom" train "$here/recipes/extractor.yaml" data.store="$out/captioned.lance" train.steps=335 \
  data.filter="skin_tone IS NULL OR array_length(skin_tone) = 0" train.global_batch=96 optim.warmup_steps=30 \
  objective.extractor.network.width=16 checkpoint.every=250 evaluate.every=250 --out "$out/extractor-words"
cat > "$out/prompts.txt" <<'PROMPTS'
{token} {class}
a photo of {token} {class}
red heart and {token} {class}
soccer ball and {token} {class}
green apple and {token} {class}
PROMPTS
"$darkroom" bench finetune "$base" "$photos/backpack" --class-word backpack --out "$out" \
  --extractor dino="$out/extractor-photos/model" --extractor clip="$out/extractor-words/model" \
  --prompts "$out/prompts.txt" --resolution 64 --resolutions 64,128 --batches 1,4,8 --ranks 4,8,16,32 \
  --batch 4 --rank 16 --targets all-linear --steps 600 --every 75 --num 4 --draw-steps 12 --guidance 3 \
  --lr full=1e-3 --lr dreambooth=1e-3 --lr lora=5e-3 --lr dreambooth-lora=5e-3 \
  --sweep 1e-3,2e-3,5e-3,1e-2 --class-images 12 --memory 800MB
