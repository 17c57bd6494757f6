"""OpenVINO in 8 bits: near float32, made once, refused where it breaks pictures."""

from __future__ import annotations

import importlib.util
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderTiny
from torch import nn

from darkroom import cli, models, options
from darkroom.errors import DarkroomError, InputError
from darkroom.sample import generate, open_backend
from darkroom.sample.backends import int8
from darkroom.sample.backends.shells import text_layers, text_shell
from darkroom.sample.likeness import likeness
from darkroom.sample.prompts import encode_prompts
from needs import missing

SMALL = {
    "unet": {"block_out_channels": [16, 32], "norm_num_groups": 4},
    "vae": {"block_out_channels": [8, 16, 16], "norm_num_groups": 4},
}


@pytest.mark.nightly
def test_a_small_model_in_8_bits_draws_what_it_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is another seed. What was made is used again; other weights are quantised anew."""
    if importlib.util.find_spec("nncf") is None:
        missing("no nncf here: pip install '.[openvino]'")
    monkeypatch.setenv("DARKROOM_CACHE", str(tmp_path))
    monkeypatch.setattr(
        int8.Calibration.__init__, "__defaults__", (("a red circle", "a dog"), 4, 7.5, 0, 0.95)
    )
    model = models.create("tiny", seed=1, overrides=SMALL)
    told: list[str] = []
    opened = open_backend("openvino", model, optimise="int8", notice=told.append)
    assert opened.precision == "int8"
    (made,) = (tmp_path / "backends").glob("openvino-unet-int8*")
    (decoder,) = (tmp_path / "backends").glob("openvino-vae_decoder-int8*")
    assert "FakeQuantize" in (decoder / "model.xml").read_text()
    assert json.loads((decoder / int8.REPORT).read_text())["quality"]["psnr_db"] > int8.LEAST_DECODER_DB
    assert any("the VAE's decoder in 8 bits" in line for line in told)
    (text,) = (tmp_path / "backends").glob("openvino-text_encoder-int8*")
    assert "FakeQuantize" in (text / "model.xml").read_text()
    assert opened.model is not None
    assert opened.model.text_encoders[0] is not model.text_encoders[0]
    states, as_before, other_words = (
        encode_prompts(one, [prompt], (64, 64))[0][0].text_LD
        for one, prompt in ((opened.model, "two dogs"), (model, "two dogs"), (model, "a red circle"))
    )
    assert 0 < (states - as_before).norm() < 0.2 * (other_words - as_before).norm()
    assert sum("calibration picture" in line for line in told) == 2  # drawn once for all parts
    assert "FakeQuantize" in (made / "model.xml").read_text()
    about = json.loads((made / int8.REPORT).read_text())
    assert about["quality"]["psnr_db"] > 30
    assert len(about["float_layers"]) <= 0.1 * 100
    assert any("PSNR" in line for line in told)
    ours = generate(model, "a red circle", backend=opened, steps=4, seed=3)
    plain = generate(model, "a red circle", steps=4, seed=3)
    other = generate(model, "a red circle", steps=4, seed=4)
    pictures, ours_drawn, others_drawn = ([one.image for one in some] for some in (plain, ours, other))
    near, far = likeness(ours_drawn, pictures)["psnr_db"], likeness(others_drawn, pictures)["psnr_db"]
    assert near > 28 > far
    again: list[str] = []
    open_backend("openvino", model, optimise="int8", notice=again.append)
    assert [line for line in again if "quantis" in line] == []
    _check_tiny(model, tmp_path)


def _check_tiny(model: models.Model, folder: Path) -> None:
    """A tiny decoder is quantised like the model's own, which stays as it is; nothing else is made anew."""
    torch.manual_seed(0)
    blocks = {"num_encoder_blocks": (1, 1, 1), "num_decoder_blocks": (1, 1, 1)}
    widths = {"encoder_block_out_channels": (16,) * 3, "decoder_block_out_channels": (16,) * 3}
    AutoencoderTiny(**widths, **blocks).save_pretrained(folder / "tiny")
    told: list[str] = []
    optimise = f"int8,tiny_vae:{folder / 'tiny'}"
    opened = open_backend("openvino", model, optimise=optimise, notice=told.append)
    assert [line for line in told if "quantised" in line] == [
        "the VAE's decoder is quantised to 8 bits, once"
    ]
    assert len(list((folder / "backends").glob("openvino-vae_decoder-int8*"))) == 2
    ours, plain = (
        generate(model, "a red circle", steps=4, seed=3, **how)
        for how in ({"backend": opened}, {"optimise": optimise.removeprefix("int8,")})
    )
    assert likeness([ours[0].image], [plain[0].image])["psnr_db"] > 28


