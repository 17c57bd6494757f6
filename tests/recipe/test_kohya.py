"""TOML files of kohya's sd-scripts, read as recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from darkroom import models
from darkroom.cli import app
from darkroom.errors import RecipeError
from darkroom.recipe import Recipe, make_recipe
from darkroom.recipe.kohya_options import (
    ATTENTIONS,
    BLOCKS,
    ENDS,
    NETWORK,
    PRESETS,
    SEVERAL,
    TABLE,
    TEXT,
    TIMES,
    table,
)
from darkroom.recipe.objective import LossSettings
from darkroom.recipe.recipe import read_sweep
from darkroom.recipe.reference import find_keys
from darkroom.train.run import train
from darkroom.train.tasks.lora import target_layers

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
    assert (adapter.kind, adapter.rank, adapter.alpha) == ("lora", 16, 1)
    assert adapter.targets == (*BLOCKS, *ENDS, *TIMES, *TEXT)  # of LyCORIS' preset full
    assert (adapter.conv_rank, adapter.conv_alpha, adapter.rank_dropout) == (8, 4, 0.1)
    assert adapter.text_encoder  # sd-scripts train it unless told otherwise
    assert [(Path(one.folder).name, one.repeats, one.prompt, one.loss_weight) for one in data.sets] == [
        ("10_sks dog", 10, "sks dog", 1.0),
        ("5_cat", 5, "cat", 1.0),
        ("1_dog", 40, "dog", 0.5),
    ]
    assert (train.micro_batch, train.global_batch, train.precision) == (2, 6, "bf16")
    assert train.steps == 4 * 14  # 40 pictures and as many of the class: 14 batches of 6 an epoch
    assert (optim.lr, optim.unet_lr, optim.text_encoder_lr, optim.text_encoder_2_lr) == (
        1e-4,
        2e-4,
        5e-5,
        1e-5,
    )
    assert (optim.name, optim.lr_schedule, optim.warmup_steps) == ("adamw8bit", "cosine", 14)
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
    assert left_out.split(": ")[1] == "optimizer_args momentum"


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
    assert absolute["weight_decay"] == 0.0
    relative = optim("AdaFactor")  # sd-scripts pass learning_rate by
    assert (relative["scale_parameter"], relative["lr"], relative["lr_schedule"]) == (True, 1e-2, "constant")
    prodigy = optim("Prodigy", "decouple=True", "d_coef=2", "use_bias_correction=True")
    assert (prodigy["d_coef"], prodigy["use_bias_correction"]) == (2.0, True)


def test_noises_weights_and_epochs_are_read(tmp_path: Path, folders: dict[str, str]) -> None:
    text = f"""pretrained_model_name_or_path = "sd15"
