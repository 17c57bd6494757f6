"""TOML files of kohya's sd-scripts, read as recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from darkroom.cli import app
from darkroom.errors import RecipeError
from darkroom.recipe import Recipe, make_recipe
from darkroom.recipe.kohya import NETWORK, SEVERAL, TABLE, table
from darkroom.recipe.read import read_sweep
from darkroom.recipe.reference import find_keys
from darkroom.train.run import train

LORA = """
[model]
pretrained_model_name_or_path = "sd15"
v_parameterization = false

[training]
output_dir = "/somewhere"
train_data_dir = "{pictures}"
reg_data_dir = "{others}"
prior_loss_weight = 0.5
resolution = "512,512"
enable_bucket = true
train_batch_size = 2
gradient_accumulation_steps = 3
max_train_epochs = 4
learning_rate = 1e-4
unet_lr = 2e-4
text_encoder_lr = [5e-5, 1e-5]
lr_scheduler = "cosine"
lr_warmup_steps = 0.25
optimizer_type = "AdamW8bit"
optimizer_args = ["weight_decay=0.05", "betas=0.9,0.99", "momentum=1"]
mixed_precision = "bf16"
clip_skip = 2
max_token_length = 225
loss_type = "smooth_l1"
noise_offset = 0.05
multires_noise_iterations = 6
ip_noise_gamma = 0.1
min_timestep = 10
max_timestep = 900
shuffle_caption = true
keep_tokens = 1
network_module = "lycoris.kohya"
network_dim = 16
network_args = ["algo=locon", "conv_dim=8", "conv_alpha=4", "rank_dropout=0.1", "preset=full"]
xformers = true
color_aug = true
"""


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """Three dogs that come ten times, two cats that come five, and a dog of the class."""
    for inner, count in (("in/10_sks dog", 3), ("in/5_cat", 2), ("reg/1_dog", 1)):
        (tmp_path / inner).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / inner / f"{i}.png")
    return {"pictures": str(tmp_path / "in"), "others": str(tmp_path / "reg")}


def read(path: Path, text: str, *overrides: str) -> Recipe:
    (path / "kohya.toml").write_text(text)
    return read_sweep(path / "kohya.toml", overrides, of="kohya")[0][1]


def test_a_lora_is_read_whole_and_what_is_unknown_is_named(tmp_path: Path, folders: dict[str, str]) -> None:
    recipe = read(tmp_path, LORA.format(**folders))
    assert recipe.task == "lora"
    adapter, optim, train, data = recipe.adapter, recipe.optim, recipe.train, recipe.data
    assert adapter is not None
    assert (adapter.kind, adapter.rank, adapter.alpha, adapter.targets) == ("lora", 16, 1, "conv")
    assert (adapter.conv_rank, adapter.conv_alpha, adapter.rank_dropout) == (8, 4, 0.1)
    assert adapter.text_encoder  # sd-scripts train it unless told otherwise
    assert [(Path(one.folder).name, one.repeats, one.prompt, one.loss_weight) for one in data.sets] == [
        ("10_sks dog", 10, "sks dog", 1.0),
        ("5_cat", 5, "cat", 1.0),
        ("1_dog", 1, "dog", 0.5),
    ]
    assert (train.micro_batch, train.global_batch, train.precision) == (2, 6, "bf16")
    assert train.steps == 4 * 7  # 41 pictures, 7 batches of 6 an epoch
    assert (optim.lr, optim.unet_lr, optim.text_encoder_lr, optim.text_encoder_2_lr) == (
        1e-4,
        2e-4,
        5e-5,
        1e-5,
    )
    assert (optim.name, optim.decay, optim.warmup_steps) == ("adamw8bit", "cosine", 7)
    assert (optim.weight_decay, optim.beta2) == (0.05, 0.99)
    assert (data.resolution, data.buckets, data.clip_skip, data.max_token_length) == (512, True, 1, 225)
    assert (data.shuffle_tags, data.keep_tokens) == (True, 1)
    assert (data.augment.hue, data.augment.share) == (0.045, 0.33)
    objective = recipe.objective
    assert (objective.loss.type, objective.timesteps.min, objective.timesteps.max) == ("smooth-l1", 10, 900)
    assert objective.noise.model_dump(exclude_defaults=True) == {
        "offset": 0.05,
        "multires_iterations": 6,
        "perturbation": 0.1,
    }
    left_out = next(line for line in recipe.derived if line.startswith("not known here and left out: "))
    assert left_out.split(": ")[1] == "network_args preset, optimizer_args momentum"


def test_optimisers_and_their_arguments_are_read(tmp_path: Path) -> None:
    def optim(name: str, *arguments: str) -> dict[str, Any]:
        told = ", ".join(f'"{one}"' for one in arguments)
        text = (
            f'pretrained_model_name_or_path = "sd15"\noptimizer_type = "{name}"\noptimizer_args = [{told}]\n'
        )
        (tmp_path / "10_a dog").mkdir(exist_ok=True)
        recipe = read(
            tmp_path, f'{text}learning_rate = 1e-4\ntrain_data_dir = "{tmp_path}"\n', *RATE.get(name, ())
        )
        assert not any("left out" in line for line in recipe.derived), recipe.derived
        return recipe.optim.model_dump()

    RATE = {"Prodigy": ("optim.lr=1",)}
    lion = optim("Lion", "betas=0.95,0.98")
    assert (lion["name"], lion["lr"], lion["beta1"], lion["beta2"], lion["weight_decay"]) == (
        *("lion", 1e-4, 0.95, 0.98),
        0.0,
    )
    came = optim("pytorch_optimizer.CAME", "betas=(0.9,0.99,0.999)", "weight_decay=0.02")
    assert (came["name"], came["beta3"], came["weight_decay"]) == ("came", 0.999, 0.02)
    absolute = optim("AdaFactor", "scale_parameter=False", "relative_step=False", "warmup_init=False")
    assert (absolute["name"], absolute["scale_parameter"], absolute["lr"]) == ("adafactor", False, 1e-4)
    prodigy = optim(
        "Prodigy", "decouple=True", "d_coef=2", "use_bias_correction=True", "safeguard_warmup=True"
    )
    assert (prodigy["d_coef"], prodigy["use_bias_correction"]) == (2.0, True)


def test_a_state_folder_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """A LoRA's state as accelerate writes it: what is safe of it is begun with, pickles are left alone."""
    state = tmp_path / "mine-step00000300-state"
    state.mkdir()
    (state / "optimizer.bin").write_bytes(b"a pickle")
    (state / "train_state.json").write_text('{"current_epoch": 2, "current_step": 300}')
    stem = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors = {f"{stem}.lora_down.weight": torch.zeros(2, 8), f"{stem}.lora_up.weight": torch.zeros(8, 2)}
    save_file({**tensors, f"{stem}.alpha": torch.tensor(1.0)}, state / "model.safetensors")
    text = f'pretrained_model_name_or_path = "sd15"\nresume = "{state.name}"\n'
    told = r"optimiser is pickled .*; begin with its weights: adapter.from=.*safetensors, .*the 300"
    with pytest.raises(
        RecipeError, match=rf"^resume: '.*-state' is another trainer's state, whose {told}"
    ) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
    given = make_recipe({"task": "lora", "model": {"base": "tiny"}, "data": {"folder": str(tmp_path)}})
    with pytest.raises(RecipeError, match=rf"^--resume: .* whose {told}"):
        train(given, out=tmp_path / "run", resume=str(state), console=lambda _: None)
    (state / "model.safetensors").unlink()
    with pytest.raises(RecipeError, match=r"save the weights there as a model, and set model.base to it"):
        read(tmp_path, text)
    (state / "optimizer.bin").unlink()
    with pytest.raises(RecipeError, match=r"resume: '.*' is no folder of a state"):
        read(tmp_path, text)


