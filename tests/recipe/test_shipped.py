"""Every shipped recipe reads, and those that fine-tune run at toy size through the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open

from darkroom import cli, models
from darkroom.data.importers import import_pictures
from darkroom.data.store import Store
from darkroom.models.adapters.read import read_adapter
from darkroom.prepare.job import prepare
from darkroom.recipe import read_recipe
from darkroom.recipe.fine_tuning import FINE_TUNING

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(ROOT.glob("recipes/*.yaml")) + sorted(ROOT.glob("src/darkroom/quickstart/*.yaml"))
OF_THE_QUICKSTART = {"laptop", "four-steps"}
FINE = [
    path for path in RECIPES if read_recipe(path).task in FINE_TUNING and path.stem not in OF_THE_QUICKSTART
]
FULL = [path for path in RECIPES if path.stem.startswith("sd") and read_recipe(path).task == "pretrain"]
WORDS = "a photo of sks dog, a house by the sea, a portrait of an old man"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_reads_and_its_model_can_be_built(path):
    recipe = read_recipe(path)
    assert path.read_text().startswith("# ")
    if recipe.model.base not in models.FAMILIES:
        own = recipe.model.base.startswith(("runs/", "quickstart/"))  # another run's model
        assert own or recipe.model.base.count("/") == 1 or recipe.task == "extractor"  # a hub id
        return
    denoiser = models.FAMILIES[recipe.model.base].denoiser
    parts = {denoiser: recipe.model.unet, "text_encoder": recipe.model.text_encoder, "vae": recipe.model.vae}
    parts = {name: part for name, part in parts.items() if isinstance(part, dict)}
    tiny = recipe.model.base.startswith("tiny")  # of a full-size one the shapes will do
    overrides = {k: v for k, v in parts.items() if v}
    for part in ("unet", "vae", "text_encoder") if tiny else ("unet", "vae"):  # training joins their widths
        device = "cpu" if tiny else "meta"
        model = models.create(recipe.model.base, overrides=overrides, parts=(part,), device=device)
        assert model.num_parameters[part] > 0


def test_the_recipes_are_found():
    assert {"autoencoder", "pretrain", "emoji", "emoji-autoencoder", "dit-budget"} <= {
        path.stem for path in RECIPES
    }
    assert {path.stem for path in FINE} == {
        *("sd15-dreambooth", "sd15-dreambooth-lora", "sd15-lora", "sd15-textual-inversion"),
        *("sdxl-dreambooth-lora", "sd2-finetune", "sd15-lcm-lora"),
    }


@pytest.mark.parametrize("path", FINE, ids=lambda path: path.stem)
def test_another_optimiser_takes_a_rate_of_its_own_scale(path):
    task = read_recipe(path).task
    told = re.search(r"lr(?: unsaid)?: ([\d.e-]+)", path.read_text())
    assert told is not None
    assert read_recipe(path, ["optim.name=adamw8bit"]).optim.lr == float(told[1])
    adafactor = {"finetune": 5e-4, "dreambooth": 2.5e-4}.get(task, 1e-2)
    assert read_recipe(path, ["optim.name=adafactor"]).optim.lr == adafactor
    assert read_recipe(path, ["optim.name=prodigy"]).optim.lr == 1
    assert read_recipe(path, ["optim.name=prodigy", "optim.lr=0.5"]).optim.lr == 0.5


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    """Tiny models of the same build as SD 1.5 and SDXL."""
    folder = tmp_path_factory.mktemp("bases")
    tokenizer = models.train_tokenizer([WORDS] * 3, vocab_size=600)
    models.save(models.create("tiny", seed=1, tokenizer=tokenizer), folder / "sd")
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_dim": 32,
    }
    unet = {
        "block_out_channels": [16, 32, 32],
        "transformer_layers_per_block": [1, 1, 1],
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "attention_head_dim": 4,
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 32 + 6 * 8,
        "sample_size": 8,
    }
    vae = {"block_out_channels": [8, 16, 16], "norm_num_groups": 8, "layers_per_block": 1, "sample_size": 32}
    ends = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": len(tokenizer) - 1}
    overrides = {"unet": unet, "vae": vae, "text_encoder": text | ends, "text_encoder_2": text | ends}
    models.save(models.create("sdxl", seed=1, tokenizer=tokenizer, overrides=overrides), folder / "sdxl")
    return folder


@pytest.fixture(scope="session")
def photos(shared_data, tmp_path_factory):
    """Five photographs of a dog, small, without captions, and the same with captions."""
    folder = tmp_path_factory.mktemp("photos")
    for name in ("plain", "captioned"):
        (folder / name).mkdir()
        for i, path in enumerate(sorted((shared_data / "dreambooth" / "dog").glob("*.jp*g"))[:5]):
            with Image.open(path) as image:
                image.thumbnail((80, 80))
                image.save(folder / name / f"{i}.png")
            if name == "captioned":
                (folder / name / f"{i}.txt").write_text(f"a dog in place {i}")
    return folder


def told(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        cli.main([*map(str, arguments), "--json"])
    out = capsys.readouterr()
    assert not left.value.code, out.err
    return json.loads(out.out.splitlines()[-1])


@pytest.mark.parametrize("path", FINE, ids=lambda path: path.stem)
def test_a_fine_tuning_recipe_runs_at_toy_size(path, bases, photos, tmp_path, capsys):
    recipe = read_recipe(path)
    base = bases / ("sdxl" if path.stem.startswith("sdxl") else "sd")
    toy = [f"model.base={base}", "data.resolution=32", "train.steps=2", "sample.every=2", "sample.steps=1"]
    toy += ["train.precision=float32", "checkpoint.every=1", "optim.warmup_steps=0"]
    if recipe.data.store:
        store = tmp_path / "pictures.lance"
        told(capsys, "import", photos / "captioned", store)
        toy += [f"data.store={store}", "data.holdout=1", "train.global_batch=2"]
    else:
        key = "instance" if recipe.data.instance else "folder"
        toy += [f"data.{key}={photos / ('plain' if key == 'instance' else 'captioned')}"]
    if recipe.data.class_prompt:
        toy += ["data.num_class_images=2"]
    if recipe.data.prompt:
        toy += ["data.prompt=a photo of sks dog"]
    result = told(capsys, "train", path, *toy, "--out", tmp_path / "run")
    assert result["steps"] == 2
    made = [Path(name).name for name in result["outputs"]]
    expected = {"textual-inversion": ["model", "learned_embeds.safetensors"]}
    adapter = recipe.task in ("lora", "dreambooth-lora", "distill")
    assert made == expected.get(recipe.task, ["adapter.safetensors"] if adapter else ["model"])
    assert (tmp_path / "run" / "samples" / "step-00000002.png").is_file()
    if adapter:
        assert recipe.adapter is not None
        assert read_adapter(tmp_path / "run" / "adapter.safetensors").rank == recipe.adapter.rank
        merged = told(capsys, "export", tmp_path / "run", "--to", tmp_path / "merged")["model"]
        assert models.load(merged).is_sdxl == path.stem.startswith("sdxl")


def test_an_adapters_header_says_what_the_trained_model_is(bases, photos, tmp_path, capsys):
    """Of self-attention alone, which names no base: on a model built like SDXL, and on one that learns v."""
    toy = [f"data.instance={photos / 'plain'}", "data.prompt=a photo of sks dog", "data.resolution=32"]
    toy += ["train.steps=1", "train.precision=float32", "sample.every=0", "adapter.targets=['*.attn1.*']"]
    headers = {}
    for recipe, name, more in (("sdxl", "sdxl", "train.seed=0"), ("sd15", "sd", "objective.prediction=v")):
        path = ROOT / "recipes" / f"{recipe}-dreambooth-lora.yaml"
        told(capsys, "train", path, *toy, f"model.base={bases / name}", more, "--out", tmp_path / name)
        kohya = tmp_path / f"{name}.safetensors"
        told(capsys, "export", tmp_path / name, "--to", kohya, "--kohya")
        headers[name] = []
        for file in (tmp_path / name / "adapter.safetensors", kohya):
            with safe_open(file, framework="pt") as opened:
                headers[name].append(opened.metadata() | {"first": min(opened.keys())})
    assert [one["modelspec.prediction_type"] for one in headers["sd"]] == ["v", "v"]
    assert all("modelspec.architecture" not in one for one in headers["sd"])  # of no published shape
    for one in headers["sdxl"]:
        assert one["modelspec.architecture"] == "stable-diffusion-xl-v1-base/lora"
        assert one["ss_base_model_version"] == "sdxl_base_v1-0"
        assert one["modelspec.prediction_type"] == "epsilon"
    assert headers["sdxl"][1]["first"].startswith("lora_unet_input_blocks_")


@pytest.fixture(scope="session")
def prepared(photos, bases, tmp_path_factory):
    """A store of captioned photographs, and its copies with columns of each base at 32 and 64 px."""
    folder = tmp_path_factory.mktemp("stores")
    for base in ("sd", "sdxl"):
        store = folder / f"{base}.lance"
        import_pictures(photos / "captioned", store)
        model = models.load(bases / base)
        for side in (32, 64):
            prepare(Store.open(store), model, resolution=side, text=side == 32)
    return folder


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.stem)
def test_a_pretraining_recipe_runs_at_toy_width(path, bases, prepared, tmp_path, capsys):
    """Every full-size recipe's own code path: prepared latents and text, a random U-Net."""
    recipe = read_recipe(path)
    base = "sdxl" if path.stem.startswith("sdxl") else "sd"
    toy = [f"model.base={bases / base}", f"data.store={prepared / base}.lance", "data.filter=null"]
    toy += ["data.holdout=1", "optim.warmup_steps=0", "train.precision=float32", "train.global_batch=2"]
    toy += [
        "checkpoint.every=1",
        "evaluate.every=1",
        "sample.every=2",
        "sample.steps=1",
        "parallel.devices=1",
    ]
    if recipe.phases:
        toy += [
            "phases=[{resolution: 32, samples: 4}, {resolution: 64, samples: 3, ema_from: 2, lr: 1.0e-3}]"
        ]
    else:
        toy += ["data.resolution=32", "train.steps=2", "train.ema.start_step=0"]
    result = told(capsys, "train", path, *toy, "--out", tmp_path / "run")
    assert result["steps"] == 2
    last = tmp_path / "run" / ("phase-2-64px" if recipe.phases else "")
    made = models.load(last / "model")
    assert made.is_sdxl == (base == "sdxl")
    assert (last / "samples" / "step-00000002.png").is_file()
    started = models.load(bases / base).unet.state_dict()
    moved = max((made.unet.state_dict()[name] - value).abs().max().item() for name, value in started.items())
    assert (moved > 0.05) == recipe.model.fresh_unet  # nothing of the base's U-Net is left, or nearly all
    again = told(capsys, "train", path, *toy, "--out", tmp_path / "run")  # finished: nothing is done anew
    assert again["bill"]["sessions"] == result["bill"]["sessions"] == 1


