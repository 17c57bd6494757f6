"""ControlNets and T2I-Adapters: against diffusers' pipelines, by row, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from test_from_pictures import pipeline_of as inpainting_of
from test_generate import pipeline_of

from darkroom import models
from darkroom.errors import InputError, ModelError
from darkroom.models.control import ControlCard
from darkroom.models.model import Model
from darkroom.sample import Control, generate

SIZE = (32, 32)
SETTINGS: dict[str, Any] = {
    "steps": 5,
    "seed": 3,
    "guidance": 4.0,
    "solver": "euler",
    "notice": lambda _: None,
}
PROMPT = "a red circle"
DIFFUSERS: dict[str, Any] = {
    "num_inference_steps": 5,
    "guidance_scale": 4.0,
    "height": SIZE[1],
    "width": SIZE[0],
    "output_type": "latent",
}
"""The same in diffusers' words, but for the seed."""


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(SETTINGS["seed"])


def picture(seed: int = 0) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize(SIZE, Image.Resampling.NEAREST)


def shaken(module: Any, seed: int, scale: float = 0.1) -> Any:
    """Weights that do something: a fresh net's last convolutions are zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * scale)
    return module.eval()


def net_of(model: Model, seed: int = 0, **more: Any) -> Any:
    channels = (16, 32, 96, 256)[: model.vae_factor.bit_length()]
    torch.manual_seed(seed)
    net = diffusers.ControlNetModel.from_unet(
        model.unet, conditioning_embedding_out_channels=channels, **more
    )
    return shaken(net, seed)


def adapter_of(model: Model, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    wide = list(model.unet.config.block_out_channels)  # type: ignore[union-attr]
    kind = "full_adapter_xl" if model.is_sdxl else "full_adapter"
    net = diffusers.T2IAdapter(3, wide, 1, model.vae_factor * (1 + model.is_sdxl), kind)
    return shaken(net, seed, 0.4 if model.is_sdxl else 0.1)


def saved(net: Any, folder: Path) -> Path:
    net.save_pretrained(str(folder))
    return folder


def drawn(model: Model, prompts: list[str] | str = PROMPT, **more: Any) -> NDArray[np.int64]:
    pictures = generate(model, prompts, size=SIZE, **{**SETTINGS, **more})
    return np.stack([np.asarray(one.image) for one in pictures]).astype(np.int64)


def apart(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    return int(abs(one - other).max())


def theirs(model: Model, net: Any, image: Any, **more: Any) -> NDArray[np.int64]:
    """The picture of diffusers' own pipeline."""
    plain = pipeline_of(copy.deepcopy(model), "euler")
    kind = "Adapter" if isinstance(net, diffusers.T2IAdapter) else "ControlNet"
    name = f"StableDiffusion{'XL' * model.is_sdxl}{kind}Pipeline"
    part = "adapter" if kind == "Adapter" else "controlnet"
    parts = {**plain.components, part: net}
    if kind == "Adapter":
        parts.pop("image_encoder", None)
    if not model.is_sdxl:
        parts |= {"requires_safety_checker": False}
    elif kind == "ControlNet":
        parts |= {"add_watermarker": False}
    pipe = getattr(diffusers, name)(**parts)
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        PROMPT,
        image=image,
        **DIFFUSERS,
        generator=seeded(),
        **more,
    )
    with torch.no_grad():
        pixels = model.vae.decode(made.images / model.vae.config.scaling_factor).sample  # type: ignore[union-attr]
    return np.asarray(pipe.image_processor.postprocess(pixels, output_type="pil")[0]).astype(np.int64)[None]


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({}, {}),
        ({"controlnet_conditioning_scale": 0.5}, {"weight": 0.5}),
        ({"control_guidance_start": 0.2, "control_guidance_end": 0.6}, {"start": 0.2, "end": 0.6}),
        ({"guess_mode": True}, {"guess": True}),
    ],
    ids=["plain", "weight", "interval", "guess"],
)
def test_diffusers_draws_the_same_picture(tiny: Model, tmp_path: Path, more: Any, asked: Any) -> None:
    net = net_of(tiny)
    folder = saved(net, tmp_path / "net")
    ours = drawn(tiny, controls=[Control(folder, picture(), **asked)])
    assert apart(ours, theirs(tiny, net, picture(), **more)) <= 2
    assert apart(ours, drawn(tiny)) >= 10
    if asked:
        assert apart(ours, drawn(tiny, controls=[Control(folder, picture())])) >= 4


