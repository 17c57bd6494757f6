"""Fine-tuning from the outside: what is trained, what is left alone, what diffusers makes of the files."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from subjects import SIDE, recipe_for

from darkroom import models, sample
from darkroom.errors import InputError, RecipeError
from darkroom.models.adapters.read import read_adapter
from darkroom.recipe import Recipe, make_recipe
from darkroom.run import Run
from darkroom.train import exports
from darkroom.train.checkpoint import checkpoints, load_checkpoint
from darkroom.train.exports import Exporter
from darkroom.train.jobs import Pinned
from darkroom.train.run import export, train
from darkroom.train.setup import make_job
from darkroom.train.trainer import TrainResult


def quietly(recipe: Recipe, out: Path, **more: Any) -> TrainResult:
    return train(recipe, out=out, console=lambda _: None, **more)


def picture(model: models.Model, prompt: str, guidance: float = 7.5) -> np.ndarray:
    size = (SIDE, SIDE)
    made = sample.generate(
        model, prompt, seed=4, steps=3, size=size, guidance=guidance, notice=lambda _: None
    )
    return np.asarray(made[0].image).astype(int)


def diffusers_picture(pipeline: StableDiffusionPipeline, prompt: str, guidance: float = 7.5) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(4)
    out = pipeline(
        prompt, num_inference_steps=3, height=SIDE, width=SIDE, generator=generator, guidance_scale=guidance
    )
    return np.asarray(out.images[0]).astype(int)


# ---- the published parameter table


@pytest.mark.parametrize(
    ("rank", "trained", "total", "file_mib"),
    [
        (4, 398_592, 859_919_556, 1.57),
        (8, 797_184, 860_318_148, 3.09),
        (16, 1_594_368, 861_115_332, 6.13),
        (32, 3_188_736, 862_709_700, 12.21),
    ],
)
def test_query_and_value_adapters_of_sd15_have_the_published_size(
    rank: int, trained: int, total: int, file_mib: float, tmp_path: Path
) -> None:
    from darkroom.models.adapters.read import write_adapter
    from darkroom.recipe.sections import AdapterSettings
    from darkroom.train.tasks.lora import adapter_of, add_adapters, parameter_table

    model = models.create("sd15", parts=("unet",), device="meta")
    settings = AdapterSettings(targets="qv", rank=rank)
    parts = add_adapters(model, settings)
    assert parameter_table(parts) == (trained, total)
    values = {
        f"unet.{name}": torch.randn(p.shape)
        for name, p in parts["unet"].named_parameters()
        if p.requires_grad
    }
    file = write_adapter(adapter_of("it", values, settings, {}), tmp_path / "it.safetensors", family="sd15")
    with file.open("rb") as stream:
        header = 8 + int.from_bytes(stream.read(8), "little")
    assert file.stat().st_size == header + 4 * trained
    assert file.stat().st_size / 2**20 == pytest.approx(file_mib, rel=0.03)


def test_targets_mean_what_they_say() -> None:
    from darkroom.train.tasks.lora import target_layers

    model = models.create("tiny", parts=("unet", "text_encoder"))
    assert model.unet is not None
    named = {t: target_layers("unet", model.unet, t) for t in ("qv", "attention", "all-linear", "conv")}
    assert {name.rsplit(".", 1)[-1] for name in named["qv"]} == {"to_q", "to_v"}
    assert set(named["qv"]) < set(named["attention"]) < set(named["all-linear"]) < set(named["conv"])
    assert not [name for name in named["conv"] if name.startswith(("conv_in", "conv_out", "time_emb"))]
    assert target_layers("unet", model.unet, ("*.attn2.to_k",)) == [
        name for name in named["attention"] if name.endswith("attn2.to_k")
    ]
    text = target_layers("text_encoder", model.text_encoders[0], "all-linear")
    assert {name.rsplit(".", 1)[-1] for name in text} == {
        *("q_proj", "k_proj", "v_proj", "out_proj"),
        "fc1",
        "fc2",
    }


# ---- tasks


def test_dreambooth_lora_with_five_photographs_and_no_captions(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    recipe = recipe_for("dreambooth-lora", base, photos, "train.steps=12", "data.encode=auto")
    result = train(recipe, out=tmp_path / "run", console=said.append)
    assert any(line.startswith("train.global_batch 1: ") for line in said)  # unsaid, and why
    assert any(line.startswith("5 pictures from") for line in said)
    assert any(line.startswith("latents of 5 pictures made") for line in said)
    assert result.outputs == [tmp_path / "run" / "adapter.safetensors"]
    assert not result.model.exists()  # the base is not copied
    state = load_checkpoint(checkpoints(result.run / "checkpoints")[-1])
    assert all(".lora_" in name for name in state.tensors["weights"])
    with safe_open(result.outputs[0], framework="pt") as file:
        metadata = file.metadata()
    assert metadata["modelspec.trigger_phrase"] == "a photo of sks dog"
    assert metadata["ss_sd_model_name"] == base.name  # whoever gets the file learns no path
    assert not [value for value in metadata.values() if str(base.parent) in value]
    assert metadata["ss_network_dim"] == "8"
    again: list[str] = []
    train(recipe, out=tmp_path / "run", console=again.append)
    assert again == [f"'{tmp_path / 'run'}' is finished: all 12 steps are made"]


@pytest.fixture(scope="module")
def adapter_run(base: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA on every kind of layer, trained hard enough to be seen."""
    overrides = (
        "adapter.targets=conv",
        "adapter.text_encoder=true",
        "optim.text_encoder_lr=5e-2",
        "optim.lr=1e-1",
    )
    recipe = recipe_for(
        "lora", base, photos, *overrides, "train.steps=10", "adapter.alpha=6", "adapter.rank=3"
    )
    return quietly(recipe, tmp_path_factory.mktemp("adapter") / "run").run


