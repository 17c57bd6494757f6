"""Adapters in `generate`: against diffusers' `load_lora_weights`, and prompts with their own in one batch."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_generate import pipeline_of

from darkroom import models
from darkroom.errors import InputError, ModelError
from darkroom.models.adapters.adapter import Adapter, Factors, Layer, names_of
from darkroom.models.adapters.read import adaptable, fit, merge, merge_all, write_adapter
from darkroom.models.model import Model
from darkroom.sample import generate
from darkroom.sample.adapters import Named, Tag, read_tags
from darkroom.sample.backends import open_backend

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


def softened(adapter: Adapter) -> Adapter:
    """A DoRA of it: every other output's magnitude is raised or lowered."""
    draw = torch.Generator().manual_seed(1)
    layers = {
        name: replace(layer, magnitude=torch.rand(len(layer.up), generator=draw) + 0.5)
        for name, layer in adapter.layers.items()
        if isinstance(layer, Layer)
    }
    return Adapter(f"soft-{adapter.name}", layers, kind="dora")


def test_a_dora_is_drawn_as_peft_merges_it(tiny: Model, tmp_path: Path) -> None:
    """peft trains it and merges it; `generate` takes peft's own file, at full weight and beside a LoRA."""
    import peft

    torch.manual_seed(3)
    theirs = copy.deepcopy(tiny)
    config = peft.LoraConfig(
        r=4, lora_alpha=4, use_dora=True, target_modules=["to_q", "to_v", "conv1"], init_lora_weights=False
    )
    inside = peft.get_peft_model(theirs.unet, config)
    with torch.no_grad():
        for name, weight in inside.named_parameters():
            weight.mul_(1.6 if "lora_magnitude_vector" in name else 1.0)
    inside.save_pretrained(str(tmp_path))
    theirs.unet = inside.merge_and_unload()
    before = {name: weight.clone() for name, weight in tiny.unet.state_dict().items()}  # type: ignore[union-attr]
    notes: list[str] = []
    ours = drawn(tiny, adapters={"soft": str(tmp_path)}, notice=notes.append)
    assert apart(ours, drawn(theirs)) <= 1
    assert apart(drawn(tiny), ours) >= 10
    assert notes == []
    lora = made(tiny, 2, only="unet.mid_block")
    both = drawn(tiny, adapters={"lora": (lora, 0.7), "soft": str(tmp_path)})
    for path, layer in fit(lora, tiny).layers.items():  # LoRA's change beside the DoRA's, not upon it
        adaptable(theirs)[path].weight.data += 0.7 * layer.delta()
    assert apart(both, drawn(theirs)) <= 1
    assert apart(both, ours) >= 10
    after = tiny.unet.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_diffusers_draws_the_same_picture_from_our_dora(
    tiny: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """U-Net and text encoder. In kohya's keys diffusers 0.42 leaves the magnitudes out, which export says."""
    file = write_adapter(softened(made(tiny, 1)), tmp_path / "a.safetensors")
    ours = drawn(tiny, adapters={"a": file})[0]

    def theirs(file: Path) -> NDArray[np.int64]:
        pipe = pipeline_of(copy.deepcopy(tiny), "ddim")
        pipe.load_lora_weights(str(file))
        made = pipe(
            PROMPT,
            num_inference_steps=3,
            guidance_scale=4.0,
            generator=torch.Generator().manual_seed(3),
            height=32,
            width=32,
        )
        return np.asarray(made.images[0]).astype(np.int64)

    assert apart(theirs(file), ours) <= 2
    text_alone = write_adapter(softened(made(tiny, 1, only="text_encoder")), tmp_path / "t.safetensors")
    assert apart(drawn(tiny, adapters={"a": text_alone})[0], ours) >= 10
    assert "DoRA" not in caplog.text
    kohya = write_adapter(softened(made(tiny, 1)), tmp_path / "k.safetensors", kohya=True)
    assert "leaves a DoRA's magnitudes out" in caplog.text
    assert "out_proj" not in caplog.text
    assert apart(drawn(tiny, adapters={"a": kohya})[0], ours) <= 1
    assert apart(theirs(kohya), ours) >= 10


def test_prompts_with_adapters_of_other_kinds_share_calls(tiny: Model) -> None:
    """LoKr with a core and DoRA by prompt, weights and blends; seeds and order stay the call's."""
    draw = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * 0.4

    name = "unet.mid_block.resnets.0.conv1"
    parts = {"lokr_w1": random(8, 8), "lokr_w2_a": random(4, 8), "lokr_w2_b": random(4, 8)}
    parts["lokr_t2"] = random(4, 4, 3, 3)
    kron = Adapter("kron", {name: Factors("lokr", parts, 0.5)}, kind="lokr")
    two = torch.einsum("ijkl,ip,jr->prkl", parts["lokr_t2"], parts["lokr_w2_a"], parts["lokr_w2_b"])
    change = 0.5 * torch.einsum("ab,cdkl->acbdkl", parts["lokr_w1"], two).reshape(64, 64, 3, 3)
    soft, lora = softened(made(tiny, 4)), made(tiny, 5, only="unet")
    prompts = [
        f"{PROMPT} <lora:kron:0.8>",
        f"{PROMPT} <lora:kron:0.8><lora:lora>",
        PROMPT + "<lora:soft:0.5>",
    ]
    steps: list[tuple[int, int]] = []
    notes: list[str] = []
    made_so = pixels(
        generate(
            tiny,
            [*prompts, f"{PROMPT} <lora:lora>"],
            adapters={"kron": kron, "soft": soft, "lora": lora},
            num=2,
            progress=lambda done, total: steps.append((done, total)),
            **{**SETTINGS, "notice": notes.append},
        )
    )
    assert notes == ["adapters (lokr, lora, dora) hold 0.1 MiB of differences as large as layers"]
    plain = copy.deepcopy(tiny)
    for i, pairs in enumerate([[], [(lora, 1.0)], [(soft, 0.5)], [(lora, 1.0)]]):
        model = copy.deepcopy(tiny)
        merge_all(model, pairs)
        if i < 2:
            adaptable(model)[name].weight.data += 0.8 * change
        expected = drawn(model, num=2, seed=3 + 2 * i)
        assert apart(made_so[2 * i : 2 * i + 2], expected) <= 1
        assert apart(drawn(plain, num=2, seed=3 + 2 * i), expected) >= 10
    assert steps == [(8, 24), (16, 24), (24, 24)]


def test_text_encoder_and_unet_and_blocks_have_weights_of_their_own(tiny: Model) -> None:
    lora = made(tiny, 1)
    parts = {
        part: Adapter("part", {p: one for p, one in lora.layers.items() if p.startswith(part)})
        for part in ("text_encoder", "unet", "unet.mid_block")
    }
    blocks = ",".join("1" if name in ("BASE", "M00") else "0" for name in names_of(tiny)[0])
    asked = {
        "<lora:one:0.2:1>": [("text_encoder", 0.2), ("unet", 1.0)],
        "<lora:one:1:0>": [("text_encoder", 1.0)],
        f"<lora:one:1:0.5:{blocks}>": [("text_encoder", 1.0), ("unet.mid_block", 0.5)],
    }
    pictures = generate(tiny, [f"{PROMPT} {tag}" for tag in asked], adapters={"one": lora}, **SETTINGS)
    whole = models.create("tiny", seed=1)
    merge(whole, lora, 1.0)
    for i, pairs in enumerate(asked.values()):
        changed = models.create("tiny", seed=1)
        merge_all(changed, [(parts[part], weight) for part, weight in pairs])
        expected = drawn(changed, seed=3 + i)
        assert apart(pixels([pictures[i]]), expected) <= 1
        assert apart(drawn(whole, seed=3 + i), expected) >= 5
    told = [picture.parameters["adapters"][0] for picture in pictures]
    assert [(one["weight"], one.get("text_weight"), "blocks" in one) for one in told] == [
        (1.0, 0.2, False),
        (0.0, 1.0, False),
        (0.5, 1.0, True),
    ]
    with pytest.raises(InputError, match="2 block weights; allowed"):
        generate(tiny, "x <lora:one:1:lbw=1,1>", adapters={"one": lora}, **SETTINGS)


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
    told = read_tags("a <lora:sks:0.8> dog <lora:my ink>")
    assert told == ("a dog", [Tag("sks", 0.8, 0.8), Tag("my ink")])
    for tag, read in {
        "<lora:a:0.5:1>": Tag("a", 0.5, 1.0),
        "<lora:a:unet=0.3:te=-1>": Tag("a", -1.0, 0.3),
        "<lora:a:1:lbw=1,0.5>": Tag("a", 1.0, 1.0, (1.0, 0.5)),
        "<lora:a:1:0.2:0,1,0>": Tag("a", 1.0, 0.2, (0.0, 1.0, 0.0)),
    }.items():
        assert read_tags(tag) == ("", [read])
    assert read_tags("a <b> (c:1.2)  d") == ("a <b> (c:1.2)  d", [])
    wrong = ("<lora:a:x>", "<lora:a:1:2:3>", "<lora:a:nan>", "<lora:a:>", "<lora:a:1:start=3>", "<lora:a:1,>")
    for tag in wrong:
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
    with pytest.raises(InputError, match="adapters with backend onnx"):
        generate(
            tiny,
            "x",
            adapters={"a": softened(made(tiny, 1))},
            backend=replace(open_backend("torch", tiny), name="onnx"),
        )


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
    with pytest.raises(ModelError, match=r"no adapter file at 'C:.nets.ink.safetensors'"):
        Named.parsed(r"ink=C:\nets\ink.safetensors")  # a drive, and no weight
