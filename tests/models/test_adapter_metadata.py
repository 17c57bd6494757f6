"""PEFT's configurations: patterns of alphas and ranks as peft reads them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from darkroom import models
from darkroom.errors import ModelError
from darkroom.models.adapters.read import merge, read_adapter

TARGETS = {
    "unet": ["attn1.to_q", "attn2.to_k", "to_out.0", "resnets.0.conv1"],
    "text_encoder": ["q_proj", "fc1"],
}
PATTERNS: dict[str, dict[str, dict[str, Any]]] = {
    "unet": {
        "rank_pattern": {r"down_blocks\.\d+\..*to_q": 2, "conv1": 3},
        "alpha_pattern": {
            r"^down_blocks.0.resnets.0.conv1": 5,  # the first that matches holds
            r".*\.conv1": 7,
            r"attentions\.[01]\.transformer_blocks\.0\.attn1\.to_(q|k)": 9,
            "attn2.to_k": 1,
        },
    },
    "text_encoder": {
        "rank_pattern": {r"layers\.0\..*": 2},
        "alpha_pattern": {r"layers\.[1-9]\.mlp\.fc1": 3, "q_proj": 6},
    },
}


def trained(part: str, folder: Path, **config: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder that peft itself wrote, and the weights of the same part that peft merged."""
    torch.manual_seed(3)
    told: dict[str, Any] = {"r": 4, "lora_alpha": 2, "target_modules": TARGETS[part], **config}
    theirs = peft.get_peft_model(
        models.create("tiny", seed=1).modules[part], peft.LoraConfig(init_lora_weights=False, **told)
    )
    theirs.save_pretrained(str(folder))
    # Read again: peft writes patterns sorted, and where two match the first in the file holds.
    again = peft.PeftModel.from_pretrained(models.create("tiny", seed=1).modules[part], str(folder))
    return folder, again.merge_and_unload().state_dict()


def furthest(part: str, folder: Path, expected: dict[str, torch.Tensor]) -> float:
    """How far our merged weights are from peft's, at most."""
    ours = models.create("tiny", seed=1)
    merge(ours, read_adapter(folder))
    mine = ours.modules[part].state_dict()
    return max(float((mine[name] - weight).abs().max()) for name, weight in expected.items())


@pytest.mark.parametrize(("part", "stabilised"), [("unet", False), ("text_encoder", True)])
def test_patterns_are_regular_expressions_as_peft_merges_them(
    part: str, stabilised: bool, tmp_path: Path
) -> None:
    folder, expected = trained(part, tmp_path, use_rslora=stabilised, **PATTERNS[part])
    assert furthest(part, folder, expected) < 1e-5
    file = folder / "adapter_config.json"
    told = json.loads(file.read_text())
    file.write_text(json.dumps({**told, "alpha_pattern": {}}))
    assert furthest(part, folder, expected) > 0.05


@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_patterns_in_diffusers_header_are_read_alike(part: str, tmp_path: Path) -> None:
    folder, expected = trained(part, tmp_path, **PATTERNS[part])
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors = {key.replace("base_model.model", part): t for key, t in tensors.items()}
    header = {"lora_adapter_metadata": json.dumps({f"{part}.{key}": value for key, value in config.items()})}
    save_file(tensors, tmp_path / "a.safetensors", metadata=header)
    assert furthest(part, tmp_path / "a.safetensors", expected) < 1e-5
    other = {"unet": "text_encoder", "text_encoder": "unet"}[part]
    save_file(tensors, tmp_path / "b.safetensors", metadata={"lora_adapter_metadata": json.dumps(
        {f"{other}.lora_alpha": 2, f"{other}.use_rslora": True}
    )})  # fmt: skip
    assert furthest(part, tmp_path / "b.safetensors", expected) > 0.05


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_goes_with_a_changed_base_is_refused_until_it_is_converted(
    start: str, tmp_path: Path
) -> None:
    """Added to the base as it is, it would draw something else than PEFT does, without a word."""
    torch.manual_seed(2)
    unet = models.create("tiny", seed=1).unet
    config = peft.LoraConfig(r=4, lora_alpha=4, init_lora_weights=start, target_modules=["attn1.to_q"])
    theirs = peft.get_peft_model(unet, config)
    theirs.peft_config["default"].init_lora_weights = True  # as PEFT's guide has it
    theirs.save_pretrained(str(tmp_path / "begun"))
    theirs.peft_config["default"].init_lora_weights = start
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "lora_B" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    theirs.save_pretrained(str(tmp_path / "plain"))
    with pytest.raises(ModelError, match=f"init_lora_weights '{start}'"):
        read_adapter(tmp_path / "plain")
    theirs.save_pretrained(
        str(tmp_path / "converted"), path_initial_model_for_weight_conversion=str(tmp_path / "begun")
    )
    expected = theirs.merge_and_unload().state_dict()
    assert furthest("unet", tmp_path / "converted", expected) < 1e-4
    file = tmp_path / "plain" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "init_lora_weights": True}))
    assert furthest("unet", tmp_path / "plain", expected) > 0.05