def test_diffusers_loads_the_adapter_and_draws_the_same_picture(
    base: Path, adapter_run: Path, tmp_path: Path
) -> None:
    prompt = "a photo of a dog"
    merged = models.load(export(adapter_run, tmp_path / "merged"))
    ours, plain = picture(merged, prompt), picture(models.load(base), prompt)
    pipeline = StableDiffusionPipeline.from_pretrained(base, local_files_only=True)
    pipeline.load_lora_weights(str(adapter_run / "adapter.safetensors"))
    theirs = diffusers_picture(pipeline, prompt)
    assert np.abs(ours - theirs).max() <= 2
    assert np.abs(ours - plain).mean() >= 10  # the control: the adapter moves the picture


def test_kohya_keys_hold_the_same_numbers(adapter_run: Path, tmp_path: Path) -> None:
    file = export(adapter_run, tmp_path / "kohya.safetensors", kohya=True)
    stored = load_file(file)
    assert all(key.startswith(("lora_unet_", "lora_te")) for key in stored)
    one, other = read_adapter(file), read_adapter(adapter_run / "adapter.safetensors")
    assert len(one.layers) == len(other.layers) > 20
    downs = sorted(float(layer.down.double().sum()) for layer in one.layers.values())
    assert downs == sorted(float(layer.down.double().sum()) for layer in other.layers.values())
    assert {round(layer.scale, 6) for layer in one.layers.values()} == {2.0}
    with pytest.raises(InputError, match="--kohya with the folder"):
        export(adapter_run, tmp_path / "folder", kohya=True)