train_data_dir = "{folders["pictures"]}"
network_module = "networks.lora"
train_batch_size = 4
max_train_epochs = 2
save_every_n_epochs = 1
sample_every_n_epochs = 3
sample_every_n_steps = 7
caption_dropout_rate = 0.2
caption_dropout_every_n_epochs = 4
keep_tokens_separator = "|||"
secondary_separator = ";;;"
noise_offset = 0.05
noise_offset_random_strength = true
adaptive_noise_scale = 0.01
ip_noise_gamma_random_strength = true
multires_noise_iterations = 0
multires_noise_discount = 0
huber_c = 0.3
huber_schedule = "exponential"
keep_tokens = 2
token_warmup_min = 3
min_snr_gamma = 0
scale_v_pred_loss_like_noise_pred = true
v_parameterization = true
scale_weight_norms = 1
lr_scheduler = "cosine_with_restarts"
lr_scheduler_num_cycles = 3
lr_scheduler_power = 2
network_train_text_encoder_only = true
"""
    recipe = read(tmp_path, text)
    epoch = 10  # 3 dogs ten times and 2 cats five times, in batches of 4
    assert (recipe.train.steps, recipe.checkpoint.every, recipe.sample.every) == (2 * epoch, epoch, 7)
    data, noise, optim = recipe.data, recipe.objective.noise, recipe.optim
    assert data.caption_dropout == pytest.approx(1 - 0.8 * 0.75)
    assert (data.keep_tokens_separator, data.secondary_separator) == ("|||", ";;;")
    assert (noise.offset, noise.offset_random_strength, noise.adaptive_scale) == (0.05, True, 0.01)
    assert (noise.perturbation, noise.perturbation_random_strength) == (0, False)  # passed by there too
    assert recipe.objective.loss == LossSettings()  # so are these, without what they belong to
    assert (data.keep_tokens, data.token_warmup_min) == (0, 1)
    shuffled = read(tmp_path, text + 'shuffle_caption = true\nloss_type = "huber"\n')
    assert (shuffled.data.keep_tokens, shuffled.objective.loss.huber_c) == (2, 0.3)
    assert recipe.objective.min_snr_gamma is None
    assert recipe.objective.scale_v_pred_loss_like_noise_pred
    assert recipe.adapter is not None
    assert recipe.adapter.scale_weight_norms == 1
    assert (optim.lr_schedule, optim.num_cycles, optim.power) == ("cosine-with-restarts", 3, 1)
    assert [(rule.match, rule.lr_scale) for rule in optim.layers] == [("unet", 0)]
    plain = read(tmp_path, text.replace("cosine_with_restarts", "constant"))
    assert (plain.optim.lr_schedule, plain.optim.num_cycles) == ("constant", 1)


def sd_scripts_block(layer: str) -> int:
    """get_block_index of sd-scripts' networks/lora.py, of a layer's name here."""
    name = "lora_unet_" + layer.replace(".", "_")
    if found := re.search(
        r"(up|down)_blocks_(\d+)_(resnets|upsamplers|downsamplers|attentions)_(\d+)_", name
    ):
        side, i, kind, j = found[1], int(found[2]), found[3], int(found[4])
        inner = 3 * i + (2 if kind.endswith("samplers") else j)
        return 1 + inner if side == "down" else 13 + inner
    return 12 if "mid_block_" in name else -1


@pytest.mark.parametrize("kernels", [False, True])
def test_rates_and_ranks_by_block_are_sd_scripts(tmp_path: Path, kernels: bool) -> None:
    down, up = [round(0.1 * i, 1) for i in range(12)], [round(2 + 0.1 * i, 1) for i in range(12)]
    dims = list(range(2, 27))
    weights = [*down, 1.5, *up]
    arguments = [f"down_lr_weight={','.join(map(str, down))}", "mid_lr_weight=1.5"]
    arguments += [f"up_lr_weight={','.join(map(str, up))}", f"block_dims={','.join(map(str, dims))}"]
    arguments += ["conv_dim=40"] if kernels else []
    recipe = read(
        tmp_path,
        'pretrained_model_name_or_path = "sd15"\nnetwork_module = "networks.lora"\nnetwork_dim = 99\n'
        f"network_args = {arguments}\n",
        "data.folder=pictures",
    )
    assert recipe.adapter is not None
    unet = models.create("sd15", parts=("unet",), device="meta").unet
    assert unet is not None
    layers = target_layers("unet", unet, recipe.adapter.targets)
    assert len(layers) > 100
    rank_of = recipe.adapter.rank_of
    for layer in layers:
        block = sd_scripts_block(layer)
        name = f"unet.{layer}.lora_A.default.weight"
        rule = next((rule for rule in recipe.optim.layers if rule.holds_for(name)), None)
        assert (1.0 if rule is None else rule.lr_scale) == (weights[block] if block >= 0 else 1), layer
        kernel = layer.rpartition(".")[2] in ("conv", "conv1", "conv2")
        assert rank_of(f"unet.{layer}") == (40 if kernel else dims[block]), layer
    assert rank_of("text_encoder.layers.0.mlp.fc1") == 99


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


def test_a_dataset_file_may_be_json(tmp_path: Path) -> None:
    """sd-scripts read either, by the ending."""
    content = {
        "general": {"shuffle_caption": True},
        "datasets": [{"resolution": 512, "batch_size": 4, "subsets": [{"image_dir": "a", "num_repeats": 3}]}],
    }
    (tmp_path / "data.json").write_text(json.dumps(content))
    text = 'pretrained_model_name_or_path = "sd15"\ndataset_config = "data.json"\n'
    recipe = read(tmp_path, text)
    assert [one.model_dump(exclude_defaults=True) for one in recipe.data.sets] == [
        {"folder": "a", "repeats": 3, "resolution": 512}
    ]
    assert (recipe.data.shuffle_tags, recipe.train.global_batch) == (True, 4)
    for broken, message in (("{", "not readable as JSON"), ("[1]", "not a table of options")):
        (tmp_path / "data.json").write_text(broken)
        with pytest.raises(RecipeError, match=message):
            read(tmp_path, text)


def test_files_are_found_beside_the_toml_and_from_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sd-scripts find them from where they are started; beside the TOML they are found first."""
    (tmp_path / "settings").mkdir()
    sets = '[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = "{}"\n'
    (tmp_path / "settings" / "data.toml").write_text(sets.format("there"))
    (tmp_path / "settings" / "prompts.txt").write_text("a dog")
    monkeypatch.chdir(tmp_path)
    text = (
        'pretrained_model_name_or_path = "sd15"\n'
        'dataset_config = "settings/data.toml"\nsample_prompts = "settings/prompts.txt"\n'
    )
    recipe = read(tmp_path / "settings", text)
    assert ([one.folder for one in recipe.data.sets], recipe.sample.prompts) == (["there"], ("a dog",))
    (tmp_path / "settings" / "settings").mkdir()
    (tmp_path / "settings" / "settings" / "data.toml").write_text(sets.format("beside"))
    assert [one.folder for one in read(tmp_path / "settings", text).data.sets] == ["beside"]
    with pytest.raises(RecipeError, match=r"nowhere\.toml"):
        read(tmp_path, 'dataset_config = "nowhere.toml"\n')


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_sample_prompts_of_toml_and_json_keep_their_settings(tmp_path: Path, ending: str) -> None:
    tables = """
[prompt]
width = 512
scale = 5.5
[[prompt.subset]]
prompt = "a dog"
negative_prompt = "blurry"
seed = 7
sample_steps = 12
[[prompt.subset]]
prompt = "a cat"
scale = 3
"""
    dog = {"prompt": "a dog", "negative_prompt": "blurry", "seed": 7, "sample_steps": 12, "scale": 5.5}
    listed = json.dumps([dog | {"width": 512}, "a cat --l 3"])
    (tmp_path / f"prompts.{ending}").write_text(tables if ending == "toml" else listed)
    text = f'pretrained_model_name_or_path = "sd15"\nsample_prompts = "prompts.{ending}"\n'
    recipe = read(tmp_path, text, "data.folder=pictures")
    own = [one.model_dump(exclude_none=True) for one in recipe.sample.prompts if not isinstance(one, str)]
    assert own == [
        {"prompt": "a dog", "negative": "blurry", "seed": 7, "steps": 12, "guidance": 5.5},
        {"prompt": "a cat", "guidance": 3.0},
    ]
    assert any("sample_prompts width" in line for line in recipe.derived)
    broken_files = {
        "toml": ("prompt = 5", "[prompt]\nsubset = [5]", "[[prompt.subset]]\nseed = 1"),
        "json": ("{}", "[5]", '[{"prompt": "a", "seed": "x"}]'),
    }
    for broken in broken_files[ending]:
        (tmp_path / f"prompts.{ending}").write_text(broken)
        with pytest.raises(RecipeError, match="sample_prompts"):
            read(tmp_path, text, "data.folder=pictures")


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


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("a dog --s many", "--s: 'many'"),
        ("a dog --d 1.5", "--d: '1.5'"),
        (f"a dog --d {'9' * 5000}", "--d: '999"),
        ("a dog --l nan", "--l: 'nan'"),
        ("a dog --s 0", "--s: '0'; allowed: a whole number, at least 1"),
        ("a dog --d -1", "--d: '-1'"),
    ],
)
def test_a_prompts_own_setting_that_is_no_number_is_one_line(tmp_path: Path, line: str, named: str) -> None:
    (tmp_path / "prompts.txt").write_text(line)
    text = 'pretrained_model_name_or_path = "sd15"\nsample_prompts = "prompts.txt"\n'
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, text, "data.folder=pictures")
    assert named in str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_file_of_prompts_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes("a café".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"prompts.txt' is not UTF-8 at byte 5"):
        read(tmp_path, 'sample_prompts = "prompts.txt"\n', "data.folder=pictures")
    (tmp_path / "prompts.txt").write_text("a café", encoding="utf-8-sig")
    text = 'pretrained_model_name_or_path = "sd15"\nsample_prompts = "prompts.txt"\n'
    assert read(tmp_path, text, "data.folder=pictures").sample.prompts == ("a café",)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('train_batch_size = "many"', "train_batch_size: 'many'; allowed: a whole number, at least 1"),
        ("gradient_accumulation_steps = 0", "gradient_accumulation_steps"),
        ("max_train_epochs = 1.5", "max_train_epochs"),
        ("max_train_epochs = [1]", "max_train_epochs"),
        ('lr_warmup_steps = "soon"', "lr_warmup_steps"),
        ("prior_loss_weight = nan", "prior_loss_weight"),
        ('resolution = "large"', "resolution"),
        ('clip_skip = "x"', "clip_skip"),
        ("network_dim = [4]", "network_dim"),
        ("learning_rate = {learning_rate = {a = 1}}", "optim"),
        ("optimizer_args = 5", "optimizer_args"),
        ('max_data_loader_n_workers = "x"', "max_data_loader_n_workers"),
        ('caption_dropout_every_n_epochs = "x"', "caption_dropout_every_n_epochs"),
        ('lr_scheduler_num_cycles = "x"', "lr_scheduler_num_cycles: 'x'"),
        ('lr_scheduler_power = "x"', "lr_scheduler_power: 'x'"),
        ('max_token_length = "x"', "max_token_length: 'x'"),
        ('network_args = ["conv_dim=x"]', "network_args conv_dim: 'x'"),
        ('network_args = ["conv_dim=4", "conv_alpha=x"]', "network_args conv_alpha: 'x'"),
        ('network_args = ["rank_dropout=x"]', "network_args rank_dropout: 'x'"),
        ('network_args = ["module_dropout=x"]', "network_args module_dropout: 'x'"),
        ('network_args = ["loraplus_lr_ratio=x"]', "network_args loraplus_lr_ratio: 'x'"),
        ('network_args = ["factor=x"]', "network_args factor: 'x'"),
    ],
)
def test_an_option_of_another_type_is_one_line(tmp_path: Path, line: str, named: str) -> None:
    text = f'network_module = "networks.lora"\npretrained_model_name_or_path = "sd15"\n{line}\n'
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, text, "data.folder=pictures")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "sets", ["general = 5", "datasets = 5", "datasets = [5]", "[[datasets]]\nsubsets = {}"]
)
def test_a_data_sets_file_of_another_shape_is_one_line(tmp_path: Path, sets: str) -> None:
    (tmp_path / "sets.toml").write_text(sets)
    text = 'pretrained_model_name_or_path = "sd15"\ndataset_config = "sets.toml"\n'
    with pytest.raises(RecipeError, match="dataset_config: .* is no table"):
        read(tmp_path, text)


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
    assert recipe.optim.lr == 2e-6