def test_the_transformers_recipe_runs_all_its_phases(bases, prepared, tmp_path, capsys):
    """Routed and whole, at two sizes, with the VAE and the text encoder of another model."""
    path = ROOT / "recipes" / "dit-budget.yaml"
    base = bases / "sd"
    unet = "{num_layers: 5, num_attention_heads: 2, attention_head_dim: 8}"
    toy = [
        f"model={{base: tiny-dit, vae: {base}, text_encoder: {base}, unet: {unet}}}",
        f"data={{store: {prepared / 'sd'}.lance, holdout: 1, caption_dropout: 0.1}}",
        "phases=[{resolution: 32, samples: 4, keep: 0.5}, {resolution: 32, samples: 2, keep: 1}, "
        "{resolution: 64, samples: 4, keep: 0.5, ema_from: 2}, {resolution: 64, samples: 2, keep: 1}]",
        *("train.global_batch=2", "train.precision=float32", "optim.warmup_steps=0", "parallel.devices=1"),
        *("checkpoint.every=1", "evaluate.every=1", "sample.every=2", "sample.steps=1"),
    ]
    result = told(capsys, "train", path, *toy, "--out", tmp_path / "run")
    assert result["steps"] == 1
    phases = sorted(folder.name for folder in (tmp_path / "run").iterdir())
    assert phases == ["phase-1-32px", "phase-2-32px", "phase-3-64px", "phase-4-64px"]
    routed = [read_recipe(tmp_path / "run" / phase / "recipe.yaml").train.routing for phase in phases]
    assert [(one.keep, one.before) for one in routed] == [(0.5, 2), (1, 2), (0.5, 2), (1, 2)]
    made, source = models.load(tmp_path / "run" / phases[-1] / "model"), models.load(base)
    assert made.is_dit
    assert made.prediction == "flow_prediction"
    assert models.identity(made.vae) == models.identity(source.vae)
    assert models.identity(made.text_encoders[0]) == models.identity(source.text_encoders[0])