def test_sdxl_too(small_xl: Model, tmp_path: Path) -> None:
    net = net_of(small_xl)
    ours = drawn(small_xl, controls=[Control(saved(net, tmp_path / "net"), picture())])
    assert apart(ours, theirs(small_xl, net, picture())) <= 2
    assert apart(ours, drawn(small_xl)) >= 10


def test_several_nets_add_up_as_in_diffusers(tiny: Model, tmp_path: Path) -> None:
    nets = [net_of(tiny, seed) for seed in (1, 2)]
    controls = [
        Control(saved(net, tmp_path / f"{i}"), picture(i), weight)
        for i, (net, weight) in enumerate(zip(nets, (0.7, 0.4), strict=True))
    ]
    reference = theirs(tiny, nets, [picture(0), picture(1)], controlnet_conditioning_scale=[0.7, 0.4])
    ours = drawn(tiny, controls=controls)
    assert apart(ours, reference) <= 2
    assert apart(drawn(tiny, controls=controls[:1]), reference) >= 4


def test_a_t2i_adapter_as_in_diffusers(tiny: Model, tmp_path: Path) -> None:
    net = adapter_of(tiny)
    ours = drawn(tiny, controls=[Control(saved(net, tmp_path / "adapter"), picture(), 0.8)])
    assert apart(ours, theirs(tiny, net, picture(), adapter_conditioning_scale=0.8)) <= 2
    assert apart(ours, drawn(tiny)) >= 4


def test_a_t2i_adapter_of_sdxl_that_stops_early(small_xl: Model, tmp_path: Path) -> None:
    net = adapter_of(small_xl)
    folder = saved(net, tmp_path / "adapter")
    more = {"adapter_conditioning_scale": 0.8, "adapter_conditioning_factor": 0.6}
    ours = drawn(small_xl, controls=[Control(folder, picture(), 0.8, end=0.6)])
    assert apart(ours, theirs(small_xl, net, picture(), **more)) <= 2
    assert apart(ours, drawn(small_xl, controls=[Control(folder, picture(), 0.8)])) >= 4


def first_release(net: Any) -> dict[str, torch.Tensor]:
    """A net's weights under the keys of the first release, by the names that diffusers documents."""
    from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING

    known = DIFFUSERS_TO_LDM_MAPPING["controlnet"]["layers"]
    resnet = {
        "norm1": "in_layers.0",
        "conv1": "in_layers.2",
        "time_emb_proj": "emb_layers.1",
        "norm2": "out_layers.0",
        "conv2": "out_layers.3",
        "conv_shortcut": "skip_connection",
    }
    layers, hints = net.config.layers_per_block, 2 * len(net.config.conditioning_embedding_out_channels)
    found = {}
    for key, value in net.state_dict().items():
        parts = key.split(".")
        if key in known:
            name = known[key]
        elif parts[0] == "controlnet_down_blocks":
            name = f"zero_convs.{parts[1]}.0.{parts[2]}"
        elif parts[0] == "controlnet_mid_block":
            name = f"middle_block_out.0.{parts[1]}"
        elif parts[0] == "controlnet_cond_embedding":
            at = {"conv_in": 0, "conv_out": hints - 1}.get(parts[1])
            name = f"input_hint_block.{2 * (int(parts[2]) + 1 if at is None else at)}.{parts[-1]}"
        elif parts[0] == "mid_block":
            at = 2 * int(parts[2]) if parts[1] == "resnets" else 1
            rest = ".".join([resnet.get(parts[3], parts[3]), *parts[4:]])
            name = f"middle_block.{at}.{rest}"
        else:
            block, kind, layer = int(parts[1]), parts[2], int(parts[3])
            at = 1 + block * (layers + 1) + (layers if kind == "downsamplers" else layer)
            rest = ".".join([resnet.get(parts[4], parts[4]), *parts[5:]])
            slot = {"resnets": 0, "attentions": 1, "downsamplers": 0}[kind]
            name = f"input_blocks.{at}.{slot}." + (f"op.{parts[-1]}" if kind == "downsamplers" else rest)
        found[f"control_model.{name}"] = value.clone()
    return found


