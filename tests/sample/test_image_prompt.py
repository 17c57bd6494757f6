"""IP-Adapters: against diffusers' pipeline, by row, with masks, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from test_control import PROMPT, SIZE, apart, drawn, net_of, picture, saved
from test_generate import pipeline_of
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from darkroom import models
from darkroom.errors import InputError, ModelError
from darkroom.models.image_prompt import cross_attentions, installed
from darkroom.models.model import Model
from darkroom.sample import Control

VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "projection_dim": 24,
    "image_size": 32,
    "patch_size": 8,
}


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * 0.3


def adapter_file(model: Model, file: Path, kind: str = "plain", seed: int = 0) -> Path:
    """An IP-Adapter of random weights in the layout of the published files, and its encoder beside it."""
    g = torch.Generator().manual_seed(seed)
    width = int(model.unet.config.cross_attention_dim)  # type: ignore[union-attr]
    hidden, projected = VISION["hidden_size"], VISION["projection_dim"]
    if kind == "plain":
        image = {
            "proj.weight": draw(g, 4 * width, projected),
            "proj.bias": draw(g, 4 * width),
            "norm.weight": torch.ones(width),
            "norm.bias": torch.zeros(width),
        }
    elif kind == "plus":
        inner = 64
        image = {
            "latents": draw(g, 1, 4, inner),
            "proj_in.weight": draw(g, inner, hidden),
            "proj_in.bias": draw(g, inner),
            "proj_out.weight": draw(g, width, inner),
            "proj_out.bias": draw(g, width),
            "norm_out.weight": torch.ones(width),
            "norm_out.bias": torch.zeros(width),
        }
        for prefix in (f"layers.{i}" for i in range(4)):  # as deep as the published ones
            image |= {f"{prefix}.0.norm{i}.weight": torch.ones(inner) for i in (1, 2)}
            image |= {f"{prefix}.0.norm{i}.bias": torch.zeros(inner) for i in (1, 2)}
            image |= {
                f"{prefix}.0.to_q.weight": draw(g, inner, inner),
                f"{prefix}.0.to_kv.weight": draw(g, 2 * inner, inner),
                f"{prefix}.0.to_out.weight": draw(g, inner, inner),
                f"{prefix}.1.0.weight": torch.ones(inner),
                f"{prefix}.1.0.bias": torch.zeros(inner),
                f"{prefix}.1.1.weight": draw(g, 4 * inner, inner),
                f"{prefix}.1.3.weight": draw(g, inner, 4 * inner),
            }
    else:
        image = {
            "proj.0.weight": draw(g, hidden, hidden),
            "proj.0.bias": draw(g, hidden),
            "proj.2.weight": draw(g, width, hidden),
            "proj.2.bias": draw(g, width),
            "proj.3.weight": torch.ones(width),
            "proj.3.bias": torch.zeros(width),
        }
    tensors = {f"image_proj.{name}": value for name, value in image.items()}
    for i, (_, attention) in enumerate(cross_attentions(model.unet)):
        for part in "kv":
            tensors[f"ip_adapter.{2 * i + 1}.to_{part}_ip.weight"] = draw(
                g, attention.to_k.out_features, width
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(file))
    torch.manual_seed(seed)
    encoder = CLIPVisionModelWithProjection(CLIPVisionConfig(**VISION)).eval()
    encoder.save_pretrained(str(file.parent / "image_encoder"))
    return file


def theirs(model: Model, file: Path, image: Any, weight: float = 1.0, mask: Any = None) -> NDArray[np.int64]:
    from diffusers.image_processor import IPAdapterMaskProcessor
    from safetensors.torch import load_file

    plain = pipeline_of(copy.deepcopy(model), "euler")
    encoder = CLIPVisionModelWithProjection.from_pretrained(str(file.parent / "image_encoder"))
    side = {"height": 32, "width": 32}
    plain.register_modules(
        image_encoder=encoder,
        feature_extractor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=side),
    )
    loaded: dict[str, dict[str, torch.Tensor]] = {"image_proj": {}, "ip_adapter": {}}
    for key, value in load_file(str(file)).items():
        part, _, name = key.partition(".")
        loaded[part][name] = value
    plain.unet._load_ip_adapter_weights([loaded])
    plain.set_ip_adapter_scale(weight)
    more = {}
    if mask is not None:
        masks = IPAdapterMaskProcessor().preprocess([mask], height=SIZE[1], width=SIZE[0])
        more["cross_attention_kwargs"] = {"ip_adapter_masks": [masks.reshape(1, 1, SIZE[1], SIZE[0])]}
        image = [[image]]
    made = plain(
        PROMPT,
        ip_adapter_image=image,
        num_inference_steps=5,
        guidance_scale=4.0,
        height=SIZE[1],
        width=SIZE[0],
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
        **more,
    )
    with torch.no_grad():
        pixels = model.vae.decode(made.images / model.vae.config.scaling_factor).sample  # type: ignore[union-attr]
    return np.asarray(plain.image_processor.postprocess(pixels, output_type="pil")[0]).astype(np.int64)[None]


def half() -> Image.Image:
    mask = Image.new("L", SIZE)
    mask.paste(255, (0, 0, 16, 32))
    return mask


@pytest.mark.parametrize("kind", ["plain", "plus", "full"])
def test_diffusers_draws_the_same_picture(tiny: Model, tmp_path: Path, kind: str) -> None:
    file = adapter_file(tiny, tmp_path / "ip.safetensors", kind)
    ours = drawn(tiny, controls=[Control(file, picture(), 0.7)])
    assert apart(ours, theirs(tiny, file, picture(), 0.7)) <= 2
    assert apart(ours, drawn(tiny)) >= 4
    assert apart(ours, drawn(tiny, controls=[Control(file, picture(7), 0.7)])) >= 3


def test_sdxl_too(small_xl: Model, tmp_path: Path) -> None:
    file = adapter_file(small_xl, tmp_path / "ip.safetensors")
    ours = drawn(small_xl, controls=[Control(file, picture())])
    assert apart(ours, theirs(small_xl, file, picture())) <= 2
    assert apart(ours, drawn(small_xl)) >= 4


def test_a_mask_says_where(tiny: Model, tmp_path: Path) -> None:
    file = adapter_file(tiny, tmp_path / "ip.safetensors")
    ours = drawn(tiny, controls=[Control(file, picture(), mask=half())])
    assert apart(ours, theirs(tiny, file, picture(), mask=half())) <= 2
    assert apart(ours, drawn(tiny, controls=[Control(file, picture())])) >= 2


def test_rows_with_and_without_share_the_calls(tiny: Model, tmp_path: Path) -> None:
    """Two adapters, a ControlNet, masks and plain rows in one batch: each as it is alone."""
    from darkroom.sample import RunningBatch
    from darkroom.sample.control import ControlledUnet, Controls
    from darkroom.sample.generate import GenerateSettings, Generation

    one = models.read_control(adapter_file(tiny, tmp_path / "a" / "one.safetensors"), tiny)
    two = models.read_control(adapter_file(tiny, tmp_path / "b" / "two.safetensors", "full", 5), tiny)
    net = models.read_control(saved(net_of(tiny), tmp_path / "net"), tiny)
    kinds: list[list[Control]] = [
        [],
        [Control(one, picture(0))],
        [Control(two, picture(1), 0.5, end=0.6), Control(net, picture(1))],
        [Control(one, picture(2), mask=half()), Control(two, picture(3))],
    ]
    prompts = [net for net in (one, two) if not isinstance(net, models.ControlNet)]
    with installed(tiny, prompts):
        jobs = [
            Generation(
                tiny,
                [PROMPT],
                GenerateSettings.of(size=SIZE, steps=5, seed=i, guidance=4.0),
                notice=lambda _: None,
                controls=Controls.read(controls, tiny),
            )
            for i, controls in enumerate(kinds)
        ]
        unet = ControlledUnet(jobs[0].backend.unet, dict(enumerate(prompts)))

        def latents(chosen: list[int]) -> list[torch.Tensor]:
            rows = [jobs[i].row(0) for i in chosen]
            batch = RunningBatch(rows)
            while batch.steps_left:
                batch.advance(unet)
            batch.unpack()
            return [row.latents_CHW for row in rows]

        together = latents([0, 1, 2, 3])
        for i in range(len(kinds)):
            [alone] = latents([i])
            assert (together[i] - alone).abs().max() <= 1e-4 * max(1.0, float(alone.abs().max()))
    [plain] = [drawn(tiny, seed=0)]
    assert apart(plain, drawn(tiny, seed=0)) == 0  # nothing is left behind in the model
    assert apart(drawn(tiny, seed=0, controls=[Control(one, picture(0))]), plain) >= 4


def test_what_cannot_be_is_refused_in_one_line(tiny: Model, small_xl: Model, tmp_path: Path) -> None:
    file = adapter_file(tiny, tmp_path / "a" / "ip.safetensors")

    def refused(model: Model, message: str, *controls: Control, **more: Any) -> None:
        with pytest.raises(InputError, match=message) as caught:
            drawn(model, controls=list(controls), **more)
        assert "\n" not in str(caught.value)

    refused(small_xl, "is for another model", Control(file, picture()))
    alone = tmp_path / "x" / "y" / "alone.safetensors"
    alone.parent.mkdir(parents=True)
    alone.write_bytes(file.read_bytes())
    refused(tiny, "no image encoder.*--image-encoder", Control(alone, picture()))
    refused(
        tiny, "masks of IP-Adapters", Control(saved(net_of(tiny), tmp_path / "n"), picture(), mask=half())
    )
    refused(tiny, "fused_qkv", Control(file, picture()), optimise="fused_qkv")
    save_file(
        {"ip_adapter.1.to_k_ip.weight": torch.zeros(2, 2), "image_proj.norm.weight": torch.zeros(2)},
        str(tmp_path / "face.safetensors"),
    )
    with pytest.raises(ModelError, match="for faces"):
        drawn(tiny, controls=[Control(tmp_path / "face.safetensors", picture())])
    assert (
        apart(
            drawn(tiny, controls=[Control(alone, picture(), image_encoder=file.parent / "image_encoder")]),
            drawn(tiny, controls=[Control(file, picture())]),
        )
        == 0
    )
    other = CLIPVisionModelWithProjection(CLIPVisionConfig(**{**VISION, "projection_dim": 16}))
    other.save_pretrained(str(tmp_path / "other"))
    refused(
        tiny,
        "projects to 24; this one projects to 16",
        Control(alone, picture(), image_encoder=tmp_path / "other"),
    )
