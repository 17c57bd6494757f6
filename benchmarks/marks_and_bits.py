"""What marks, credentials and bit-identical serving cost: one JSON line a finding.

    python benchmarks/marks_and_bits.py provenance --side 512 --pictures 20
    python benchmarks/marks_and_bits.py deterministic MODEL --requests 64 --rounds 3

`provenance`: seconds and bytes a picture that the watermark and the credentials add, and seconds to find the
mark. `deterministic`: pictures a second of the engine with and without calls of one fixed shape, on the same
requests in turns, and whether pictures of both runs with fixed shapes have the same bits.
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
from darkroom.serve.engine.executors import places_for
from darkroom.serve.engine.loader import FIXED_ROWS
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


def drawn(model: Any, requests: list[PictureRequest], fixed_rows: int) -> tuple[float, list[Picture]]:
    """Seconds from the first request to the last picture, and the pictures."""
    backend, ended = open_backend("torch", model, optimise="fused_attention,lean"), Ended()
    places = places_for(backend.device, 1, torch.get_num_threads())
    engine = Engine(
        backend.model or model, backend, capacity=16, metrics=Metrics(), places=places, fixed_rows=fixed_rows
    )
    works = [EngineJob(str(i), "key", one, shape_of(model, one), ended) for i, one in enumerate(requests)]
    engine.start()
    at = time.perf_counter()
    for work in works:
        engine.submit(work)
    while ended.over < len(works):
        time.sleep(0.005)
    spent = time.perf_counter() - at
    engine.stop()
    return spent, [work.pictures[0] for work in works]


def cost_of_bits(name: str, count: int, rounds: int, rows: int) -> dict[str, Any]:
    """Medians over rounds in turns."""
    model, draw = models.load(name), random.Random(3)
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
    spent: dict[int, list[float]] = {0: [], rows: []}
    seen: list[list[Picture]] = []
    for turn in range(rounds):
        for fixed in (0, rows):
            shuffled = requests if turn % 2 == 0 else requests[::-1]
            seconds, pictures = drawn(model, shuffled, fixed)
            spent[fixed].append(seconds)
            if fixed:
                seen.append(pictures if turn % 2 == 0 else pictures[::-1])
    same = all(
        torch.equal(one.latents, other.latents)
        for run in seen[1:]
        for one, other in zip(seen[0], run, strict=True)
    )
    free, bound = (count / median(spent[fixed]) for fixed in (0, rows))
    told = {
        "images_per_s": round(free, 4),
        "images_per_s_fixed": round(bound, 4),
        "ratio": round(bound / free, 4),
    }
    return {"benchmark": "deterministic", "model": name, "rows": rows, "same_bits": same, **told}


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_subparsers(dest="which", required=True)
    one = which.add_parser("provenance")
    one.add_argument("--side", type=int, default=512)
    one.add_argument("--pictures", type=int, default=20)
    other = which.add_parser("deterministic")
    other.add_argument("model")
    other.add_argument("--requests", type=int, default=64)
    other.add_argument("--rounds", type=int, default=3)
    other.add_argument("--rows", type=int, default=FIXED_ROWS["cpu"], help="of every call")
    told = parser.parse_args()
    if told.which == "provenance":
        print(json.dumps(cost_of_provenance(told.side, told.pictures)))
    else:
        print(json.dumps(cost_of_bits(told.model, told.requests, told.rounds, told.rows)))


if __name__ == "__main__":
    main()