@pytest.mark.parametrize("keys", ["diffusers", "first release"])
def test_a_single_file_is_the_same_net(wide: Model, tmp_path: Path, keys: str) -> None:
    net = net_of(wide)
    folder, file = saved(net, tmp_path / "net"), tmp_path / "net.safetensors"
    save_file(net.state_dict() if keys == "diffusers" else first_release(net), str(file))
    reference = drawn(wide, controls=[Control(folder, picture())])
    assert apart(drawn(wide, controls=[Control(file, picture())]), reference) == 0
    assert apart(reference, drawn(wide)) >= 4
    weights = sum(value.numel() for value in net.state_dict().values())
    for path in (folder, file):  # what is known of it before its weights are read
        assert models.describe_control(path, wide) == ControlCard("controlnet", 1, weights)
    narrow = models.create("tiny", seed=1, overrides={"unet": {"block_out_channels": [16, 32]}})
    for path in (folder, file):
        with pytest.raises(ModelError, match="for another model"):
            models.describe_control(path, narrow)


@pytest.fixture(scope="module")
def wide() -> Model:
    """With a VAE of factor 8, as the nets of single files are for."""
    vae = {
        "block_out_channels": [8, 8, 8, 8],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "norm_num_groups": 4,
    }
    return models.create("tiny", seed=1, overrides={"vae": vae})


def test_rows_with_and_without_nets_share_the_calls(tiny: Model, tmp_path: Path) -> None:
    """Each picture is the one it is alone; rows of a batch join and end their nets at different steps."""
    from darkroom.sample import RunningBatch
    from darkroom.sample.control import ControlledUnet, Controls
    from darkroom.sample.generate import GenerateSettings, Generation

    one, two = (models.read_control(saved(net_of(tiny, i), tmp_path / f"{i}"), tiny) for i in (1, 2))
    t2i = models.read_control(saved(adapter_of(tiny), tmp_path / "t2i"), tiny)
    kinds: list[list[Control]] = [
        [],
        [Control(one, picture(0), 0.7)],
        [Control(one, picture(1), end=0.4), Control(two, picture(0), start=0.4, guess=True)],
        [Control(t2i, picture(2)), Control(two, picture(2), 0.5)],
        [Control(two, picture(0)), Control(two, picture(3), -0.5)],
    ]
    jobs = [
        Generation(
            tiny,
            [PROMPT],
            GenerateSettings.of(size=SIZE, steps=5, seed=i, guidance=1.0 if i == 1 else 4.0),
            notice=lambda _: None,
            controls=Controls.read(controls, tiny),
        )
        for i, controls in enumerate(kinds)
    ]
    unet = ControlledUnet(jobs[0].backend.unet)

    def latents(chosen: list[int]) -> list[torch.Tensor]:
        rows = [jobs[i].row(0) for i in chosen]
        batch = RunningBatch(rows)
        while batch.steps_left:
            batch.advance(unet)
        batch.unpack()
        return [row.latents_CHW for row in rows]

    together = latents([0, 1, 2, 3, 4])
    for i in range(len(kinds)):
        [alone] = latents([i])
        assert (together[i] - alone).abs().max() <= 1e-4 * max(1.0, float(alone.abs().max()))
    plain = Generation(tiny, [PROMPT], GenerateSettings.of(size=SIZE, steps=5, seed=1, guidance=1.0)).row(0)
    batch = RunningBatch([plain])
    while batch.steps_left:
        batch.advance(unet)
    batch.unpack()
    assert (together[1] - plain.latents_CHW).abs().max() >= 1e-2


