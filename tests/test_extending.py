"""docs/extending.md: its Python runs, and what it adds works as the page says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from darkroom import models, options
from darkroom.data.loader import ReadSettings
from darkroom.models import families
from darkroom.models.model import Model
from darkroom.recipe.sections import AutoencoderLossSettings
from darkroom.sample import choice, solvers
from darkroom.serve.api.app import make_app
from darkroom.serve.api.shared import all_made, pngs_of
from darkroom.serve.jobs.core import Core
from darkroom.serve.request import PictureRequest
from darkroom.train.tasks.encoders import Autoencoder
from serve import conftest

run_core = conftest.run_core
ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def code(heading: str) -> str:
    """The Python of a section."""
    text = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return "\n".join(re.findall(r"^```python\n(.+?)^```", text, re.M | re.S))


def run(heading: str, names: dict[str, Any]) -> dict[str, Any]:
    """What a section's Python defines, where these names are known."""
    exec(compile(code(heading), f"extending.md: {heading}", "exec", dont_inherit=True), names)
    return names


def test_every_file_that_the_page_names_is_there():
    named = set(re.findall(r"`((?:sample|recipe|train|serve|models|tests)/[\w/]+\.py|options\.py)`", PAGE))
    new = {"train/tasks/decoder.py"}
    assert len(named) > 8
    assert [
        one for one in named - new if not any((ROOT / at / one).is_file() for at in ("", "src/darkroom"))
    ] == []


def test_the_solver_of_the_page_is_the_first_order(monkeypatch):
    monkeypatch.setattr(options, "SOLVERS", dict(options.SOLVERS))
    made = run("A solver", {**vars(solvers), "SOLVERS": options.SOLVERS, "Solver": options.Solver})
    monkeypatch.setattr(choice, "SOLVERS", options.SOLVERS)
    monkeypatch.setitem(choice.FILL, "dpmpp_1", made["dpmpp_1"])
    config = {"_class_name": "EulerDiscreteScheduler", "beta_schedule": "scaled_linear"}
    found = choice.make_table("dpmpp_1", config, 7)
    euler = choice.make_table("euler", config, 7)
    assert found.values_SK.tolist() == euler.values_SK.tolist()  # of the first order they are one formula
    assert found.values_SK.tolist() != choice.make_table("ddim", config, 7).values_SK.tolist()


def test_the_loss_of_the_page_is_torchs():
    huber = run("A loss", {"Tensor": Tensor})["classic_huber"]
    out, target = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0)).unbind()
    expected = torch.nn.functional.huber_loss(out, target, reduction="none", delta=0.5)
    assert torch.allclose(huber(out - target, 0.5), expected, atol=1e-7)
    assert not torch.allclose(huber(out - target, 1.0), expected, atol=1e-3)


def test_the_task_of_the_page_trains_the_decoder_alone(monkeypatch):
    names = {"Autoencoder": Autoencoder, "Model": Model, "AutoencoderLossSettings": AutoencoderLossSettings}
    names |= {"ReadSettings": ReadSettings, "Iterable": Iterable, "Mapping": Mapping, "Tensor": Tensor}
    model = models.create("tiny", parts=("vae",))
    read = ReadSettings(pixels=16, latent_channels=model.latent_channels, latent_factor=model.vae_factor)
    task = run("A task", names)["Decoder"](model, AutoencoderLossSettings(), read)
    side = 16 // model.vae_factor
    columns = {
        "pixels": torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8),
        "posterior": torch.randn(2, model.latent_channels, side, side),
    }
    losses = task.losses(task.inputs(columns, torch.device("cpu")))
    losses["loss"].sum().backward()
    learns = {name.split(".")[0] for name, one in model.vae.named_parameters() if one.grad is not None}
    assert {"decoder"} <= learns <= {"decoder", "post_quant_conv"}
    assert task.measure([]) == {}


def test_the_dialect_of_the_page_answers_with_a_picture(run_core):
    names = {"APIRouter": APIRouter, "Request": Request, "Response": Response, "BaseModel": BaseModel}
    names |= {"ConfigDict": ConfigDict, "Field": Field, "Core": Core, "PictureRequest": PictureRequest}
    names |= {"all_made": all_made, "pngs_of": pngs_of, "__name__": __name__}
    made = run("An API dialect", names)

    async def scenario(core: Core) -> list[httpx.Response]:
        transport = httpx.ASGITransport(make_app(core, None, routers=[made["wish_router"]]))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            asked = [{"wish": "a red circle"}, {"wish": ""}]
            return [await client.post("/wish", json=one, timeout=60) for one in asked]

    good, empty = run_core(scenario)
    assert good.status_code == 200
    assert good.content.startswith(b"\x89PNG")
    assert empty.status_code == 422


def test_the_family_of_the_page_can_be_created(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    run("A model family", vars(families))
    assert models.create("tiny-v", parts=("unet",)).scheduler["prediction_type"] == "v_prediction"
    assert models.create("tiny", parts=("unet",)).scheduler["prediction_type"] == "epsilon"


@pytest.fixture
def model_folder(tmp_path):
    """A small model as a folder."""
    folder = tmp_path / "model"
    models.save(models.create("tiny"), folder)
    return folder