BASE = 'pretrained_model_name_or_path = "{base}"\nlearning_rate = 1e-4\n'


def network(path: Path, module: str, *arguments: str, more: str = "", base: str = "sd15") -> Recipe:
    quoted = ", ".join(f'"{one}"' for one in arguments)
    text = f'{BASE.format(base=base)}network_module = "{module}"\nnetwork_args = [{quoted}]\n{more}\n'
    return read(path, text, "data.folder=pictures")


def adapter_read(path: Path, *given: str, **more: str) -> dict[str, Any]:
    found = network(path, *given, **more).adapter
    assert found is not None
    return found.model_dump()


def test_convolutions_scale_as_each_network_module_has_it(tmp_path: Path) -> None:
    """alpha / rank of convolutions: sd-scripts' own alpha is 1, LyCORIS' that of the linear layers."""
    plain = network(
        tmp_path, "networks.lora", "conv_dim=8", more="network_dim = 16\nnetwork_alpha = 4"
    ).adapter
    lycoris = network(
        tmp_path, "lycoris.kohya", "conv_dim=8", more="network_dim = 16\nnetwork_alpha = 4"
    ).adapter
    without = network(tmp_path, "lycoris.kohya", more="network_dim = 16\nnetwork_alpha = 4").adapter
    assert plain is not None
    assert lycoris is not None
    assert without is not None
    kernel, linear = "unet.up_blocks.0.resnets.0.conv1", "unet.up_blocks.0.attentions.0.proj_in"
    assert [one.scale_of(kernel) for one in (plain, lycoris, without)] == [1 / 8, 4 / 8, 4 / 16]
    assert [one.scale_of(linear) for one in (plain, lycoris, without)] == [4 / 16] * 3
    assert (plain.targets, without.targets) == ("conv", (*BLOCKS, *ENDS, *TIMES, *TEXT))