@pytest.mark.parametrize("kind", ["adapter.rslora=true", "adapter.dora=true", "adapter.dropout=0.3"])
def test_kinds_of_lora_are_merged_as_they_were_trained(
    base: Path, photos: Path, tmp_path: Path, kind: str
) -> None:
    """The U-Net with its adapter in place answers as the merged one."""
    recipe = recipe_for("lora", base, photos, kind, "optim.lr=5e-2", "train.ema.enabled=false")
    job = make_job(recipe, Pinned(tmp_path / "run"))
    with job.feed(0) as batches:
        for k in range(4):
            job.step(k, job.task.inputs(next(batches), job.device))
    unet: Any = job.task.model.unet
    x, t, text = torch.randn(1, 4, 8, 8), torch.tensor([300]), torch.randn(1, 77, 64)
    from darkroom.models.adapters.read import merge

    fresh = models.load(base)
    plain = fresh.unet(x, t, text).sample.detach()
    merge(fresh, Exporter(recipe, tmp_path / "run").adapter(job.step.weights.masters, "it"))
    merged = fresh.unet(x, t, text).sample.detach()
    trained = unet.eval()(x, t, text).sample.detach()
    torch.testing.assert_close(merged, trained, rtol=1e-3, atol=1e-4)
    assert (merged - plain).abs().max() > 0.1


def test_frozen_weights_are_shared_in_the_compute_precision(base: Path, photos: Path, tmp_path: Path) -> None:
    recipe = recipe_for("dreambooth-lora", base, photos, "train.precision=bf16")
    job = make_job(recipe, Pinned(tmp_path / "run"))
    assert {p.dtype for p in job.task.modules["unet"].parameters()} == {torch.bfloat16}
    assert {m.dtype for m in job.step.weights.masters.values()} == {torch.float32}
    assert sum(m.numel() for m in job.step.weights.masters.values()) < 60_000


