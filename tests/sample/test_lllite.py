"""kohya's ControlNet-LLLite: against hooks after sd-scripts' description, by row, and what is refused."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from test_control import DIFFUSERS, PROMPT, apart, net_of, saved
from test_generate import pipeline_of
from torch import nn

from darkroom import models
from darkroom.errors import ModelError
from darkroom.models.model import Model
from darkroom.sample import Control, generate

SIZE = (64, 128)
PICTURE_CHANNELS, INNER = 16, 8
DRAWN: dict[str, Any] = {"steps": 5, "seed": 3, "guidance": 4.0, "solver": "euler", "notice": lambda _: None}
VAE = {
    "block_out_channels": [8, 8, 8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
UNETS: dict[str, dict[str, Any]] = {
    "sd15": {"block_out_channels": [8, 16, 16, 16], "cross_attention_dim": 32, "attention_head_dim": 2},
    "sdxl": {
        "block_out_channels": [8, 16, 24],
        "transformer_layers_per_block": [1, 1, 2],
        "cross_attention_dim": 64,
        "attention_head_dim": [2, 2, 2],
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 32 + 6 * 8,
    },
}


@pytest.fixture(scope="module", params=list(UNETS))
def model(request: Any) -> Model:
    """SD 1.5 or SDXL in small: blocks are numbered as in the published ones, the VAE's factor is 8."""
    text = {**TEXT, **({"projection_dim": 32} if request.param == "sdxl" else {})}
    parts = {"unet": {**UNETS[request.param], "norm_num_groups": 4, "sample_size": 8}, "vae": VAE}
    parts |= {"text_encoder": text} | ({"text_encoder_2": text} if request.param == "sdxl" else {})
    tokenizer = models.train_tokenizer([PROMPT], vocab_size=600)
    return models.create(request.param, seed=2, tokenizer=tokenizer, overrides=parts)


class Lite(nn.Module):
    """One module as sd-scripts' `networks/control_net_lllite.py` describes it."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        half = PICTURE_CHANNELS // 2
        last = {1: 2, 2: 4, 3: 2}[depth]
        middle = [nn.ReLU(), nn.Conv2d(half, half, 4, 4)] if depth == 3 else []
        self.conditioning1 = nn.Sequential(
            nn.Conv2d(3, half, 4, 4), *middle, nn.ReLU(), nn.Conv2d(half, PICTURE_CHANNELS, last, last)
        )
        self.down = nn.Sequential(nn.Linear(width, INNER), nn.ReLU())
        self.mid = nn.Sequential(nn.Linear(INNER + PICTURE_CHANNELS, INNER), nn.ReLU())
        self.up = nn.Sequential(nn.Linear(INNER, width))

    def forward(self, x: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
        seen = self.conditioning1(picture).flatten(2).transpose(1, 2).expand(len(x), -1, -1)
        made: torch.Tensor = self.up(self.mid(torch.cat([seen, self.down(x)], dim=2)))
        return made


def steered(unet: Any) -> dict[str, tuple[str, int]]:
    """Of each steered layer: kohya's key and the depth of its picture; input blocks, then the middle one.

    The middle block of SD 1.5 is smaller than the deepest picture, so a net cannot steer it.
    """
    found: dict[str, tuple[str, int]] = {}
    for path, _ in unet.named_modules():
        if not path.endswith(("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q")):
            continue
        block, *rest = path.split(".")
        if block == "down_blocks":
            number = 1 + 3 * int(rest[0]) + int(rest[2])
            depth = 1 if number <= 2 else 2 if number <= 5 else 3
            stem, inner = f"input_blocks_{number}_1", rest[3:]
        elif block == "mid_block" and len(unet.config.block_out_channels) == 3:
            stem, inner, depth = "middle_block_1", rest[2:], 3
        else:
            continue
        found[path] = (f"lllite_unet_{stem}_{'_'.join(inner)}", depth)
    return found


def lites_of(model: Model, seed: int) -> dict[str, Lite]:
    """Random networks by the path of their layer, whose weights are large enough for pictures to count."""
    unet: Any = model.unet
    torch.manual_seed(seed)
    lites = {
        path: Lite(depth, unet.get_submodule(path).in_features) for path, (_, depth) in steered(unet).items()
    }
    for lite in lites.values():
        for part, larger in ((lite.conditioning1, 4), (lite.down, 2), (lite.mid, 2), (lite.up, 20)):
            for weight in part.parameters():
                weight.data *= larger
    return lites


def written(model: Model, lites: dict[str, Lite], file: Path) -> Path:
    """As kohya's trainer saves them."""
    names = steered(model.unet)
    save_file(
        {
            f"{names[path][0]}.{key}": tensor.clone()
            for path, lite in lites.items()
            for key, tensor in lite.state_dict().items()
        },
        str(file),
        {"modelspec.architecture": "stable-diffusion-xl-v1-base/control-net-lllite"},
    )
    return file