@pytest.mark.parametrize("family", ["tiny", "sdxl"])
def test_a_text_encoder_whose_layers_run_elsewhere_says_the_same(
    family: str, tiny: models.Model, small_xl: models.Model
) -> None:
    """All that is read of it: last states, skipped layers, SDXL's pooled text. Control: other states."""
    model = {"tiny": tiny, "sdxl": small_xl}[family]

    def changes(moved: int, skip: int | None) -> list[torch.Tensor]:
        runs = []
        for encoder in model.text_encoders:
            shell = text_shell("text_encoder", encoder)
            runs.append(lambda given, shell=shell: shell.module(given["embedded"]).roll(moved, -1))
        encoders = [int8.with_layers(*pair) for pair in zip(model.text_encoders, runs, strict=True)]
        other = replace(model, text_encoders=encoders)
        found, plain = (
            encode_prompts(one, ["a red circle", "two dogs"], (64, 64), clip_skip=skip)[0]
            for one in (other, model)
        )
        pairs = [(a.text_LD, b.text_LD) for a, b in zip(found, plain, strict=True)]
        pairs += [
            (a.added[name], b.added[name]) for a, b in zip(found, plain, strict=True) for name in a.added
        ]
        return [(a - b).abs().max() for a, b in pairs]

    for skip in (None, 1):
        with torch.no_grad():
            assert max(changes(0, skip)) < 1e-4
            assert max(changes(1, skip)) > 1e-2


def test_two_threads_encode_each_its_own_text(tiny: models.Model) -> None:
    """Both have passed the first layer before either goes on; each text's states are its own."""
    shell, together = text_shell("text_encoder", tiny.text_encoders[0]), threading.Barrier(2, timeout=60)
    encoder = int8.with_layers(tiny.text_encoders[0], lambda given: shell.module(given["embedded"]))
    text_layers(encoder)[0].register_forward_hook(lambda *_: together.wait() and None)
    other = replace(tiny, text_encoders=[encoder])

    def encode(model: models.Model, prompt: str) -> torch.Tensor:
        return encode_prompts(model, [prompt], (64, 64))[0][0].text_LD

    prompts = ("a red circle", "two dogs")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(encode, [other, other], prompts))
    alone = [encode(tiny, prompt) for prompt in prompts]
    torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(alone[0], alone[1], atol=1e-2)


def test_calibration_sees_all_timesteps_with_and_without_the_prompt(tiny: models.Model) -> None:
    calibration = int8.Calibration(prompts=("a", "b", "c"), steps=8)
    seen: list[float] = []

    def unet(x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: int8.Inputs) -> torch.Tensor:
        seen.append(float(t[0]))
        return torch.zeros_like(x)

    inputs = int8.CalibrationPictures(tiny, lambda: unet, calibration, lambda _: None).inputs
    assert len(inputs) == int8.SAMPLES < 3 * 8
    assert {float(one["t"][0]) for one in inputs} == set(seen)
    silent = encode_prompts(tiny, [""], (32, 32))[0][0].text_LD
    unprompted = [torch.equal(one["text"][0], silent) for one in inputs]
    assert sum(unprompted) == int8.SAMPLES // 2


