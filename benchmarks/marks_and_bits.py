"""What marks, credentials and bit-identical serving cost: one JSON line a finding.

    python benchmarks/marks_and_bits.py provenance --side 512 --pictures 20
    python benchmarks/marks_and_bits.py unmarked --pictures 10000 --photographs FOLDER
    python benchmarks/marks_and_bits.py deterministic MODEL --requests 64 --rounds 5 --precision float32

`provenance`: seconds and bytes a picture that the watermark and the credentials add, and seconds to find the
mark. `unmarked`: in how many pictures without a mark one is found: crops of photographs, turned and mirrored,
each scaled to 256 px. `deterministic`: pictures a second of the engine with and without `--deterministic`, on
the same requests in turns (a round of each, the first one untimed), and whether the pictures of all rounds
with it have the same bits; each round has the requests in another order. Its ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from darkroom import models
from darkroom.sample import provenance, watermark
from darkroom.sample.backends import open_backend
from darkroom.sample.pictures import Picture
from darkroom.serve.engine.batch import places_for
from darkroom.serve.engine.loader import fixed_rows, row_bytes, rows_for_memory
from darkroom.serve.engine.loop import Engine
from darkroom.serve.engine.runner import shape_of
from darkroom.serve.engine.tickets import EngineJob
from darkroom.serve.metrics import Metrics
from darkroom.serve.request import PictureRequest


def picture(side: int, seed: int) -> Image.Image:
    """Noise with the spectrum of a photograph."""
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side)[None])
    frequency[0, 0] = 1
    noise = np.random.default_rng(seed).standard_normal((3, side, side))
    layers = np.real(np.fft.ifft2(np.fft.fft2(noise) / frequency))
    layers = (layers - layers.mean()) / layers.std() * 45 + 120
    return Image.fromarray(np.clip(layers.transpose(1, 2, 0), 0, 255).astype(np.uint8))


def cost_of_provenance(side: int, count: int) -> dict[str, Any]:
    """Medians over `count` pictures."""
    spent: dict[str, list[float]] = {name: [] for name in ("mark_s", "sign_s", "find_s", "sign_bytes")}
    with tempfile.TemporaryDirectory() as folder:
        marks = provenance.Provenance.opened(None, Path(folder) / "certificate.pem")
        for seed in range(count):
            image = picture(side, seed)
            at = time.perf_counter()
            marked = marks.marked(image, provenance.Origin(seed))
            spent["mark_s"].append(time.perf_counter() - at)
            buffer = io.BytesIO()
            marked.save(buffer, "PNG", compress_level=1)
            plain, parameters = buffer.getvalue(), {"model": "m", "seed": seed, "steps": 30}
            at = time.perf_counter()
            signed = marks.signed(plain, "PNG", parameters)
            spent["sign_s"].append(time.perf_counter() - at)
            spent["sign_bytes"].append(len(signed) - len(plain))
            at = time.perf_counter()
            found = watermark.find(marked)
            spent["find_s"].append(time.perf_counter() - at)
            assert found is not None
            assert found.payload == seed
    told = {name: float(f"{median(values):.4g}") for name, values in spent.items()}
    return {"benchmark": "provenance", "side": side, "pictures": count, "signs": marks.signs, **told}


def false_alarms(photographs: Path, count: int) -> dict[str, Any]:
    """Of crops of photographs and of noise with their spectrum."""
    draw, images = random.Random(1), []
    for file in sorted(photographs.rglob("*.jpg")):
        with Image.open(file) as opened:
            least = min(opened.size)
            images.append(opened.convert("RGB").crop((0, 0, least, least)).resize((1024, 1024)))
    found, photographed = 0, len(images)
    images += [picture(1024, seed) for seed in range(12)]
    for i in range(count):
        side = draw.randint(256, 1024)
        left, top = draw.randint(0, 1024 - side), draw.randint(0, 1024 - side)
        part = images[i % len(images)].crop((left, top, left + side, top + side)).resize((256, 256))
        way = draw.choice([None, *Image.Transpose])
        found += watermark.find(part if way is None else part.transpose(way)) is not None
    counts = {"photographs": photographed, "pictures": count, "taken_for_marked": found}
    return {"benchmark": "unmarked", **counts}


class Ended:
    """Notes that works end."""

    def __init__(self) -> None:
        self.over = 0

    def began(self, work: EngineJob) -> None: ...
    def drawn(self, work: EngineJob, index: int) -> None: ...
    def made(self, work: EngineJob) -> None:
        self.over += 1

    def failed(self, work: EngineJob, error: BaseException) -> None:
        raise error


class Running:
    """An engine of its own, with a model of its own, as a server has it."""

    def __init__(self, name: str, precision: str, fixed: bool) -> None:
        model = models.load(name, dtype=models.precision(precision))
        backend = open_backend("torch", model, optimise="fused_attention,lean")
        self.model = model = backend.model or model
        per_row = row_bytes(model, backend)
        self.engine = Engine(
            model,
            backend,
            capacity=rows_for_memory(backend, per_row),
            metrics=Metrics(),
            places=places_for(backend.device, 1, torch.get_num_threads()),
            fixed_rows=fixed_rows(model, backend, per_row) if fixed else None,
        )
        self.engine.start()

    def drawn(self, requests: list[PictureRequest]) -> tuple[float, list[Picture]]:
        """Seconds from the first request to the last picture, and the pictures."""
        ended = Ended()
        works = [
            EngineJob(str(i), "key", one, shape_of(self.model, one), ended) for i, one in enumerate(requests)
        ]
        at = time.perf_counter()
        for work in works:
            self.engine.submit(work)
        while ended.over < len(works):
            time.sleep(0.002)
        return time.perf_counter() - at, [work.pictures[0] for work in works]


def cost_of_bits(name: str, count: int, rounds: int, precision: str) -> dict[str, Any]:
    """Medians over rounds in turns."""
    running, draw = {fixed: Running(name, precision, fixed) for fixed in (False, True)}, random.Random(3)
    requests = [
        PictureRequest(
            prompt=draw.choice(["a red circle", "a horse"]),
            seed=i,
            steps=draw.randint(5, 15),
            guidance=draw.choice([1.0, 5.0, 7.5]),
            solver=draw.choice(["euler", "ddim", "dpmpp_2m"]),
        )
        for i in range(count)
    ]
    spent: dict[bool, list[float]] = {False: [], True: []}
    seen: dict[int, torch.Tensor] = {}
    same = True
    for turn in range(rounds + 1):
        order = random.Random(turn).sample(range(count), count)
        for fixed in (turn % 2 == 0, turn % 2 == 1):
            seconds, pictures = running[fixed].drawn([requests[i] for i in order])
            spent[fixed] += [seconds] if turn else []
            for i, picture in zip(order, pictures, strict=True):
                if fixed:
                    same &= torch.equal(picture.latents, seen.setdefault(i, picture.latents))
    for one in running.values():
        one.engine.stop()
    ratios = sorted(free / bound for free, bound in zip(spent[False], spent[True], strict=True))
    return {
        "benchmark": "deterministic",
        "model": name,
        "precision": precision,
        "requests": count,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "same_bits": same,
        "images_per_s": round(count / median(spent[False]), 4),
        "images_per_s_fixed": round(count / median(spent[True]), 4),
        "ratio": round(median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_subparsers(dest="which", required=True)
    one = which.add_parser("provenance")
    one.add_argument("--side", type=int, default=512)
    one.add_argument("--pictures", type=int, default=20)
    unmarked = which.add_parser("unmarked")
    unmarked.add_argument("--photographs", type=Path, required=True)
    unmarked.add_argument("--pictures", type=int, default=10_000)
    other = which.add_parser("deterministic")
    other.add_argument("model")
    other.add_argument("--requests", type=int, default=64)
    other.add_argument("--rounds", type=int, default=5)
    other.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    told = parser.parse_args()
    if told.which == "provenance":
        print(json.dumps(cost_of_provenance(told.side, told.pictures)))
    elif told.which == "unmarked":
        print(json.dumps(false_alarms(told.photographs, told.pictures)))
    else:
        print(json.dumps(cost_of_bits(told.model, told.requests, told.rounds, told.precision)))


if __name__ == "__main__":
    main()