def test_a_dataset_file_says_the_sets(tmp_path: Path, folders: dict[str, str]) -> None:
    dataset = """
[general]
shuffle_caption = true
caption_extension = ".txt"

[[datasets]]
resolution = 512
batch_size = 4
enable_bucket = true

  [[datasets.subsets]]
  image_dir = "a"
  num_repeats = 3

[[datasets]]
resolution = [256, 256]
batch_size = 4
  [[datasets.subsets]]
  image_dir = "b"
  class_tokens = "a dog"
  is_reg = true
  face_crop_aug_range = "1,2"
"""
    (tmp_path / "data.toml").write_text(dataset)
    text = 'pretrained_model_name_or_path = "sd15"\ndataset_config = "data.toml"\nprior_loss_weight = 0.3\n'
    recipe = read(tmp_path, text)
    assert recipe.task == "finetune"
    assert [one.model_dump(exclude_defaults=True) for one in recipe.data.sets] == [
        {"folder": "a", "repeats": 3, "resolution": 512},
        {"folder": "b", "prompt": "a dog", "loss_weight": 0.3, "resolution": 256},
    ]
    assert (recipe.data.resolution, recipe.train.global_batch, recipe.train.steps) == (512, 4, 1600)
    assert recipe.data.shuffle_tags
    assert any("dataset_config face_crop_aug_range" in line for line in recipe.derived)
    (tmp_path / "data.toml").write_text(dataset.replace("batch_size = 4\n  [[", "batch_size = 2\n  [["))
    with pytest.raises(RecipeError, match="batch_size is 4 and 2; allowed: one for all subsets"):
        read(tmp_path, text)