def test_a_second_pass_and_a_start_from_a_picture_have_them_too(tiny: Model, tmp_path: Path) -> None:
    controls = [Control(saved(net_of(tiny), tmp_path / "net"), picture())]
    for more in ({"hires": {"scale": 2}}, {"image": picture(5), "strength": 0.6}):
        with_net, without = (drawn(tiny, **more, controls=some) for some in (controls, []))
        assert apart(with_net, without) >= 4


def test_pictures_say_what_steered_them(tiny: Model, tmp_path: Path) -> None:
    controls = [Control(saved(net_of(tiny), tmp_path / "edges"), picture(), 0.5, end=0.8, map="invert")]
    [made] = generate(tiny, PROMPT, size=SIZE, controls=controls, **SETTINGS)
    [told] = made.parameters["controls"]
    assert (told["name"], told["weight"], told["end"], told["map"]) == ("edges", 0.5, 0.8, "invert")
    assert len(told["sha256"]) == 64


def test_a_map_is_made_of_the_picture(tiny: Model, tmp_path: Path) -> None:
    folder = saved(net_of(tiny), tmp_path / "net")
    inverted = Image.eval(picture(), lambda value: 255 - value)
    by_name, by_hand, own = (
        drawn(tiny, controls=[Control(folder, image, map=kind)])  # type: ignore[arg-type]
        for image, kind in ((picture(), "invert"), (inverted, "none"), (inverted, lambda image: image))
    )
    assert apart(by_name, by_hand) == apart(own, by_hand) == 0
    assert apart(by_name, drawn(tiny, controls=[Control(folder, picture())])) >= 4


@pytest.mark.parametrize("kind", ["canny", "colour", "blur", "scribble"])
def test_a_map_is_of_the_size_drawn_however_large_the_picture(tiny: Model, tmp_path: Path, kind: str) -> None:
    """A line of one pixel in a map of a photograph 16 times as large would be a sixteenth of one."""
    from darkroom.sample.control import MAPS

    large = picture().resize((16 * SIZE[0], 16 * SIZE[1]), Image.Resampling.BICUBIC)
    resized = large.resize(SIZE, Image.Resampling.LANCZOS)
    net = models.read_control(saved(net_of(tiny), tmp_path / "net"), tiny)
    shown = []
    encode = net.encode
    net.encode = lambda map_1CHW: shown.append(map_1CHW) or encode(map_1CHW)  # type: ignore[method-assign]
    drawn(tiny, controls=[Control(net, large, map=kind)])
    expected = np.asarray(MAPS[kind](resized), np.float32) / 255
    assert np.abs(shown[0][0].permute(1, 2, 0).numpy() - expected).max() < 1e-6
    vanished = MAPS[kind](large).convert("RGB").resize(SIZE, Image.Resampling.LANCZOS)
    assert np.abs(np.asarray(vanished, np.float32) / 255 - expected).max() > 0.05


def test_what_cannot_be_is_refused_in_one_line(tiny: Model, small_xl: Model, tmp_path: Path) -> None:
    folder = saved(net_of(tiny), tmp_path / "net")

    def refused(model: Model, message: str, *controls: Control, **more: Any) -> None:
        with pytest.raises(InputError, match=message) as caught:
            drawn(model, controls=list(controls), **more)
        assert "\n" not in str(caught.value)

    refused(small_xl, "is for another model", Control(folder, picture()))
    refused(tiny, "no ControlNet at", Control(tmp_path / "none", picture()))
    refused(tiny, "at most 8", *[Control(folder, picture())] * 9)
    refused(tiny, "leave one of them out", Control(folder, picture()), memory="1GB")
    refused(tiny, "feature_cache", Control(folder, picture()), optimise="feature_cache")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    refused(tiny, "is a AutoencoderKL", Control(tmp_path / "odd", picture()))
    save_file({"x": torch.zeros(1)}, str(tmp_path / "odd.safetensors"))
    refused(tiny, "holds no ControlNet", Control(tmp_path / "odd.safetensors", picture()))
    (tmp_path / "odd.pth").write_bytes(b"x")
    with pytest.raises(ModelError, match="pickled"):
        drawn(tiny, controls=[Control(tmp_path / "odd.pth", picture())])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("net", "NET=PICTURE"),
        ("net=a.png:much", "NET=PICTURE"),
        ("net=a.png,start=x", "start=x"),
        ("net=a.png,map=depth", "control map 'depth'"),
        ("net=a.png,map=canny:1:2:3", "canny:LOW:HIGH"),
        ("net=a.png,map=blur:nan", "blur:SIGMA"),
        ("net=a.png,map=invert:3", "control map 'invert:3'"),
        ("net=a.png:99", "control weight"),
        ("net=a.png,start=0.6,end=0.2", "0 <= start < end"),
        ("net=a.png,often", "often"),
    ],
)
def test_a_control_on_the_command_line_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Control.parsed(text)


