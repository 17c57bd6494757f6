"""What mixing ControlNets and LoRAs in one batch is worth, over HTTP against real servers, as JSON lines.

    python benchmarks/mixed_nets.py MODEL --requests 32 --rounds 3

Half of the requests are plain, a quarter has a ControlNet, a quarter a LoRA (of random weights, made for it).
Rows, each the median of the rounds, in which the ways of asking take turns:

- `one at a time`, `together`: pictures a second of the same requests, and how many times as many (`gain`).
- `plain alone`, `plain beside`: pictures a second of plain requests on a server without nets and adapters,
  and on one that has both in memory (`slowed`, as a share).
- `plain among`: how much longer the plain requests of `together` take, each from asking to its last byte,
  than the same requests where those with nets and LoRAs are plain too: what their evaluations cost everybody.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from darkroom import models
from darkroom.errors import DarkroomError
from darkroom.measure.pipeline_server import PROMPTS, make_adapters
from darkroom.measure.serving import Client, ServerProcess

NET, STEPS = "net", (15, 20, 25)


def write_net(model: Any, folder: Path) -> None:
    """A ControlNet of the model's own U-Net, whose zero convolutions are filled at random."""
    torch.manual_seed(0)
    channels = (16, 32, 96, 256)[: model.vae_factor.bit_length()]
    net = diffusers.ControlNetModel.from_unet(model.unet, conditioning_embedding_out_channels=channels)
    for weight in net.parameters():
        weight.data.add_(0.02 * torch.randn_like(weight))
    net.save_pretrained(str(folder / NET))


def requests(count: int, side: int, adapter: str, *, seed: int, plain: bool = False) -> list[dict[str, Any]]:
    """Half plain, a quarter with a net, a quarter with a LoRA, shuffled; or all plain."""
    draw = random.Random(seed)
    pixels = np.random.default_rng(seed).integers(0, 255, (side // 8, side // 8, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((side, side)).save(buffer, "PNG")
    image = base64.b64encode(buffer.getvalue()).decode()
    kinds: list[dict[str, Any]] = [{}, {}, {"controls": [{"net": NET, "image": image}]}]
    kinds.append({"adapters": [{"name": adapter}]})
    told = [
        {
            "prompt": draw.choice(PROMPTS),
            "steps": draw.choice(STEPS),
            "guidance": 5.0,
            "seed": i,
            **({} if plain else kinds[i % len(kinds)]),
        }
        for i in range(count)
    ]
    draw.shuffle(told)
    return told


async def done(client: Client, body: dict[str, Any]) -> float:
    """One picture; seconds from asking to its last byte."""
    at = time.perf_counter()
    status, job = await client.json("POST", "/jobs", body)
    if status != 202:
        raise DarkroomError(f"refused: {job}")
    while job["state"] in ("queued", "running"):
        _, job = await client.json("GET", f"/jobs/{job['id']}?wait_s=30")
    if job["state"] != "done":
        raise DarkroomError(f"a job ended as {job['state']}: {job['error']}")
    return time.perf_counter() - at


async def rate(
    client: Client, bodies: list[dict[str, Any]], plain: set[int], *, together: bool
) -> tuple[float, float]:
    """Pictures a second, and the mean seconds that the requests of these seeds took."""
    at = time.perf_counter()
    if together:
        took = await asyncio.gather(*(done(client, body) for body in bodies))
    else:
        took = [await done(client, body) for body in bodies]
    per_s = len(bodies) / (time.perf_counter() - at)
    return per_s, mean(s for s, body in zip(took, bodies, strict=True) if body["seed"] in plain)


def pairs(one: list[float], other: list[float]) -> zip[tuple[float, float]]:
    """Those of the same round."""
    return zip(one, other, strict=True)


async def measured(ref: str, count: int, rounds: int, options: list[str]) -> list[dict[str, Any]]:
    """All rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = models.load(ref)
        (folder / "nets").mkdir()
        (folder / "adapters").mkdir()
        write_net(model, folder / "nets")
        [adapter] = make_adapters(model, folder / "adapters", 1, seed=1)
        side = model.sample_size
        has_all = ("--controls", str(folder / "nets"), "--adapters", str(folder / "adapters"), *options)
        found: dict[str, list[float]] = {}
        waited: dict[str, list[float]] = {}
        with (
            ServerProcess(ref, folder / "mixed", "--no-provenance", *has_all) as mixed,
            ServerProcess(ref, folder / "plain", "--no-provenance", *options) as bare,
        ):
            here, there = Client(mixed.port), Client(bare.port)
            for server, client in ((mixed, here), (bare, there)):
                await server.ready(client)
            for client, is_plain in ((here, False), (there, True)):  # nets and adapters are read
                first = requests(8, side, adapter, seed=99, plain=is_plain)
                await rate(client, first, set(range(8)), together=True)
            for i in range(rounds):
                both = requests(count, side, adapter, seed=i)
                alone = requests(count, side, adapter, seed=i, plain=True)
                plain = {body["seed"] for body in both if not body.keys() & {"controls", "adapters"}}
                for way, client, bodies, together in (
                    ("one at a time", here, both, False),
                    ("together", here, both, True),
                    ("plain alone", there, alone, True),
                    ("plain beside", here, alone, True),
                ):
                    per_s, mean_s = await rate(client, bodies, plain, together=together)
                    found.setdefault(way, []).append(per_s)
                    waited.setdefault(way, []).append(mean_s)
    rows = [{"row": way, "pictures_per_s": median(some), "rounds": some} for way, some in found.items()]
    told = {row["row"]: row["pictures_per_s"] for row in rows}
    rows.append({"row": "gain", "value": told["together"] / told["one at a time"]})
    # Of the pairs of each round: a machine's speed changes from round to round.
    slowed = (beside / alone for beside, alone in pairs(found["plain beside"], found["plain alone"]))
    rows.append({"row": "slowed", "value": 1 - median(slowed)})
    among = median(mixed / plain for mixed, plain in pairs(waited["together"], waited["plain beside"])) - 1
    rows.append({"row": "plain among", "value": among})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a model folder; a family's name serves two models of random weights")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("options", nargs="*", help="of darkroom serve, after --")
    told = parser.parse_args()
    for row in asyncio.run(measured(told.model, told.requests, told.rounds, told.options)):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