def test_lycoris_presets_choose_the_layers(tmp_path: Path) -> None:
    linear = adapter_read(tmp_path, "lycoris.kohya", "preset=attn-mlp", "conv_dim=8")
    assert (linear["targets"], linear["conv_rank"]) == ((ATTENTIONS, *TEXT), None)
    alone = adapter_read(tmp_path, "lycoris.kohya", "preset=unet-only")
    assert (alone["targets"], alone["text_encoder"]) == ((*BLOCKS, *ENDS, *TIMES), False)
    large = adapter_read(tmp_path, "lycoris.kohya", base="stabilityai/stable-diffusion-xl-base-1.0")
    assert large["targets"] == (*BLOCKS, *TEXT)
    with pytest.raises(RecipeError, match=r"network_args preset: 'mine.toml'; allowed: full, full-lin"):
        network(tmp_path, "lycoris.kohya", "preset=mine.toml")


@pytest.mark.parametrize(
    ("base", "attentions", "full", "text"), [("sd15", 192, 278, (72,)), ("sdxl", 722, 788, (72, 192))]
)
def test_the_layers_are_as_many_as_sd_scripts_log(
    base: str, attentions: int, full: int, text: tuple[int, ...]
) -> None:
    """`create LoRA for U-Net: 192 modules`, and so on; LyCORIS' outer layers are four more."""
    model = models.create(base, parts=("unet", "text_encoder"), device="meta")
    found = {
        name: {
            part: len(target_layers(part, module, (*unet, *of_text)))
            for part, module in model.modules.items()
        }
        for name, (unet, of_text) in PRESETS.items()
    }
    assert (found["attn-mlp"]["unet"], found["full"]["unet"]) == (attentions, full + 4)
    assert tuple(found["full"].values())[1:] == text
    assert not any(tuple(found["unet-only"].values())[1:])
    for unet, of_text in PRESETS.values():
        for pattern in (*unet, *of_text):
            assert any(target_layers(part, one, (pattern,)) for part, one in model.modules.items()), pattern


