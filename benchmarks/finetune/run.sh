#!/usr/bin/env bash
# The report on each subject at 128 px: benchmarks/finetune/run.sh PHOTOS EMOJI OUT [SUBJECT ...]
#   PHOTOS   the DreamBooth photographs; EMOJI  Noto's emoji with their names (images.zip, captions.jsonl)
#   SUBJECT  any of dog6 cat2 backpack dog; all of them if none is said
# TINY_VAE is the folder of the published autoencoder (config.json and taef2.safetensors); unset: PHOTOS/../taef2.
# COSTS=1 also measures memory, speed and rates, once: they do not depend on the subject.
# OUT/shared gets the base and the extractor of words, OUT/SUBJECT the extractor of likeness that never saw the
# subject, and the report. What is made already is kept: the same command goes on where it stopped.
set -euo pipefail
photos="$1" emoji="$2" out="$3"
shift 3
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../.." && pwd)"
darkroom="${DARKROOM:-$root/.venv/bin/darkroom}"
python="${PYTHON:-$root/.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
shared="$out/shared"
mkdir -p "$shared/vae/vae"

# A run's model, made once: model NAME RECIPE [key=value ...]
model() {
  local run="$1"
  shift
  [ -d "$run/model" ] || "$darkroom" train "$@" --out "$run"
}

if [ ! -d "$shared/subjects.lance" ]; then
  cp "${TINY_VAE:-$photos/../taef2}"/{config.json,taef2.safetensors} "$shared/vae/vae"
  "$python" "$here/pictures.py" "$photos" "$emoji" "$shared/pictures"
  rm -rf "$shared/captioned.lance"
  "$darkroom" import "$shared/pictures/captioned" "$shared/captioned.lance"
  "$darkroom" import "$shared/pictures/subjects" "$shared/subjects.lance"
fi
"$darkroom" prepare "$shared/captioned.lance" --model "$shared/vae" --resolution 128
model "$shared/base" "$here/base.yaml" data.store="$shared/captioned.lance" model.vae="$shared/vae"
# Likeness to words: emoji with their names, and photographs of other subjects.
model "$shared/words" "$root/recipes/extractor.yaml" data.store="$shared/captioned.lance" train.steps=200 \
  train.global_batch=96 optim.warmup_steps=30 objective.extractor.network.width=16 \
  objective.extractor.caption_weight=0.8 checkpoint.every=200 evaluate.every=200

costs=(--batches "" --ranks "" --resolutions "" --sweep "" --planned none)
[ -z "${COSTS:-}" ] || costs=(--batches 1,4 --ranks 4,8,16 --resolutions 128 --sweep 1e-3,3e-3,1e-2)
[ "$#" -gt 0 ] || set -- dog6 cat2 backpack dog
for subject in "$@"; do
  class="${subject//[0-9]/}"
  mkdir -p "$out/$subject"
  # Likeness is by ImageNet's EfficientNet-Lite0 (extra: eval), which no run here has trained.
  if [ ! -f "$out/$subject/report.html" ]; then
    "$darkroom" bench finetune "$shared/base/model" "$photos/$subject" --class-word "$class" \
      --out "$out/$subject" --prompts "$here/prompts.txt" \
      --extractor dino=efficientnet-lite0 --extractor clip="$shared/words/model" \
      --resolution 128 --batch 4 --rank 16 --targets conv "${costs[@]}" \
      --steps 300 --method-steps lora=900 --method-steps dreambooth-lora=900 --every 100 --num 2 --draw-steps 20 --guidance 2 --class-images 12 \
      --lr full=5e-4 --lr dreambooth=5e-4 --lr lora=3e-3 --lr dreambooth-lora=3e-3 --memory 2GB --repeats 3
  fi
  costs=(--batches "" --ranks "" --resolutions "" --sweep "" --planned none)
  # Our own extractor beside it: photographs of the other six subjects.
  model "$out/$subject/likeness" "$root/recipes/extractor.yaml" data.store="$shared/subjects.lance" \
    data.filter="subject <> '$subject'" data.holdout=0 train.steps=150 train.global_batch=64 \
    optim.warmup_steps=20 objective.extractor.network.width=16 objective.extractor.caption_weight=0.5 \
    checkpoint.every=150 evaluate.every=0
  "$python" "$here/controls.py" "$photos" "$subject" "$out/$subject" efficientnet-lite0 \
    "$out/$subject/likeness/model" --out "$out/$subject/controls.csv"
done
