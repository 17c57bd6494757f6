"""Tiles: exact where they must be, near to the plain VAE, any multiple of 8, little memory."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from darkroom import models, sample
from darkroom.errors import InputError
from darkroom.models.tiny import Residual
from darkroom.sample.likeness import levels, likeness, psnr
from darkroom.sample.optimisations import applied as vae_module
from darkroom.sample.optimisations.applied import VaeFront, in_tiles
from darkroom.sample.optimisations.table import optimise
from darkroom.sample.optimisations.tiny_vae import load_tiny

CPU = torch.device("cpu")


def latents(width, height, seed=0, rows=1):
    return torch.randn(rows, 4, height, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("height", "width", "tile"), [(64, 64, 16), (40, 23, 16), (16, 200, 16), (17, 16, 16)]
)
def test_blending_what_is_not_changed_gives_it_back(height, width, tile):
    x = torch.randn(2, 3, height, width)
    torch.testing.assert_close(in_tiles(lambda part: part, x, tile), x, atol=1e-5, rtol=1e-5)


def test_every_tile_is_whole_and_no_larger_than_asked():
    seen = []

    def run(part):
        seen.append(tuple(part.shape[-2:]))
        return torch.nn.functional.interpolate(part, scale_factor=4)

    x = torch.randn(1, 3, 70, 45)
    out = in_tiles(run, x, 32, up=4)
    assert set(seen) == {(32, 32)}
    torch.testing.assert_close(out, torch.nn.functional.interpolate(x, scale_factor=4), atol=1e-5, rtol=1e-5)


def test_encoding_tiles_begin_on_whole_latents():
    x = torch.randn(1, 3, 168, 136)
    out = in_tiles(lambda part: torch.nn.functional.avg_pool2d(part, 8), x, 64, down=8)
    torch.testing.assert_close(out, torch.nn.functional.avg_pool2d(x, 8), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("width", "height"), [(24, 16), (31, 17), (40, 40)])
def test_tiled_pictures_stay_near_the_plain_ones(tiny, width, height):
    """The bound that is stated for tiles: 24 dB to the plain decode at the smallest tiles, and 6 dB nearer
    than another picture. A VAE normalises over what it sees: a tile is not exactly its part of the whole."""
    z = latents(width, height)
    plain = sample.decode(tiny.vae, z)
    tiled = sample.decode(VaeFront(tiny.vae, CPU, tile_pixels=64), z)
    other = sample.decode(tiny.vae, latents(width, height, seed=1))
    assert tiled[0].size == plain[0].size
    assert likeness(tiled, plain)["max_diff"] > 0
    assert psnr(levels(tiled[0]), levels(plain[0])) > max(24, psnr(levels(other[0]), levels(plain[0])) + 6)


def test_a_picture_no_larger_than_a_tile_is_decoded_as_it_is(tiny):
    z = latents(16, 16)
    assert (
        likeness(sample.decode(VaeFront(tiny.vae, CPU, 64), z), sample.decode(tiny.vae, z))["max_diff"] == 0
    )


def test_encoding_in_tiles_stays_near(tiny):
    pixels = torch.rand(1, 3, 168, 96) * 2 - 1
    applied = optimise(tiny, "vae_tiling:64")
    mean, std = applied.encode(pixels)
    plain_mean, plain_std = optimise(tiny, "none").encode(pixels)
    assert mean.shape == plain_mean.shape == (1, 4, 42, 24)
    assert 0 < (mean - plain_mean).abs().mean() < 0.1 * plain_mean.std()
    assert (std - plain_std).abs().mean() < 0.1 * plain_std.mean()


def test_thirty_two_pictures_go_through_one_by_one(tiny):
    seen = []
    applied = optimise(tiny, "vae_slicing")
    applied.own("vae").decoder.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    z = latents(8, 8, rows=32)
    made = applied.decode(z)
    assert seen == [1] * 32
    assert likeness(made, sample.decode(tiny.vae, z))["max_diff"] <= 2


def test_a_tiny_decoder_in_diffusers_layout(tiny, tmp_path):
    from diffusers import AutoencoderTiny

    torch.manual_seed(0)
    small = AutoencoderTiny(
        encoder_block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        num_encoder_blocks=(1, 1, 1, 1),
        num_decoder_blocks=(1, 1, 1, 1),
    )
    small.save_pretrained(tmp_path / "tiny")
    eight = models.create("tiny", seed=1, overrides={"vae": {"block_out_channels": [8, 8, 8, 8]}})
    made = sample.generate(eight, "a red circle", steps=3, optimise=f"tiny_vae:{tmp_path / 'tiny'}")[0]
    with torch.no_grad():
        pixels = small.decode(made.latents[None]).sample[0]
    wanted = ((pixels / 2 + 0.5).clamp(0, 1) * 255).permute(1, 2, 0).numpy()
    assert abs(levels(made.image) - wanted).max() <= 1
    assert any("tiny_vae" in note for note in made.parameters["notes"])
    assert made.parameters["optimise"] == ["tiny_vae:tiny"]  # pictures are passed on: no folders of ours
    assert str(tmp_path) not in json.dumps(made.parameters)
    plain = sample.generate(eight, "a red circle", steps=3, optimise="none")[0]
    assert abs(levels(plain.image) - wanted).max() >= 10


def test_a_decoder_for_other_latents_is_refused_with_the_reason(shared_data, tiny):
    with pytest.raises(InputError, match="32 latent channels; allowed: a decoder of 4"):
        optimise(tiny, f"tiny_vae:{shared_data / 'taef2'}")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "config.json' holds a list; allowed: a JSON object"),
        ("{", "config.json' is no JSON"),
        ('{"blocks_per_stage_decoder": 3}', "width None; allowed: 1 to 4096"),
        (
            '{"blocks_per_stage_decoder": 3, "width": 8, "latent_channels": 4, "downscale": 8}',
            "blocks_per_stage_decoder 3; allowed: a list of counts",
        ),
    ],
)
def test_a_decoders_configuration_of_another_shape_is_refused(tmp_path, content, told):
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "tiny.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=told):
        load_tiny(str(tmp_path))


def test_a_decoder_that_was_cut_short_is_refused(tmp_path):
    about = '{"blocks_per_stage_decoder": [1], "width": 8, "latent_channels": 4, "downscale": 8}'
    (tmp_path / "config.json").write_text(about)
    (tmp_path / "tiny.safetensors").write_bytes(b"\x08")
    with pytest.raises(InputError, match="tiny.safetensors' is damaged"):
        load_tiny(str(tmp_path))


def test_the_trained_decoder_brings_a_photograph_back(shared_data):
    """Its own encoder, put together here from the same blocks, and the decoder that is loaded."""
    from PIL import Image

    front = load_tiny(str(shared_data / "taef2"))
    encoder = _encoder(shared_data / "taef2")
    photo = (
        Image.open(next((shared_data / "dreambooth" / "dog6").glob("*.jpg")))
        .convert("RGB")
        .resize((128, 128))
    )
    x = torch.from_numpy(levels(photo)).float().permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        z = encoder(x)
        pixels = front.decode(z).sample[0].float()
        wrong = front.decode(z.flip(-1)).sample[0].float()
    wanted = levels(photo)
    assert psnr(((pixels + 1) * 127.5).permute(1, 2, 0).double().numpy(), wanted) > 25
    assert psnr(((wrong + 1) * 127.5).permute(1, 2, 0).double().numpy(), wanted) < 20


def _encoder(folder):
    config = json.loads((folder / "config.json").read_text())
    width, layers = config["width"], [torch.nn.Conv2d(3, config["width"], 3, padding=1)]
    for i, count in enumerate(config["blocks_per_stage_encoder"]):
        if i:
            layers.append(torch.nn.Conv2d(width, width, 3, padding=1, stride=2, bias=False))
        pooled = config["pool_channels"] if i == 3 else 0
        layers += [Residual(width, pooled, config["pool_groups"]) for _ in range(count)]
    encoder = torch.nn.Sequential(*layers, torch.nn.Conv2d(width, config["latent_channels"], 3, padding=1))
    found = load_file(folder / "taef2.safetensors")
    encoder.load_state_dict(
        {k.removeprefix("encoder."): v.float() for k, v in found.items() if "encoder." in k}
    )
    return encoder.eval()


TILED = """
import json, sys, torch
from darkroom import models
from darkroom.hardware.meters import PeakMemory, resident_bytes, return_freed
from darkroom.sample.optimisations.table import optimise
from darkroom.sample.memory import count_needs, resident_now, CPU_MARGIN
return_freed(65536)
torch.set_num_threads(1)
widths = {"vae": {"block_out_channels": [32, 64, 128], "norm_num_groups": 8}}
model = models.create("tiny", overrides=widths)
size = (1024, 768)
names = sys.argv[1]
applied = optimise(model, names)
needs = count_needs(model, size)
applied.decode(torch.randn(1, 4, 16, 16))  # libraries and threads are there
base, peak = resident_now(model), PeakMemory("cpu")
applied.decode(torch.randn(1, 4, size[1] // 4, size[0] // 4))
tile = applied.tile_pixels
print(json.dumps([base, peak.bytes() - base, int(needs.vae[tile] * CPU_MARGIN)]))
"""


@pytest.mark.nightly
def test_tiles_keep_the_resident_memory_under_what_was_counted():
    """Peak resident memory of a 1024 x 768 decode in a process of its own, plain and in tiles of 256 px."""
    grown = {}
    for names in ("none", "vae_tiling:256"):
        done = subprocess.run(
            [sys.executable, "-c", TILED, names], capture_output=True, text=True, check=True
        )
        _, grew, counted = json.loads(done.stdout.splitlines()[-1])
        assert grew <= counted, names
        assert grew > 0.5 * counted, names  # the count is no mere ceiling
        grown[names] = grew
    assert grown["vae_tiling:256"] < 0.4 * grown["none"]


def test_weights_that_are_cast_are_told_to_the_allocator_first(tiny, monkeypatch):
    """A server decodes on a stream of its own: what it frees was made on another."""
    told: list[int] = []
    keep = lambda *tensors: told.extend(tensor.data_ptr() for tensor in tensors)  # noqa: E731
    monkeypatch.setattr(vae_module, "used_here", keep)
    vae = copy.deepcopy(tiny.vae)
    before = [weight.data_ptr() for weight in vae.parameters()]
    VaeFront(vae, CPU).to(torch.float64)
    assert told == before
    assert before != [weight.data_ptr() for weight in vae.parameters()]