def test_lokr_of_whole_matrices_is_read(tmp_path: Path) -> None:
    for arguments, dim in ((("algo=lokr", "full_matrix=True"), 8), (("algo=lokr", "factor=8"), 100_000)):
        assert (
            adapter_read(tmp_path, "lycoris.kohya", *arguments, more=f"network_dim = {dim}")["rank"] == 4096
        )
    assert adapter_read(tmp_path, "lycoris.kohya", "algo=lokr", more="network_dim = 8")["rank"] == 8


def test_a_text_encoder_of_rate_0_is_not_trained(tmp_path: Path) -> None:
    none = network(tmp_path, "networks.lora", more="text_encoder_lr = 0")
    assert none.adapter is not None
    assert (none.adapter.text_encoder, none.adapter.targets) == (False, (ATTENTIONS,))
    first = network(tmp_path, "networks.lora", more="text_encoder_lr = [5e-5, 0]")
    assert first.adapter is not None
    assert (first.adapter.text_encoder, first.optim.text_encoder_lr) == (True, 5e-5)
    assert [(rule.match, rule.lr_scale) for rule in first.optim.layers] == [("text_encoder_2", 0.0)]
    text = (
        BASE.format(base="sdxl")
        + "train_text_encoder = true\nlearning_rate_te1 = 0\nlearning_rate_te2 = 1e-6"
    )
    whole = read(tmp_path, text, "data.folder=pictures")
    assert (whole.model.train_text_encoder, whole.optim.text_encoder_2_lr) == (True, 1e-6)
    assert [rule.match for rule in whole.optim.layers] == ["text_encoder"]
    assert not read(tmp_path, BASE.format(base="sdxl"), "data.folder=pictures").model.train_text_encoder