def test_a_control_on_the_command_line() -> None:
    control = Control.parsed("nets/canny=street.png:0.8,start=0.1,end=0.9,map=canny,guess")
    assert (control.net, control.image, control.weight) == ("nets/canny", "street.png", 0.8)
    assert (control.start, control.end, control.map, control.guess) == (0.1, 0.9, "canny", True)


def hole() -> Image.Image:
    mask = Image.new("L", SIZE)
    mask.paste(255, (4, 8, 20, 24))
    return mask


def with_hole(image: Image.Image) -> torch.Tensor:
    """What the inpainting ControlNet's card makes of a picture: minus one where the mask is white."""
    values = np.asarray(image.convert("RGB"), np.float32) / 255
    values[np.asarray(hole()) > 127] = -1
    return torch.from_numpy(values).permute(2, 0, 1)[None]


def test_an_inpainting_controlnet_reads_what_diffusers_gives_it(tiny: Model, tmp_path: Path) -> None:
    net = net_of(tiny, 5)
    folder = saved(net, tmp_path / "inpaint")
    lone = theirs(tiny, net, with_hole(picture()))
    asked = Control(folder, picture(), map="inpaint", mask=hole())
    assert apart(drawn(tiny, controls=[asked]), lone) <= 2
    assert apart(drawn(tiny, controls=[Control(folder, picture())]), lone) >= 4  # nothing is unknown
    inverse = Image.eval(hole(), lambda value: 255 - value)
    assert apart(drawn(tiny, controls=[Control(folder, picture(), map="inpaint", mask=inverse)]), lone) >= 4


@pytest.mark.parametrize("strength", [0.6, 1.0])
@pytest.mark.parametrize("inpaints", [False, True])
def test_a_net_in_inpainting_is_diffusers(
    tiny: Model, tmp_path: Path, inpaints: bool, strength: float
) -> None:
    """An inpainting net, or any other, and the part outside the mask kept, in one picture."""
    net = net_of(tiny, 5)
    folder = saved(net, tmp_path / "net")
    parts = inpainting_of(copy.deepcopy(tiny), "euler", "Inpaint").components
    pipe = diffusers.StableDiffusionControlNetInpaintPipeline(
        **parts, controlnet=net, requires_safety_checker=False
    )
    pipe.set_progress_bar_config(disable=True)
    common: dict[str, Any] = {"image": picture(1), "strength": strength}
    control_image = with_hole(picture(1)) if inpaints else picture(2)
    more = {"mask_image": hole(), "control_image": control_image, "controlnet_conditioning_scale": 1.0}
    reference = pipe(PROMPT, **DIFFUSERS, generator=seeded(), **more, **common).images[0]

    def differs(control: Control) -> float:
        """Of the latents, over max(1, max|x|)."""
        asked = {"size": None, "mask": hole(), "paste": False, "controls": [control], **common}
        (made,) = generate(tiny, PROMPT, **{**SETTINGS, **asked})
        return float((made.latents - reference).abs().max() / max(1, reference.abs().max()))

    if inpaints:
        assert differs(Control(folder, picture(1), map="inpaint", mask=hole())) <= 1e-4
        assert differs(Control(folder, picture(1))) > 1e-2  # nothing is unknown
    else:
        assert differs(Control(folder, picture(2))) <= 1e-4
        assert differs(Control(folder, picture(2), 0.0)) > 1e-2


