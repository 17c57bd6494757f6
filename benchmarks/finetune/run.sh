#!/usr/bin/env bash
# The report on each subject at 64 px, from nothing: benchmarks/finetune/run.sh PHOTOS EMOJI OUT [SUBJECT ...]
#   PHOTOS   the DreamBooth photographs; EMOJI  Noto's emoji with their names (images.zip, captions.jsonl)
#   SUBJECT  any of dog6 backpack dog cat2; all of them if none is said
# OUT/shared gets VAE, base and the extractor of words, OUT/SUBJECT the extractor of likeness, which never saw
# the subject, and the report. What is made already is kept: the same command goes on where it stopped.
set -euo pipefail
photos="$1" emoji="$2" out="$3"
shift 3
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../.." && pwd)"
darkroom="$root/.venv/bin/darkroom"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
shared="$out/shared"
mkdir -p "$shared"

# A run's model, made once: model NAME RECIPE [key=value ...]
model() {
  local run="$1"
  shift
  [ -d "$run/model" ] || "$darkroom" train "$@" --out "$run"
}

if [ ! -d "$shared/subjects.lance" ]; then
  "$root/.venv/bin/python" "$here/pictures.py" "$photos" "$emoji" "$shared/pictures"
  rm -rf "$shared"/{captioned,vae}.lance
  "$darkroom" import "$shared/pictures/captioned" "$shared/captioned.lance"
  cp -r "$shared/captioned.lance" "$shared/vae.lance"
  "$darkroom" import "$shared/pictures/hues" "$shared/vae.lance"
  "$darkroom" import "$shared/pictures/subjects" "$shared/subjects.lance"
fi
model "$shared/vae-first" "$here/autoencoder.yaml" data.store="$shared/captioned.lance"
model "$shared/vae" "$here/autoencoder.yaml" data.store="$shared/vae.lance" model.base="$shared/vae-first/model" \
  model.vae=null objective.autoencoder.kl_weight=3e-6 optim.lr=1.2e-3 train.steps=1400
"$darkroom" prepare "$shared/captioned.lance" --model "$shared/vae/model" --resolution 64
model "$shared/base" "$here/base.yaml" data.store="$shared/captioned.lance" model.vae="$shared/vae/model"
# Likeness to words: emoji with their names, and photographs of other subjects.
model "$shared/words" "$root/recipes/extractor.yaml" data.store="$shared/captioned.lance" train.steps=250 \
  train.global_batch=96 optim.warmup_steps=30 objective.extractor.network.width=16 \
  objective.extractor.caption_weight=0.8 checkpoint.every=250 evaluate.every=250

# Costs do not depend on the subject: the first one's report has the rates, the cards and all cases.
costs=(--batches 1,4 --ranks 4,8,16 --sweep 1e-3,5e-3,1e-2)
[ "$#" -gt 0 ] || set -- dog6 dog cat2 backpack
for subject in "$@"; do
  class="${subject//[0-9]/}"
  mkdir -p "$out/$subject"
  # Likeness to the subject: photographs of the other six.
  model "$out/$subject/likeness" "$root/recipes/extractor.yaml" data.store="$shared/subjects.lance" \
    data.filter="subject <> '$subject'" data.holdout=0 train.steps=150 train.global_batch=64 \
    optim.warmup_steps=20 objective.extractor.network.width=16 objective.extractor.caption_weight=0.5 \
    checkpoint.every=150 evaluate.every=0
  "$root/.venv/bin/python" "$here/margin.py" "$out/$subject/likeness/model" "$photos" "$subject" \
    --out "$out/$subject/margin.csv"
  if [ ! -f "$out/$subject/report.html" ]; then
    "$darkroom" bench finetune "$shared/base/model" "$photos/$subject" --class-word "$class" \
      --out "$out/$subject" --prompts "$here/prompts.txt" \
      --extractor dino="$out/$subject/likeness/model" --extractor clip="$shared/words/model" \
      --resolution 64 --resolutions 64 --batch 4 --rank 8 --targets conv "${costs[@]}" \
      --steps 480 --every 80 --num 2 --draw-steps 12 --guidance 2 --class-images 12 \
      --lr full=5e-4 --lr dreambooth=5e-4 --lr lora=5e-3 --lr dreambooth-lora=5e-3 --memory 1300MB --repeats 3
  fi
  costs=(--batches 4 --ranks 8 --sweep "" --planned none)
done