def test_clip_skip_is_not_read_for_sdxl(tmp_path: Path) -> None:
    """sd-scripts' SDXL trainers always take the last layer but one."""
    header = b'{"conditioner.embedders.1.model.ln_final.bias": {}}'
    (tmp_path / "mine.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for base, layers in (("sd15", 1), ("sdxl", 0), (str(tmp_path / "mine.safetensors"), 0), ("me/mine", 1)):
        recipe = read(tmp_path, BASE.format(base=base) + "clip_skip = 2", "data.folder=pictures")
        assert recipe.data.clip_skip == layers, base
        assert any("clip_skip" in line for line in recipe.derived) == (base != "sd15"), base


def test_a_prefix_stands_apart(tmp_path: Path) -> None:
    text = BASE.format(base="sd15") + 'caption_prefix = "photo of"\ncaption_suffix = "at night"'
    data = read(tmp_path, text, "data.folder=pictures").data
    assert (data.caption_prefix, data.caption_suffix) == ("photo of ", " at night")


def test_more_class_pictures_than_others_come_no_more_often(tmp_path: Path, folders: dict[str, str]) -> None:
    """50 times the class: the subject's repeats grow instead. An epoch is both, once."""
    for i in range(1, 100):
        Image.new("RGB", (8, 8)).save(Path(folders["others"]) / "1_dog" / f"{i}.png")
    sets = 'train_data_dir = "{pictures}"\nreg_data_dir = "{others}"\nmax_train_epochs = 1\n'.format(
        **folders
    )
    recipe = read(tmp_path, BASE.format(base="sd15") + sets)
    assert [one.repeats for one in recipe.data.sets] == [50, 25, 2]  # 3 * 50 + 2 * 25 = 100 * 2
    assert recipe.train.steps == 80


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('optimizer_type = "DAdaptSGD"', "optimizer_type: 'DAdaptSGD' is not known here; allowed: adamw, "),
        ('lr_scheduler = "piecewise_constant"', "lr_scheduler: 'piecewise_constant' is not known here"),
        ('resolution = "512,768"', "resolution: 512,768: width and height differ"),
        ('network_module = "networks.dylora"', "network_module: 'networks.dylora'; allowed: networks.lora"),
        (
            'network_module = "networks.oft"',
            "network_module: 'networks.oft', whose network_dim is a number of",
        ),
        ('optimizer_args = ["eps=1,2"]', "optimizer_args eps: '1,2'; allowed: a number"),
        ('train_data_dir = "nowhere"', "train_data_dir: no folder 'nowhere'"),
        ("= broken", "not readable as TOML"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        read(tmp_path, f'pretrained_model_name_or_path = "sd15"\n{text}\n')
    assert "\n" not in str(caught.value)


def test_blocks_to_swap_are_read_and_refused_where_the_unet_is_trained(
    tmp_path: Path, folders: dict[str, str]
) -> None:
    swaps = "blocks_to_swap = 18\n"
    assert read(tmp_path, LORA.format(**folders) + swaps).train.blocks_to_swap == 18
    assert read(tmp_path, LORA.format(**folders)).train.blocks_to_swap == 0
    plain = f'pretrained_model_name_or_path = "sd15"\ntrain_data_dir = "{folders["pictures"]}"\n{swaps}'
    with pytest.raises(RecipeError, match="blocks_to_swap: 18 with the task finetune"):
        read(tmp_path, plain)


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


def test_a_file_may_begin_with_windows_mark(tmp_path: Path, folders: dict[str, str]) -> None:
    plain = read(tmp_path, LORA.format(**folders))
    (tmp_path / "kohya.toml").write_bytes(LORA.format(**folders).replace("\n", "\r\n").encode("utf-8-sig"))
    assert read_sweep(tmp_path / "kohya.toml", (), of="kohya")[0][1] == plain