def test_a_net_is_as_lean_as_its_unet_to_the_bit(tiny: Model, small_xl: Model, tmp_path: Path) -> None:
    from darkroom.sample.backends import open_backend
    from darkroom.sample.control import Controls
    from darkroom.sample.optimisations.attention import LeanAttention, LeanBlock, LeanResnet

    for name, model in (("tiny", tiny), ("xl", small_xl)):
        folder = saved(net_of(model), tmp_path / name)
        made, kinds = [], []
        for optimise in ("none", "lean"):
            backend = open_backend("torch", model, optimise=optimise)
            controls = Controls.read([Control(folder, picture())], model)
            controls.to(backend)
            kinds.append({type(module) for module in controls.nets[0].module.modules()})
            made.append(drawn(model, controls=[Control(controls.nets[0], picture())], optimise="none"))
        lean = {LeanAttention, LeanBlock, LeanResnet}
        assert (lean & kinds[0], lean & kinds[1]) == (set(), lean)
        assert np.array_equal(*made)


def test_a_picture_of_another_shape_is_stretched_with_a_note(tiny: Model, tmp_path: Path) -> None:
    folder, notes = saved(net_of(tiny), tmp_path / "net"), list[str]()
    wide = picture().resize((64, 32))
    made = drawn(tiny, controls=[Control(folder, wide)], notice=notes.append)
    assert notes == ["the picture of controlnet 'net' is 64x32: stretched to the shape of 32x32"]
    stretched = wide.resize(SIZE, Image.Resampling.LANCZOS)
    assert apart(made, drawn(tiny, controls=[Control(folder, stretched)], notice=notes.append)) == 0
    assert len(notes) == 1


def test_masks_of_controls_that_cannot_be(tiny: Model, tmp_path: Path) -> None:
    folder = saved(net_of(tiny), tmp_path / "net")
    sketch = saved(adapter_of(tiny), tmp_path / "sketch")
    with pytest.raises(InputError, match="inpaint without a mask"):
        Control(folder, picture(), map="inpaint")
    for net, given, said in (
        (sketch, {"map": "inpaint"}, "control map inpaint for t2i-adapter"),
        (folder, {}, "a mask for controlnet"),
    ):
        with pytest.raises(InputError, match=said):
            drawn(tiny, controls=[Control(net, picture(), mask=hole(), **given)])


def test_canny_finds_the_edges(tiny: Model, tmp_path: Path) -> None:
    from darkroom.sample.control import MAPS, find_map

    half = Image.new("RGB", (32, 32))
    half.paste((255, 255, 255), (16, 0, 32, 32))
    columns = np.asarray(MAPS["canny"](half)).any(axis=(0, 2)).nonzero()[0]
    assert Control.parsed("net=a.png,map=canny:64:128").map == "canny:64:128"
    faint = Image.eval(half, lambda value: value // 12)
    assert not np.asarray(find_map("canny")(faint)).any()
    assert np.array_equal(np.asarray(find_map("canny:20:40")(faint)), np.asarray(find_map("canny")(half)))
    assert set(columns) <= {15, 16}
    assert len(columns) == 1


@pytest.mark.parametrize("size", [(7, 64), (64, 48)])
def test_scribble_draws_the_lines_that_opencv_would(size: tuple[int, int]) -> None:
    """A1111's `scribble_xdog`, in numbers that do not wrap around."""
    import cv2

    from darkroom.sample.control import MAPS

    values = np.random.default_rng(3).integers(0, 256, (size[1] // 4 + 1, size[0] // 4 + 1, 3), np.uint8)
    image = Image.fromarray(values).resize(size, Image.Resampling.NEAREST)
    fine, coarse = (cv2.GaussianBlur(np.asarray(image, np.float32), (0, 0), sigma) for sigma in (0.5, 5.0))
    expected = 2 * (coarse - fine).min(axis=2) > 32
    made = np.asarray(MAPS["scribble"](image)) > 0
    assert 0.02 < expected.mean() < 0.98
    assert (made == expected[..., None]).mean() > 0.999