def picture(seed: int = 0) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 255, (16, 8, 3), np.uint8)
    return Image.fromarray(small).resize(SIZE, Image.Resampling.NEAREST)


def before(lite: Lite, pixels: torch.Tensor, multiplier: float, _: Any, given: Any) -> Any:
    return (given[0] + multiplier * lite(given[0], pixels), *given[1:])


def theirs(model: Model, *nets: tuple[dict[str, Lite], Image.Image, float]) -> NDArray[np.int64]:
    """diffusers' pipeline with the networks in front of the U-Net's layers, the first net's first."""
    pipe = pipeline_of(copy.deepcopy(model), "euler")
    for lites, image, multiplier in nets:
        pixels = torch.from_numpy(np.asarray(image, np.float32)).permute(2, 0, 1)[None] / 127.5 - 1

        for path, lite in lites.items():
            hook = partial(before, lite, pixels, multiplier)
            pipe.unet.get_submodule(path).register_forward_pre_hook(hook)
    size = {"width": SIZE[0], "height": SIZE[1]}
    generator = torch.Generator().manual_seed(DRAWN["seed"])
    latents = pipe(PROMPT, **{**DIFFUSERS, **size}, generator=generator).images
    with torch.no_grad():
        pixels = model.vae.decode(latents / model.vae.config.scaling_factor).sample  # type: ignore[union-attr]
    return np.asarray(pipe.image_processor.postprocess(pixels, output_type="pil")[0]).astype(np.int64)[None]


def drawn(model: Model, *controls: Control, **more: Any) -> NDArray[np.int64]:
    made = generate(model, PROMPT, size=SIZE, controls=list(controls), **{**DRAWN, **more})
    return np.stack([np.asarray(one.image) for one in made]).astype(np.int64)


def test_a_picture_is_the_reference_s(model: Model, tmp_path: Path) -> None:
    lites = lites_of(model, 1)
    assert len(lites) == {"sd15": 24, "sdxl": 32}[model.family]
    file = written(model, lites, tmp_path / "edges.safetensors")
    ours = drawn(model, Control(file, picture(), 0.8))
    assert apart(ours, theirs(model, (lites, picture(), 0.8))) <= 2
    assert apart(ours, drawn(model)) >= 4
    assert apart(ours, drawn(model, Control(file, picture(7), 0.8))) >= 4
    assert apart(ours, drawn(model, Control(file, picture()))) >= 4
    assert apart(drawn(model, Control(file, picture(), 0.0)), drawn(model)) == 0


def test_several_work_one_after_the_other(model: Model, tmp_path: Path) -> None:
    nets = [lites_of(model, seed) for seed in (1, 2)]
    files = [written(model, lites, tmp_path / f"{i}.safetensors") for i, lites in enumerate(nets)]
    given = [
        (lites, picture(i), weight) for i, (lites, weight) in enumerate(zip(nets, (0.9, 2), strict=True))
    ]
    controls = [Control(file, image, weight) for file, (_, image, weight) in zip(files, given, strict=True)]
    ours = drawn(model, *controls)
    assert apart(ours, theirs(model, *given)) <= 2
    assert apart(drawn(model, *controls[:1]), ours) >= 4


