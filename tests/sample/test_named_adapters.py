"""Adapters in `generate`: against diffusers' `load_lora_weights`, and prompts with their own in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_generate import pipeline_of

from darkroom import models
from darkroom.errors import InputError, ModelError
from darkroom.models import Adapter, Layer, Model, merge, write_adapter
from darkroom.models.adapters import adaptable
from darkroom.sample import Named, generate, read_tags

PROMPT = "a red circle on a blue background"
SETTINGS: dict[str, Any] = {"steps": 3, "seed": 3, "guidance": 4.0, "notice": lambda _: None}
# diffusers passes kohya's keys of a text encoder by unless an out_proj is among them.
LAYERS = ("to_q", "to_v", "to_out.0", "net.2", "resnets.0.conv1", "proj_in", "q_proj", "out_proj", "fc1")


def made(model: Model, seed: int, *, only: str = "", scale: float = 0.5) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for path, layer in adaptable(model).items():
        if path.endswith(LAYERS) and path.startswith(only):
            outputs, *inputs = layer.weight.shape
            down = torch.randn(4, *inputs, generator=generator) / torch.tensor(inputs).prod() ** 0.5
            up = torch.randn(outputs, 4, *[1] * (len(inputs) - 1), generator=generator) * 0.6
            layers[path] = Layer(down, up, scale)
    return Adapter(f"made{seed}", layers)


def pixels(pictures: list[Any]) -> NDArray[np.int64]:
    return np.stack([np.asarray(picture.image) for picture in pictures]).astype(np.int64)


def drawn(model: Model, prompts: list[str] | str = PROMPT, **more: Any) -> NDArray[np.int64]:
    return pixels(generate(model, prompts, **{**SETTINGS, **more}))


def apart(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    return int(abs(one - other).max())


@pytest.mark.parametrize("kohya", [False, True])
@pytest.mark.parametrize("family", ["tiny", "sdxl"])
def test_diffusers_draws_the_same_picture_from_our_file(
    family: str, kohya: bool, tiny: Model, small_xl: Model, tmp_path: Path
) -> None:
    """U-Net, convolutions and text encoders, alpha half the rank; float32, same seed."""
    from copy import deepcopy

    model = {"tiny": tiny, "sdxl": small_xl}[family]
    file = write_adapter(made(model, 1), tmp_path / "a.safetensors", kohya=kohya)
    ours = drawn(model, adapters={"a": file})[0]
    pipe = pipeline_of(deepcopy(model), "euler" if model.is_sdxl else "ddim")
    pipe.load_lora_weights(str(file))
    size = model.sample_size
    theirs = pipe(
        PROMPT,
        num_inference_steps=3,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(3),
        height=size,
        width=size,
    ).images[0]
    assert abs(np.asarray(theirs).astype(np.int64) - ours).max() <= 2
    assert apart(drawn(model)[0], ours) >= 10
    assert apart(drawn(model, adapters={"a": made(model, 2)})[0], ours) >= 10


def test_each_prompt_has_its_own_adapters_in_one_batch(tiny: Model) -> None:
    one, two = made(tiny, 1), made(tiny, 2, only="text_encoder")
    prompts = [f"{PROMPT} <lora:one>", f"<lora:two:0.5>{PROMPT}", f"{PROMPT} <lora:one:0>", PROMPT]
    pictures = generate(tiny, prompts, adapters={"one": one, "two": (two, 0.7)}, **SETTINGS)
    for i, pairs in enumerate([[(one, 1.0)], [(two, 0.5)], [], [(one, 1.0), (two, 0.7)]]):
        merged = models.create("tiny", seed=1)
        for adapter, weight in pairs:
            merge(merged, adapter, weight)
        expected = drawn(merged, seed=3 + i)
        assert apart(pixels([pictures[i]]), expected) <= 1
        assert not pairs or apart(drawn(tiny, seed=3 + i), expected) >= (10 if one in dict(pairs) else 2)
    told = [picture.parameters.get("adapters") for picture in pictures]
    assert [[(one["name"], one["weight"]) for one in some or []] for some in told] == [
        [("one", 1.0)],
        [("two", 0.5)],
        [],
        [("one", 1.0), ("two", 0.7)],
    ]
    assert [picture.parameters["prompt"] for picture in pictures] == prompts


def test_the_model_is_as_it_was_afterwards(tiny: Model, tmp_path: Path) -> None:
    before = drawn(tiny)
    file = write_adapter(made(tiny, 1), tmp_path / "a.safetensors")
    picture = generate(tiny, PROMPT, adapters={"a": file}, **SETTINGS)[0]
    assert len(picture.parameters["adapters"][0]["sha256"]) == 64
    with pytest.raises(InputError):
        generate(tiny, PROMPT, adapters={"a": file}, size=(33, 33), notice=print)
    assert apart(drawn(tiny), before) == 0
    assert not any("bank" in name for name, _ in tiny.unet.named_buffers())  # type: ignore[union-attr]


def test_tags_are_read_as_a1111_writes_them() -> None:
    assert read_tags("a <lora:sks:0.8> dog <lora:my ink>") == ("a dog", [("sks", 0.8), ("my ink", None)])
    assert read_tags("a <b> (c:1.2)  d") == ("a <b> (c:1.2)  d", [])
    for tag in ("<lora:a:x>", "<lora:a:1:2>", "<lora:a:nan>", "<lora:a:>"):
        with pytest.raises(InputError, match="<lora:NAME:WEIGHT>"):
            read_tags(f"a {tag}")


def test_mistakes_are_told_in_one_line(tiny: Model, tmp_path: Path) -> None:
    file = write_adapter(made(tiny, 1), tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="'<lora:b>' in a prompt; allowed: a"):
        generate(tiny, "x <lora:b>", adapters={"a": file})
    with pytest.raises(InputError, match="none are given"):
        generate(tiny, "x <lora:b>")
    with pytest.raises(InputError, match="two adapters are named 'a'"):
        generate(tiny, "x", adapters=[Named.parsed(f"a={file}"), Named.parsed(f"{file}:0.5")])
    with pytest.raises(InputError, match="weight 1000"):
        generate(tiny, "x", adapters={"a": (file, 1000.0)})
    with pytest.raises(InputError, match="adapter name"):
        generate(tiny, "x", adapters={"a:b": file})
    with pytest.raises(ModelError, match="is a dora"):
        generate(tiny, "x", adapters={"a": Adapter("soft", made(tiny, 1).layers, kind="dora")})


def test_the_command_lines_name_file_and_weight(tiny: Model, tmp_path: Path) -> None:
    file = write_adapter(made(tiny, 1), tmp_path / "ink.safetensors")
    told = {text: Named.parsed(text) for text in (str(file), f"x={file}", f"x={file}:-0.5", f"{file}:2")}
    assert [(one.name, one.weight) for one in told.values()] == [
        ("ink", 1),
        ("x", 1),
        ("x", -0.5),
        ("ink", 2),
    ]
    with pytest.raises(InputError, match="NAME=FILE"):
        Named.parsed(f"{file}:much")