def test_an_alpha_that_is_not_said_is_pefts_own(tmp_path: Path) -> None:
    folder, expected = trained("unet", tmp_path, lora_alpha=8)
    file = folder / "adapter_config.json"
    told = json.loads(file.read_text())
    assert told.pop("lora_alpha") == 8
    file.write_text(json.dumps(told))
    assert furthest("unet", folder, expected) < 1e-5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"alpha_pattern": {"attn1.to_q": 2, "atn1.to_q": 9}},
            "'atn1.to_q' of alpha_pattern matches no layer",
        ),
        ({"rank_pattern": {"to_qq": 9}}, "'to_qq' of rank_pattern matches no layer"),
        ({"alpha_pattern": {"^.*evil(": 9}}, r"'\^\.\*evil\(' of alpha_pattern"),
        ({"alpha_pattern": {"(((a?){999}){999}){999}": 9}}, "too long"),
        ({"alpha_pattern": {"a" * 600: 9}}, "too long"),
        ({"alpha_pattern": {"(?R)a": 9}}, "unknown extension"),
        ({"alpha_pattern": {"to_q": "9"}}, r"alpha_pattern\['to_q'\] is 9; allowed: a number"),
        ({"alpha_pattern": [1]}, "alpha_pattern is no table"),
        ({"lora_alpha": "two"}, "lora_alpha is two; allowed: a number"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "'pissa_niter_4': such an adapter goes with changed weights",
        ),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights 'OLoRA'"),
        ({"kasa_config": {"beta": 1.0}}, "configuration has kasa_config; allowed: layers that are added"),
        ({"r": 8}, "has rank 4, and by the adapter's configuration 8"),
        ({"rank_pattern": {".*attn1.*": 3}}, "has rank 4, and by the adapter's configuration 3"),
    ],
)
def test_configurations_that_say_something_else_are_refused(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    name = "base_model.model.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 64), f"{name}.lora_B.weight": torch.ones(64, 4)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"r": 4, "lora_alpha": 2}))
    assert read_adapter(tmp_path).layers[name.replace("base_model.model", "unet")].scale == 0.5
    file.write_text(json.dumps({"r": 4, "lora_alpha": 2, **change}))
    with pytest.raises(ModelError, match=told):
        read_adapter(tmp_path)


def test_a_pattern_that_takes_for_ever_is_stopped(tmp_path: Path) -> None:
    name = "unet." + ".".join(["aaaaaaaa"] * 8)
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 4), f"{name}.lora_B.weight": torch.ones(4, 4)}
    header = {"lora_adapter_metadata": json.dumps({"unet.alpha_pattern": {r"((\w|\.|a)*)*!": 9}})}
    save_file(tensors, tmp_path / "a.safetensors", metadata=header)
    with pytest.raises(ModelError, match="takes too long to compare|matches no layer"):
        read_adapter(tmp_path / "a.safetensors")
    save_file(tensors, tmp_path / "a.safetensors", metadata={"lora_adapter_metadata": "{"})
    with pytest.raises(ModelError, match="is not JSON"):
        read_adapter(tmp_path / "a.safetensors")


def test_thousands_of_exact_patterns_are_compared_once_each_ending(tmp_path: Path) -> None:
    """SDXL's 700 attention layers, each with its own pattern, as diffusers and darkroom write them."""
    paths = [f"down_blocks.{i}.attentions.0.transformer_blocks.{j}.attn{k}.to_{x}" for i in range(3)
             for j in range(10) for k in (1, 2) for x in "qkv"]  # fmt: skip
    tensors = {}
    for i, path in enumerate(paths):
        rank = 1 + i % 5
        tensors |= {
            f"unet.{path}.lora_A.weight": torch.ones(rank, 2),
            f"unet.{path}.lora_B.weight": torch.ones(2, rank),
        }
    told = {
        "unet.r": 1,
        "unet.lora_alpha": 1,
        "unet.rank_pattern": {f"^{path}": 1 + i % 5 for i, path in enumerate(paths)},
        "unet.alpha_pattern": {f"^{path}": 1 + i for i, path in enumerate(paths)},
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"lora_adapter_metadata": json.dumps(told)})
    read = read_adapter(tmp_path / "a.safetensors").layers
    scales = [round(read[f"unet.{path}"].scale * (1 + i % 5)) for i, path in enumerate(paths)]
    assert scales == list(range(1, len(paths) + 1))
