"""ComfyUI's nodes, executed as ComfyUI executes them, against a real server."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from darkroom import sample
from darkroom.sample.control import MAPS
from darkroom.sample.inputs import read_image
from serve.conftest import Server, difference
from serve.nets import steering, write_nets

PACKAGE = Path(__file__).parents[3] / "contrib" / "comfyui"
ASKED = {"width": 32, "height": 32, "steps": 4, "guidance": 4.0, "seed": 5, "num": 1}
ASKED |= {"solver": "", "weighting": "none"}


@pytest.fixture(scope="module")
def nodes() -> Any:
    """The package as ComfyUI imports it: by its folder."""
    spec = importlib.util.spec_from_file_location("darkroom_nodes", PACKAGE / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["darkroom_nodes"] = module
    spec.loader.exec_module(module)
    return module.NODE_CLASS_MAPPINGS


@pytest.fixture(scope="module")
def server(small, model_folder, adapter_folder, tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("comfyui")
    (folder / "nets").mkdir()
    write_nets(folder / "nets", small, small)
    options = ("--adapters", str(adapter_folder), "--controls", str(folder / "nets"))
    started = Server(model_folder, folder / "state", *options)
    started.nets = folder / "nets"  # type: ignore[attr-defined]
    yield started.ready()
    started.kill()


def run(nodes: Any, called: str, /, **inputs: Any) -> Any:
    """A node by its own declaration, with what ComfyUI would refuse refused."""
    node = nodes[called]
    declared = node.INPUT_TYPES()
    assert inputs.keys() >= declared["required"].keys()
    assert inputs.keys() <= {**declared["required"], **declared.get("optional", {})}.keys()
    results = getattr(node(), node.FUNCTION)(**inputs)
    assert len(results) == len(node.RETURN_TYPES)
    return results


def pictures(tensor: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray((one.numpy() * 255).round().astype(np.uint8)) for one in tensor]


def tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image, np.float32) / 255)[None]


def test_nodes_draw_what_generate_draws(nodes, server, small, adapter_folder):
    [there] = run(nodes, "DarkroomServer", url=f"{server.url}/", key_variable="")
    [adapters] = run(nodes, "DarkroomAdapter", name="style1", weight=0.8, text_weight=0.3)
    [controls] = run(
        nodes,
        "DarkroomControl",
        net="edges",
        image=tensor(steering(4)),
        weight=0.7,
        start=0.0,
        end=1.0,
        map="none",
    )
    asked = {"server": there, "prompt": "a horse", "negative": "fog", **ASKED, "num": 2}
    images, told = run(nodes, "DarkroomDraw", **asked, adapters=adapters, controls=controls)
    assert images.shape == (2, 32, 32, 3)
    assert [one["seed"] for one in json.loads(told)] == [5, 6]
    common: dict[str, Any] = {"negative": "fog", "steps": 4, "guidance": 4.0, "seed": 5, "num": 2}
    lone = sample.generate(
        small,
        "a horse <lora:style1:0.3:0.8>",
        adapters={"style1": adapter_folder / "style1.safetensors"},
        controls=[sample.Control(server.nets / "edges", steering(4), 0.7)],
        notice=lambda _: None,
        **common,
    )
    plain = sample.generate(small, "a horse", notice=lambda _: None, **common)
    for made, one, other in zip(pictures(images), lone, plain, strict=True):
        assert difference(made, one.image) <= 2
        assert difference(made, other.image) >= 3


def test_nodes_edit_and_enlarge(nodes, server, small):
    [there] = run(nodes, "DarkroomServer", url=server.url, key_variable="NOT_SET")
    start = steering(2).convert("RGB")
    mask = Image.new("L", (32, 32))
    mask.paste(255, (0, 0, 16, 32))
    asked = {"server": there, "prompt": "a horse", "negative": "", **ASKED}
    edited, _ = run(
        nodes,
        "DarkroomDraw",
        **asked,
        image=tensor(start),
        mask=torch.from_numpy(np.asarray(mask, np.float32) / 255)[None],
        strength=0.8,
    )
    [lone] = sample.generate(
        small,
        "a horse",
        image=read_image(start),
        mask=mask,
        strength=0.8,
        steps=4,
        guidance=4.0,
        seed=5,
        notice=lambda _: None,
    )
    [made] = pictures(edited)
    assert difference(made, lone.image) <= 2
    assert difference(made, start) >= 20
    assert difference(made.crop((20, 0, 32, 32)), start.crop((20, 0, 32, 32))) <= 2
    [larger] = run(nodes, "DarkroomUpscale", server=there, image=tensor(start), upscaler="Lanczos", scale=2.0)
    assert difference(pictures(larger)[0], start.resize((64, 64), Image.Resampling.LANCZOS)) == 0


def test_a_node_names_its_model(nodes, server):
    [there] = run(nodes, "DarkroomServer", url=server.url, key_variable="")
    asked = {"server": there, "prompt": "a horse", "negative": "", **ASKED}
    made = [pictures(run(nodes, "DarkroomDraw", **asked, model=name)[0])[0] for name in ("", " small ")]
    assert difference(*made) <= 2
    with pytest.raises(RuntimeError, match="this server has 'small'"):
        run(nodes, "DarkroomDraw", **asked, model="nobody")
    assert "model" in nodes["DarkroomDraw"].INPUT_TYPES()["optional"]


def test_the_maps_are_the_servers(nodes):
    maps = nodes["DarkroomControl"].INPUT_TYPES()["required"]["map"][0]
    assert sorted(maps) == sorted(MAPS)


def test_what_the_server_refuses_is_shown(nodes, server):
    [there] = run(nodes, "DarkroomServer", url=server.url, key_variable="")
    asked = {"server": there, "prompt": "a", "negative": "", **ASKED}
    [adapters] = run(nodes, "DarkroomAdapter", name="nobody", weight=1.0, text_weight=1.0)
    with pytest.raises(RuntimeError, match="no adapter 'nobody' here"):
        run(nodes, "DarkroomDraw", **asked, adapters=adapters)
    [away] = run(nodes, "DarkroomServer", url="http://127.0.0.1:9", key_variable="")
    with pytest.raises(RuntimeError, match="no server at http://127.0.0.1:9"):
        run(nodes, "DarkroomDraw", **{**asked, "server": away})


def test_an_interrupted_workflow_cancels_its_job(nodes, server, monkeypatch):
    from darkroom_nodes import nodes as module

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_raise_if_interrupted", interrupted)
    [there] = run(nodes, "DarkroomServer", url=server.url, key_variable="")
    with pytest.raises(KeyboardInterrupt):
        run(nodes, "DarkroomDraw", server=there, prompt="a", negative="", **{**ASKED, "steps": 150})
    newest = server.http.get("/jobs", params={"limit": 1}).json()["jobs"][0]
    assert newest["state"] == "cancelled"