def test_layers_that_8_bits_change_most_are_found_by_measuring() -> None:
    """One layer sees a value that dwarfs all others; without it none stands out."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(20)))

    def found(outlier: float) -> list[str]:
        with torch.no_grad():
            net[7].bias[0] = outlier
            net[8].weight[:, 0] = 0.0  # it does not listen to it, but rounds by it
        x = torch.randn(8, 32)
        return int8.sensitive_layers(net, [{"x": x}], lambda one: net(one["x"]))

    assert found(500.0)[0] == "8"
    assert "8" not in found(0.0)


@pytest.mark.parametrize("change", [{"std": 0.5}, {"psnr_db": 9.0}, {"finite": False}])
def test_what_breaks_pictures_is_refused(change: dict[str, object]) -> None:
    good = {"finite": True, "psnr_db": 35.0, "std": 40.0, "std_float32": 41.0}
    int8.refuse_broken(good)
    with pytest.raises(DarkroomError, match="int8 breaks this model's pictures"):
        int8.refuse_broken(good | change)


def test_a_decoder_that_8_bits_harm_stays_in_float() -> None:
    """Of one picture: a little noise is fine; much noise, one colour and no numbers are not."""
    torch.manual_seed(0)
    plain = torch.rand(1, 3, 32, 32) * 2 - 1
    fine = int8.decoder_quality(plain + 0.01 * torch.randn_like(plain), plain)
    assert 40 < fine["psnr_db"] < 60
    assert not int8.harms(fine)
    broken = (plain + 0.5 * torch.randn_like(plain), torch.zeros_like(plain), plain * float("nan"))
    assert all(int8.harms(int8.decoder_quality(one, plain)) for one in broken)
    black = torch.full_like(plain, -1.0)
    assert not int8.harms(int8.decoder_quality(black, black))  # so it is in float32 too


def test_a_decoder_is_calibrated_on_what_it_is_given() -> None:
    """Latents as `decode` hands them over, the scaling undone; the last is of a seed of its own."""
    from darkroom.sample.denoise import unet_call
    from darkroom.sample.pictures import decode

    model = models.create("tiny", seed=1, overrides=SMALL)
    model.vae.register_to_config(scaling_factor=0.5)  # type: ignore[union-attr]
    calibration = int8.Calibration(prompts=("a", "b"), steps=2)
    opened: list[str] = []
    pictures = int8.CalibrationPictures(
        model, lambda: opened.append("unet") or unet_call(model.unet), calibration, lambda _: None
    )
    latents = pictures.latents
    assert len(latents) == 2 * 2
    assert len(pictures.inputs) == 2 * 2
    assert not torch.equal(latents[3], pictures.unseen[-1])
    assert opened == ["unet"]
    seen: list[torch.Tensor] = []

    def decoder(given: torch.Tensor) -> torch.Tensor:
        seen.append(given)
        return torch.zeros(1, 3, 4 * given.shape[2], 4 * given.shape[3])

    decode(model.vae, latents[0][None], decoder=decoder)
    torch.testing.assert_close(int8.decoder_inputs(model.vae, latents)[0]["latents"], seen[0])
    assert not torch.allclose(seen[0], latents[0][None])


def test_another_calibration_is_another_export() -> None:
    assert int8.Calibration().digest == int8.Calibration().digest
    assert int8.Calibration(prompts=("a dog",)).digest != int8.Calibration().digest


def test_int8_is_openvinos(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.eight_bits("openvino", "int8", "auto") == ("float32", "auto,int8")
    assert options.eight_bits("torch", "bf16", "none") == ("bf16", "none")
    with pytest.raises(InputError, match="precision int8 with backend onnx"):
        options.eight_bits("onnx", "int8", "none")
    with pytest.raises(SystemExit) as left:
        cli.main(["generate", "tiny", "a dog", "--precision", "int8"])
    assert left.value.code == 2
    assert "allowed: backend openvino" in capsys.readouterr().err


def test_prompts_of_a_file_calibrate(tmp_path: Path) -> None:
    """Named behind int8; other prompts make another export."""
    file = tmp_path / "prompts.txt"
    file.write_text('# mine\na teapot\n\n--prompt "a dog in the snow" --steps 4\n')
    taken = int8.Calibration.of(str(file))
    assert taken.prompts == ("a teapot", "a dog in the snow")
    assert taken.digest != int8.Calibration().digest
    assert int8.Calibration.of("").digest == int8.Calibration().digest
    assert options.eight_bits("openvino", "int8", f"int8:{file}") == ("float32", f"int8:{file}")
    assert options.eight_bits("openvino", "int8", "bf16") == ("float32", "bf16,int8")
    file.write_text("# none\n")
    with pytest.raises(InputError, match="has 0 prompts"):
        int8.Calibration.of(str(file))
    with pytest.raises(InputError, match="cannot be read"):
        int8.Calibration.of(str(tmp_path / "missing.txt"))