def test_sample_prompts_keep_their_own_settings(tmp_path: Path) -> None:
    lines = ("# mine", "a dog --n blurry, dark --d 7 --s 12 --l 4.5 --w 768", "", "a cat")
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    text = 'pretrained_model_name_or_path = "sd15"\nsample_prompts = "prompts.txt"\n'
    recipe = read(tmp_path, text, "data.folder=pictures")
    first, second = recipe.sample.prompts
    assert second == "a cat"
    assert not isinstance(first, str)
    assert first.model_dump(exclude_none=True) == {
        "prompt": "a dog",
        "negative": "blurry, dark",
        "seed": 7,
        "steps": 12,
        "guidance": 4.5,
    }
    assert any("sample_prompts --w" in line for line in recipe.derived)


def test_a_json_of_captions_is_a_sets(tmp_path: Path) -> None:
    text = 'pretrained_model_name_or_path = "sd15"\ntrain_data_dir = "pictures"\nin_json = "meta.json"\n'
    (one,) = read(tmp_path, text).data.sets
    assert one.model_dump(exclude_defaults=True) == {"folder": "pictures", "captions": "meta.json"}


def test_sd_scripts_own_defaults_hold(tmp_path: Path, folders: dict[str, str]) -> None:
    text = f"""
pretrained_model_name_or_path = "sd15"
train_data_dir = "{folders["pictures"]}"
network_module = "networks.lora"
network_train_unet_only = true
"""
    recipe = read(tmp_path, text, "train.seed=7")
    assert recipe.adapter is not None
    assert (recipe.adapter.rank, recipe.adapter.alpha, recipe.adapter.text_encoder) == (4, 1, False)
    assert recipe.adapter.targets == ("*attentions.*",)
    assert (recipe.train.steps, recipe.train.global_batch, recipe.train.seed) == (1600, 1, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('optimizer_type = "DAdaptSGD"', "optimizer_type: 'DAdaptSGD' is not known here; allowed: adamw, "),
        ('lr_scheduler = "polynomial"', "lr_scheduler: 'polynomial' is not known here"),
        ('resolution = "512,768"', "resolution: 512,768: width and height differ"),
        ('network_module = "networks.dylora"', "network_module: 'networks.dylora'; allowed: networks.lora"),
        ('train_data_dir = "nowhere"', "train_data_dir: no folder 'nowhere'"),
        ("= broken", "not readable as TOML"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        read(tmp_path, f'pretrained_model_name_or_path = "sd15"\n{text}\n')
    assert "\n" not in str(caught.value)


def test_every_option_of_the_table_is_a_key_of_a_recipe() -> None:
    known = {one.key for one in find_keys()}
    for name, option in [*TABLE.items(), *NETWORK.items()]:
        assert option.key in known, name


def test_the_docs_have_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text("utf-8")
    assert table() in page
    assert all(f"`{name}`" in page for name in SEVERAL)


def test_the_command_line_names_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "kohya.toml").write_text('pretrained_model_name_or_path = "sd15"\n')
    result: Any = CliRunner().invoke(app, ["train", str(tmp_path / "kohya.toml"), "--from", "onetrainer"])
    assert result.exit_code != 0
    assert "--from: 'onetrainer'; allowed: kohya" in str(result.exception) + result.output
