"""A diffusion transformer behind the engine: rows of any solver share its steps, and none moves another."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from darkroom import models, sample
from darkroom.serve.engine.runner import settings_of
from darkroom.serve.request import PictureRequest
from darkroom.serve.settings import ServeSettings
from darkroom.serve.status import model_card
from serve.conftest import Server, difference
from serve.engine.test_engine import Running

SMALL = {"transformer": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}}
SOLVERS = [None, "flow_euler", "flow_heun", "flow_dpmpp_2m", "flow_lcm", "euler"]


@pytest.fixture(scope="module")
def transformer() -> models.Model:
    made = models.create("tiny-dit", seed=1, overrides=SMALL)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():  # a fresh one answers zero to everything
        for param in made.unet.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=draw))
    return made


def request(draw: random.Random, i: int) -> PictureRequest:
    return PictureRequest(
        prompt=f"picture {draw.randrange(9)}",
        negative=draw.choice([None, "blue"]),
        seed=i,
        steps=draw.randint(2, 6),
        guidance=draw.choice([1.0, 3.0, 7.5]),
        solver=draw.choice(SOLVERS),
        width=draw.choice([32, 48]),
        height=32,
    )


def test_60_pictures_of_random_mixes_equal_their_lone_runs(transformer: models.Model) -> None:
    draw = random.Random(3)
    asked = [request(draw, i) for i in range(60)]
    with Running(transformer) as running:
        works = [running.work(f"w{i}", one, key=f"k{i % 4}") for i, one in enumerate(asked)]
        running.waiting.wait(len(works))
    assert not any(running.waiting.over.values())
    worst, moved = 0, 0
    for i, work in enumerate(works):
        told = settings_of(asked[i]).model_dump(exclude={"num"})
        lone = sample.generate(transformer, asked[i].prompt, notice=lambda _: None, **told)[0].image
        worst = max(worst, difference(work.pictures[0].image, lone))
        other = works[(i + 1) % len(works)].pictures[0].image
        moved += other.size != lone.size or difference(other, lone) > 1
    assert worst <= 1
    assert moved == len(works)


def test_its_card_names_its_own_solvers(transformer: models.Model) -> None:
    card = model_card(transformer, ServeSettings(model="runs/some/model"), 4096)
    assert card.solvers == ("flow_euler", "flow_heun", "flow_dpmpp_2m", "flow_lcm")
    assert card.solver == "flow_euler"
    assert card.size_step == 8
    assert card.guidance == 7.5
    told = replace(transformer, guidance=2.0)
    assert model_card(told, ServeSettings(model="runs/some/model"), 4096).guidance == 2.0


@pytest.mark.nightly
def test_a_real_server_makes_its_pictures(transformer: models.Model, tmp_path) -> None:
    models.save(transformer, tmp_path / "model")
    server = Server(tmp_path / "model", tmp_path / "state")
    try:
        server.ready()
        body = {"prompt": "a red circle", "steps": 4, "width": 32, "height": 32, "sampler_name": "Euler"}
        made = server.http.post("/sdapi/v1/txt2img", json=body)
        assert made.status_code == 200, made.text
        assert len(made.json()["images"]) == 1
        refused = server.http.post("/sdapi/v1/txt2img", json={**body, "sampler_name": "DDIM"})
        assert refused.status_code in (400, 422)
        assert "rectified flow" in refused.text
    finally:
        server.stop()