def test_full_dreambooth_with_prior_preservation_and_its_text_encoder(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    overrides = (
        "data.class_prompt=a photo of a dog",
        "data.num_class_images=3",
        "model.train_text_encoder=true",
    )
    rate = ("optim.text_encoder_lr=1e-4", "optim.lr=1e-3", "sample.every=6", "sample.steps=1")
    said: list[str] = []
    recipe = recipe_for("dreambooth", base, photos, *overrides, *rate)
    result = train(recipe, out=tmp_path / "run", console=said.append)
    assert "class pictures: 3 of 3" in said
    folder = tmp_path / "run" / "data" / "class"
    assert sorted(path.name for path in folder.glob("*.png")) == [f"class-{i:06d}.png" for i in range(3)]
    rows = Run.open(result.run).metrics()
    for row in rows:
        assert row["loss"] == pytest.approx(row["subject_loss"] + row["prior_loss"], rel=1e-5)
        assert row["prior_loss"] > 0
    before, after = models.load(base), models.load(result.model)
    for part in ("unet", "text_encoder"):
        one, other = before.modules[part].state_dict(), after.modules[part].state_dict()
        assert any(not torch.equal(one[name], other[name]) for name in one), part
    assert models.identity(before.modules["vae"]) == models.identity(after.modules["vae"])
    assert Image.open(result.run / "samples" / "step-00000006.png").size == (2 * SIDE, 2 * SIDE)


def test_prior_weight_is_the_papers_sum(base: Path, photos: Path, tmp_path: Path) -> None:
    """The loss is the mean over the subject's rows plus weight times the mean over the class's."""
    overrides = ("data.class_prompt=a photo of a dog", "data.num_class_images=3", "data.prior_weight=0.25")
    batch = ("train.global_batch=2", "train.micro_batch=2", "optim.clip_norm=null")
    job = make_job(recipe_for("dreambooth", base, photos, *overrides, *batch), Pinned(tmp_path / "run"))
    with job.feed(0) as batches:
        columns = next(batches)
    assert columns["is_prior"].tolist() == [False, True, False, True]
    assert columns["caption"] == ["a photo of sks dog", "a photo of a dog"] * 2
    inputs = job.task.inputs(columns, job.device)
    told = job.task.losses(inputs)
    plain = {name: value for name, value in inputs.items() if name != "is_prior"}
    each = job.task.losses(plain)["loss"]
    expected = each[0::2].mean() + 0.25 * each[1::2].mean()
    torch.testing.assert_close(told["loss"].mean(), expected)
    result = job.step(0, inputs)
    torch.testing.assert_close(result.losses["loss"], expected.detach())


def test_class_pictures_are_drawn_once_and_counted(base: Path, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dogs"
    settings = ("data.class_prompt=a photo of a dog", f"data.class_images={folder}", "train.steps=1")
    quietly(
        recipe_for("dreambooth-lora", base, photos, *settings, "data.num_class_images=2"), tmp_path / "one"
    )
    first = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    assert len(first) == 2
    (folder / "class-000000.png").unlink()  # as if it had been stopped
    said: list[str] = []
    more = recipe_for("dreambooth-lora", base, photos, *settings, "data.num_class_images=3")
    train(more, out=tmp_path / "two", console=said.append)
    assert any(
        line.startswith("drawing 2 pictures of 'a photo of a dog'") and "1 are there" in line for line in said
    )
    again = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    assert len(again) == 3
    assert {name: again[name] for name in first} == first  # picture i is the same whenever it is drawn
    other = recipe_for(
        "dreambooth-lora",
        base,
        photos,
        *settings,
        "data.num_class_images=4",
        "data.class_prompt=a photo of a cat",
    )
    with pytest.raises(RecipeError, match=r"data.class_images: .* drawn with another prompt"):
        quietly(other, tmp_path / "three")


# ---- textual inversion


@pytest.mark.parametrize("vectors", [1, 2])
def test_a_new_word_is_all_that_textual_inversion_trains(
    base: Path, photos: Path, tmp_path: Path, vectors: int
) -> None:
    overrides = (f"model.word.vectors={vectors}", "train.precision=bf16", "optim.lr=0.5", "train.steps=8")
    result = quietly(recipe_for("textual-inversion", base, photos, *overrides), tmp_path / "run")
    assert [path.name for path in result.outputs] == ["model", "learned_embeds.safetensors"]
    before, after = models.load(base), models.load(result.model)
    old = before.text_encoders[0].get_input_embeddings().weight  # type: ignore[attr-defined]
    new = after.text_encoders[0].get_input_embeddings().weight  # type: ignore[attr-defined]
    assert len(new) == len(old) + vectors
    assert torch.equal(new[: len(old)], old)
    dog = before.tokenizers[0]("dog", add_special_tokens=False).input_ids[0]
    assert all((row - old[dog]).abs().max() > 0.1 for row in new[len(old) :])
    assert models.identity(before.modules["unet"]) == models.identity(after.modules["unet"])

    prompt = "a photo of <sks>"
    pipeline = StableDiffusionPipeline.from_pretrained(base, local_files_only=True)
    pipeline.load_textual_inversion(str(tmp_path / "run" / "learned_embeds.safetensors"))
    theirs, ours = diffusers_picture(pipeline, prompt, 30.0), picture(after, prompt, 30.0)
    assert np.abs(theirs - ours).max() <= 2
    assert np.abs(ours - picture(before, "a photo of dog", 30.0)).mean() >= 10


@pytest.mark.parametrize("forgets", [True, False])
def test_the_trained_model_is_let_go_before_its_base_is_opened_again(
    base: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    """Two whole models at once would take more memory than the steps did; without `forget` they are there."""
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    write_results, write_whole_model = Exporter.write_results, Exporter.write_whole_model

    def noted(self: Exporter, model: models.Model, *rest: Any) -> None:
        held.extend(weakref.ref(p) for m in model.modules.values() for p in m.parameters())
        write_results(self, model, *rest)

    def counted(self: Exporter, *rest: Any) -> None:
        gc.collect()
        alive.append(sum(each() is not None for each in held))
        write_whole_model(self, *rest)

    monkeypatch.setattr(Exporter, "write_results", noted)
    monkeypatch.setattr(Exporter, "write_whole_model", counted)
    if not forgets:
        monkeypatch.setattr(exports, "forget", lambda module: None)
    quietly(recipe_for("textual-inversion", base, photos, "train.steps=1"), tmp_path / "run")
    assert len(held) > 100
    assert alive == [1 if forgets else len(held)]  # the word's rows, which the step holds


def test_a_word_that_cannot_be_is_refused(base: Path, photos: Path, tmp_path: Path) -> None:
    long = recipe_for("textual-inversion", base, photos, "model.word.initial=hippopotamus")
    with pytest.raises(RecipeError, match=r"model.word.initial: 'hippopotamus' is \d+ tokens"):
        quietly(long, tmp_path / "run")
    # Two vectors, and a token that stands in the vocabulary already.
    with pytest.raises(RecipeError, match=r"model.word.token: the tokenizer knows 'dog</w>' already"):
        quietly(recipe_for("textual-inversion", base, photos, "model.word.token=dog</w>"), tmp_path / "run")
    with pytest.raises(RecipeError, match="lacks the word <sks>"):
        recipe_for("textual-inversion", base, photos, "data.prompt=a photo of sks")


# ---- pictures


def test_a_folder_of_captioned_pictures(base: Path, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "captioned"
    shutil.copytree(photos, folder)
    for i, path in enumerate(sorted(folder.glob("*.png"))[:4]):
        path.with_suffix(".txt").write_text(f"red dog, lying, number {i}, on grass")
    recipe = recipe_for("lora", base, folder, "data.prompt=null")
    with pytest.raises(
        RecipeError, match=r"data.prompt: missing, and 1 of 5 pictures in data.folder have no caption"
    ):
        quietly(recipe, tmp_path / "none")
    tags = ("data.shuffle_tags=true", "data.keep_tokens=1", "data.prompt=a dog")
    job = make_job(recipe_for("lora", base, folder, *tags), Pinned(tmp_path / "run"))
    said: list[str] = []
    with job.feed(0) as batches:
        for _ in range(6):
            said += next(batches)["caption"]
    with job.feed(2) as batches:
        assert next(batches)["caption"] == said[4:6]  # what comes when is a function of the step alone
    assert "a dog" in said
    tagged = [caption for caption in said if "," in caption]
    assert {tuple(sorted(caption.split(", "))) for caption in tagged} == {
        tuple(sorted(["red dog", "lying", f"number {i}", "on grass"])) for i in range(4)
    }
    assert all(caption.startswith("red dog, ") for caption in tagged)
    assert len({caption.replace(str(i), "") for caption in tagged for i in range(4)}) > 2


def test_masks_beside_pictures_and_in_their_transparency(base: Path, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "masked"
    shutil.copytree(photos, folder)
    first = sorted(folder.glob("*.png"))[0]
    width, height = Image.open(first).size
    half = Image.new("L", (width, height))
    half.paste(255, (0, 0, width, height // 2))
    half.save(first.with_suffix(".mask.png"))
    said: list[str] = []
    recipe = recipe_for("dreambooth-lora", base, folder, "train.global_batch=5", "train.micro_batch=5")
    job = make_job(recipe, Pinned(tmp_path / "run"), say=said.append)
    assert any(line.endswith("5 pictures from " + str(folder) + ", 1 with a mask") for line in said)
    with job.feed(0) as batches:
        inputs = job.task.inputs(next(batches), job.device)
    shares = sorted(inputs["mask"].mean(dim=(1, 2, 3)).tolist())
    assert shares[0] == pytest.approx(0.5, abs=0.08)
    assert shares[1:] == [1.0] * 4
    # Noise behind the mask changes nothing, noise before it does.
    row = int(inputs["mask"].mean(dim=(1, 2, 3)).argmin())
    t = torch.full((5,), 400)
    out, target = job.task._predict(inputs, t)  # type: ignore[attr-defined]
    objective = job.task.objective  # type: ignore[attr-defined]
    hidden, seen = target.clone(), target.clone()
    hidden[row, :, -2:] += 9
    seen[row, :, :2] += 9
    losses = [objective.loss(out, some, t, inputs["mask"])[row].item() for some in (target, hidden, seen)]
    assert losses[0] == losses[1] < losses[2]

    cut_out = tmp_path / "alpha"
    cut_out.mkdir()
    for i, path in enumerate(sorted(photos.glob("*.png"))):
        image = Image.open(path).convert("RGBA")
        image.putalpha(half.resize(image.size))
        image.save(cut_out / f"{i}.png")
    clear = recipe_for("dreambooth-lora", base, cut_out, "data.mask=alpha", "objective.unmasked_weight=0.2")
    job = make_job(clear, Pinned(tmp_path / "alpha-run"))
    with job.feed(0) as batches:
        mask = job.task.inputs(next(batches), job.device)["mask"]
    assert mask.min().item() == pytest.approx(0.2)
    assert mask.mean().item() == pytest.approx(0.6, abs=0.08)
    with pytest.raises(RecipeError, match="no picture in .* is transparent anywhere"):
        quietly(recipe_for("dreambooth-lora", base, photos, "data.mask=alpha"), tmp_path / "opaque")
    with pytest.raises(RecipeError, match="unmasked_weight: given, but there are no masks"):
        quietly(recipe_for("dreambooth-lora", base, photos, "objective.unmasked_weight=0.2"), tmp_path / "no")


def test_cached_latents_and_states_give_the_losses_of_inline_ones(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    runs = {
        kind: quietly(recipe_for("dreambooth-lora", base, photos, f"data.encode={kind}"), tmp_path / kind)
        for kind in ("auto", "inline")
    }
    cached, inline = ([row["loss"] for row in Run.open(r.run).metrics()] for r in runs.values())
    assert cached == pytest.approx(inline, abs=2e-3)
    assert list((tmp_path / "auto" / "data" / "pictures.lance" / "data").glob("latents_*"))
    assert not list((tmp_path / "inline" / "data" / "pictures.lance" / "data").glob("latents_*"))
    other = quietly(recipe_for("dreambooth-lora", base, photos, "train.seed=1"), tmp_path / "seed")
    assert [row["loss"] for row in Run.open(other.run).metrics()] != pytest.approx(inline, abs=2e-3)


# ---- what is refused before anything is opened

REFUSED = [
    ("dreambooth-lora", ("data.prompt=null",), r"data.prompt: missing; say it with a rare word"),
    ("dreambooth", ("adapter.rank=4",), r"adapter: given with the task dreambooth; allowed: with lora"),
    (
        "lora",
        ("model.train_text_encoder=true",),
        r"model.train_text_encoder: true.*set adapter.text_encoder=true",
    ),
    ("lora", ("data.class_prompt=a dog",), r"data.class_prompt: given with the task lora"),
    ("dreambooth", ("data.class_prompt=a photo of sks dog",), r"data.class_prompt: .* is data.prompt too"),
    ("dreambooth", ("data.class_images=dogs",), r"data.class_prompt: needed with data.class_images"),
    (
        "dreambooth",
        ("data.num_class_images=200",),
        r"data.class_prompt: needed with data.num_class_images",
    ),
    ("dreambooth-lora", ("data.prior_weight=0.5",), r"data.class_prompt: needed with data.prior_weight"),
    ("dreambooth", ("data.text=stored",), r"data.text: stored, but with data.prompt .*set data.text=inline"),
    ("textual-inversion", ("data.text=stored",), r"data.text: stored, but with model.word"),
    ("lora", ("data.text=stored", "adapter.text_encoder=true"), r"data.text: .* with adapter.text_encoder"),
    ("lora", ("data.text=stored", "data.prompt=null"), r"data.text: stored, but with data.folder"),
    (
        "lora",
        ("data.folder=null", "data.store=a.lance", "data.repeats=folders"),
        r"data.repeats: folders with a store; allowed: with a folder",
    ),
    (
        "lora",
        ("data.store=a.lance", "data.folder=photos"),
        r"data: store and folder are both given; allowed: one of them",
    ),
    ("pretrain", (), r"data.folder: a folder with the task pretrain; import it into a store first"),
    ("lora", ("optim.text_encoder_lr=1e-5",), r"text_encoder_lr: given, but .*or adapter.text_encoder"),
    (
        "lora",
        ("optim.fused_backward=true", "optim.clip_norm=1"),
        r"optim.clip_norm: 1 .*set optim.clip_norm=null",
    ),
    (
        "lora",
        ("optim.fused_backward=true", "train.micro_batch=1"),
        r"train.micro_batch: 1 with optim.fused_backward",
    ),
    ("lora", ("optim.name=prodigy", "optim.fused_backward=true"), r"optim.fused_backward: true, but Prodigy"),
    ("lora", ("optim.name=prodigy", "optim.lr=1e-4"), r"optim.lr: 0.0001 with .*05 or more; set optim.lr=1 "),
    ("finetune", ("optim.name=adafactor", "optim.lr=1e-5"), r"optim.lr: 1e-05 with .*; set optim.lr=0.0005"),
    (
        "lora",
        ("optim.name=adafactor", "adapter.text_encoder=true", "optim.text_encoder_lr=5e-6"),
        r"optim.text_encoder_lr: 5e-06 with optim.name=adafactor.*set optim.text_encoder_lr=0.01",
    ),
    (
        "lora",
        ("optim.name=schedule-free", "optim.lr_schedule=cosine"),
        r"optim.lr_schedule: cosine with schedule-free",
    ),
    ("lora", ("evaluate.patience=2",), r"evaluate.patience: given, but evaluate.every is 0"),
    ("textual-inversion", ("model.word=null",), r"model.word: missing; say the new word"),
    (
        "finetune",
        ("model.word.token=<a>", "model.word.initial=dog"),
        r"model.word: given with the task finetune",
    ),
]


@pytest.mark.parametrize(("task", "overrides", "message"), REFUSED, ids=[f"{r[0]}-{r[1]}" for r in REFUSED])
def test_wrong_combinations_are_refused_before_a_model_is_loaded(
    task: str, overrides: tuple[str, ...], message: str
) -> None:
    nowhere = Path("nowhere")
    with pytest.raises(RecipeError, match=message) as caught:
        recipe_for(task, nowhere, nowhere, *overrides)
    assert "\n" not in str(caught.value)


def test_a_pattern_that_names_nothing_and_a_folder_without_pictures(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    recipe = recipe_for("lora", base, photos, "adapter.targets=['*.to_z']")
    with pytest.raises(RecipeError, match=r"adapter.targets: '\*.to_z' names no .* such as down_blocks"):
        quietly(recipe, tmp_path / "pattern")
    assert not (tmp_path / "pattern").exists()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("none")
    with pytest.raises(InputError):
        quietly(recipe_for("dreambooth-lora", base, tmp_path / "empty"), tmp_path / "run")
    with pytest.raises(RecipeError, match=r"data.instance: no folder"):
        quietly(recipe_for("dreambooth-lora", base, tmp_path / "nowhere"), tmp_path / "run")
    assert (
        quietly(recipe_for("dreambooth-lora", base, photos), tmp_path / "run").steps == 6
    )  # it is free still


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("stable-diffusion-v1-5/stable-diffusion-v1-5", "stable-diffusion-v1-5/stable-diffusion-v1-5"),
        ("sd15", "sd15"),
        ("{here}/people/mine", "mine"),
        ("{here}/runs/first/model", "first"),
        ("{here}/gone/mine.safetensors", "mine.safetensors"),
        ("../mine", "mine"),
    ],
)
def test_an_adapter_names_its_base_without_a_path(tmp_path: Path, given: str, named: str) -> None:
    for folder in ("people/mine", "runs/first/model"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/first/recipe.yaml").write_text("task: pretrain\n")
    recipe = make_recipe(
        {"task": "lora", "model": {"base": given.format(here=tmp_path)}, "data": {"folder": "x"}}
    )
    made = Exporter(recipe, tmp_path / "run").adapter({}, "a")
    assert made.metadata["ss_sd_model_name"] == named