def test_rows_with_and_without_share_the_calls(model: Model, tmp_path: Path) -> None:
    """Each picture is the one it is alone, next to rows with other nets, other orders, longer prompts and
    prompts that change or are composed."""
    from darkroom.models.image_prompt import installed
    from darkroom.sample.control import ControlledUnet, Controls
    from darkroom.sample.denoise import denoise
    from darkroom.sample.generate import GenerateSettings, Generation

    one, two = (
        models.read_control(written(model, lites_of(model, i), tmp_path / f"{i}.safetensors"), model)
        for i in (1, 2)
    )
    full = models.read_control(saved(net_of(model, 3), tmp_path / "full"), model)
    kinds: list[list[Control]] = [  # of small weights: such nets make much of what was rounded otherwise
        [],
        [Control(one, picture(0), 0.15, end=0.6)],
        [Control(two, picture(1), 0.2), Control(one, picture(0), 0.2, start=0.4)],
        [Control(one, picture(2), 0.2), Control(full, picture(2), 0.3), Control(two, picture(1), 0.1)],
        [Control(two, picture(0), 0.2, guess=True), Control(two, picture(3), -0.1)],
    ]
    settings = GenerateSettings.of(
        **{k: v for k, v in DRAWN.items() if k != "notice"}, size=SIZE, weighting="a1111"
    )
    prompts = [
        PROMPT,
        f"{PROMPT} BREAK a house",
        PROMPT,
        f"a house AND {PROMPT} :0.5",
        f"a [{PROMPT}:fog:0.5]",
    ]
    with installed(model, [one, two]):

        def job(prompt: str, controls: list[Control]) -> Generation:
            return Generation(model, [prompt], settings, controls=Controls.read(controls, model))

        def latents(*some: Generation) -> list[torch.Tensor]:
            rows = [made.row(0) for made in some]
            for _ in denoise(ControlledUnet(some[0].backend.unet, {0: one, 1: two}), rows):
                pass
            return [row.latents_CHW for row in rows]

        together = latents(*map(job, prompts, kinds))
        for prompt, controls, mixed in zip(prompts, kinds, together, strict=True):
            (lone,), (plain,) = (latents(job(prompt, some)) for some in (controls, []))
            assert float((mixed - lone).abs().max()) < 1e-4
            assert (float((plain - lone).abs().max()) > 1e-2) == bool(controls)
    # Which of two comes first counts, and the unguided half is spared in guess mode.
    first, second = Control(one, picture(0)), Control(two, picture(0))
    assert apart(drawn(model, first, second), drawn(model, second, first)) >= 1
    assert apart(drawn(model, Control(two, picture(0), guess=True)), drawn(model, second)) >= 4


def test_what_cannot_steer_is_refused_by_name(model: Model, tmp_path: Path) -> None:
    lites = lites_of(model, 1)
    file = written(model, lites, tmp_path / "edges.safetensors")
    card = models.describe_control(file, model)
    weights = sum(p.numel() for lite in lites.values() for p in lite.parameters())
    assert (card.kind, card.size_unit, card.num_weights) == ("controlnet-lllite", 32, weights)

    def refused(path: Path, message: str, of: Model = model) -> None:
        for read in (models.read_control, models.describe_control):
            with pytest.raises(ModelError, match=message) as caught:
                read(path, of)
            assert "\n" not in str(caught.value)

    other = models.create("tiny", seed=1)
    refused(file, "controlnet-lllite 'edges' is for another model: .*tiny has", of=other)
    narrow = models.create("tiny", seed=1, overrides={"vae": VAE})
    refused(file, "is for another model", of=narrow)

    names = steered(model.unet)
    first = next(iter(lites))
    stem, tensors = names[first][0], lites[first].state_dict()

    def changed(**more: torch.Tensor | None) -> Path:
        keys = {**tensors, **{key.replace("__", "."): value for key, value in more.items()}}
        save_file(
            {f"{stem}.{k}": v for k, v in keys.items() if v is not None}, str(tmp_path / "odd.safetensors")
        )
        return tmp_path / "odd.safetensors"

    refused(changed(mid__0__bias=None), "it lacks '.*mid.0.bias'")
    refused(changed(alpha=torch.ones(1)), "it has '.*alpha'")
    refused(changed(mid__0__weight=torch.zeros(INNER, 3)), "the shapes of")
    refused(changed(up__0__weight=torch.zeros(5, INNER), up__0__bias=torch.zeros(5)), "of width")
    save_file({f"{stem[:-5]}_to_out_0.{k}": v for k, v in tensors.items()}, str(tmp_path / "out.safetensors"))
    refused(tmp_path / "out.safetensors", "which is not read; allowed: attn1.to_q")
