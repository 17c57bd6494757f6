"""LoHa and LoKr with every kind of factor against peft, files that mix kinds, and several adapters."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from darkroom import models
from darkroom.errors import ModelError
from darkroom.models.adapters.adapter import Adapter, Factors
from darkroom.models.adapters.bank import SLOTS, WEIGHTS, Bank, lay_out
from darkroom.models.adapters.read import (
    adaptable,
    changeable,
    fit,
    merge,
    merge_all,
    read_adapter,
    write_adapter,
)
from darkroom.models.model import Model
from models.made_adapters import made

TARGETS = ["attn1.to_q", "ff.net.2", "resnets.0.conv1", "conv_shortcut"]


def kohya_file(tensors: dict[str, torch.Tensor], file: Path, alpha: float = 2.0) -> Path:
    named = {f"unet.{key.removeprefix('base_model.model.')}": t.contiguous() for key, t in tensors.items()}
    named |= {f"{key.rsplit('.', 1)[0]}.alpha": torch.tensor(alpha) for key in named}
    save_file(named, file)
    return file


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("loha", {}),
        ("loha", {"use_effective_conv2d": True}),
        ("lokr", {}),
        ("lokr", {"use_effective_conv2d": True}),
        ("lokr", {"use_effective_conv2d": True, "decompose_both": True, "decompose_factor": 4}),
        ("lokr", {"decompose_both": True, "decompose_factor": 8}),
    ],
)
def test_tucker_cores_and_split_factors_merge_as_peft_merges_them(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = {"loha": peft.LoHaConfig, "lokr": peft.LoKrConfig}[kind]
    torch.manual_seed(3)
    theirs = peft.get_peft_model(
        models.create("tiny", seed=1).unet,
        config(r=2, alpha=2, target_modules=TARGETS, init_weights=False, **settings),
    )
    tensors = {key: t * 2 for key, t in peft.get_peft_model_state_dict(theirs).items()}
    peft.set_peft_model_state_dict(theirs, tensors)
    cores = [key for key in tensors if key.endswith(("t1", "t2"))]
    assert bool(cores) == ("use_effective_conv2d" in settings)
    read = read_adapter(kohya_file(tensors, tmp_path / "a.safetensors"))
    ours, plain = models.create("tiny", seed=1), models.create("tiny", seed=1)
    merge(ours, read)
    expected = theirs.merge_and_unload().state_dict()
    mine, before = (model.modules["unet"].state_dict() for model in (ours, plain))
    changed = [name for name in expected if not torch.equal(before[name], expected[name])]
    assert len(changed) == len(read.layers)
    for name in expected:
        assert torch.allclose(mine[name], expected[name], atol=1e-5), name
    assert max(float((before[name] - expected[name]).abs().max()) for name in changed) > 1e-2


def by_hand(parts: dict[str, torch.Tensor], scale: float, shape: torch.Size) -> torch.Tensor:
    """LyCORIS' own formulas, written out index by index: LoKr with a Tucker core, LoHa, LoCon."""
    if "lokr_t2" in parts:
        two = torch.einsum("ijkl,ip,jr->prkl", parts["lokr_t2"], parts["lokr_w2_a"], parts["lokr_w2_b"])
        one = parts["lokr_w1"]
        outer = torch.einsum("ab,cdkl->acbdkl", one, two)
        return scale * outer.reshape(shape)
    if "hada_w1_a" in parts:
        one, two = (parts[f"hada_w{i}_a"] @ parts[f"hada_w{i}_b"] for i in (1, 2))
        return scale * (one * two).reshape(shape)
    return scale * (parts["up"].flatten(1) @ parts["down"].flatten(1)).reshape(shape)


def mixed(model: Model) -> dict[str, dict[str, torch.Tensor]]:
    """A file of LyCORIS with a preset: LoCon for a convolution, LoHa for attention, LoKr with a core."""
    draw = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * 0.5

    return {
        "unet.down_blocks.0.resnets.0.conv1": {"down": random(4, 32, 3, 3), "up": random(32, 4, 1, 1)},
        "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q": {
            "hada_w1_a": random(64, 4),
            "hada_w1_b": random(4, 64),
            "hada_w2_a": random(64, 4),
            "hada_w2_b": random(4, 64),
        },
        "unet.mid_block.resnets.0.conv1": {
            "lokr_w1": random(8, 8),
            "lokr_w2_a": random(4, 8),
            "lokr_w2_b": random(4, 8),
            "lokr_t2": random(4, 4, 3, 3),
        },
    }


def file_of(layers: dict[str, dict[str, torch.Tensor]], file: Path) -> Path:
    roles = {"down": "lora_down.weight", "up": "lora_up.weight"}
    told = {}
    for name, parts in layers.items():
        stem = "lora_" + name.replace(".", "_")
        told |= {f"{stem}.{roles.get(role, role)}": t for role, t in parts.items()}
        told[f"{stem}.alpha"] = torch.tensor(2.0)
    save_file(told, file)
    return file


def test_kinds_may_be_mixed_in_one_file(tmp_path: Path) -> None:
    model, plain = models.create("tiny", seed=1), models.create("tiny", seed=1)
    layers = mixed(model)
    read = read_adapter(file_of(layers, tmp_path / "a.safetensors"))
    assert read.kind == "loha+lokr+lora"
    merge(model, read, 0.5)
    before, after = adaptable(plain), adaptable(model)
    for name, parts in layers.items():
        expected = 0.5 * by_hand(parts, 2 / 4, before[name].weight.shape)
        assert expected.abs().max() > 0.1
        assert torch.allclose(after[name].weight - before[name].weight, expected, atol=1e-5), name
    with pytest.raises(ModelError, match="diffusers has no keys for it"):
        write_adapter(read, tmp_path / "b.safetensors")
    again = read_adapter(write_adapter(read, tmp_path / "c.safetensors", kohya=True))
    assert (again.kind, again.layers.keys()) == (read.kind, read.layers.keys())
    assert all(torch.equal(again.layers[n].delta(), layer.delta()) for n, layer in read.layers.items())
    assert again.metadata["ss_network_module"] == "lycoris.kohya"


@pytest.mark.parametrize(
    "change",
    [
        {"hada_w1_b": (5, 64)},
        {"hada_w2_a": (32, 4)},
        {"hada_w1_a": (64,)},
        {"hada_t1": (4, 4, 3, 3), "hada_t2": (4, 5, 3, 3)},
        {"hada_w1_a": (0, 4), "hada_w2_a": (0, 4)},
    ],
)
def test_factors_that_do_not_go_together_are_refused_as_such(
    change: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    name = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    parts = mixed(models.create("tiny", seed=1))[name]
    assert read_adapter(file_of({name: parts}, tmp_path / "a.safetensors")).kind == "loha"
    wrong = parts | {role: torch.ones(shape) for role, shape in change.items()}
    with pytest.raises(ModelError, match="do not go together"):
        read_adapter(file_of({name: wrong}, tmp_path / "b.safetensors"))


def test_as_many_numbers_in_another_shape_do_not_fit() -> None:
    """Inputs and outputs exchanged hold as many numbers; they are another layer's."""
    model = models.create("tiny", seed=1)
    name = "unet.mid_block.attentions.0.transformer_blocks.0.ff.net.2"
    outputs, inputs = adaptable(model)[name].weight.shape
    for rows, columns, fits in ((outputs, inputs, True), (inputs, outputs, False)):
        parts = {f"hada_w{i}_a": torch.ones(rows, 2) for i in (1, 2)}
        parts |= {f"hada_w{i}_b": torch.ones(2, columns) for i in (1, 2)}
        adapter = Adapter("k", {name: Factors("loha", parts)}, kind="loha")
        if fits:
            assert fit(adapter, model).layers
        else:
            with pytest.raises(ModelError, match="another shape"):
                fit(adapter, model)


def test_several_adapters_merge_alike_in_any_order() -> None:
    """A DoRA's change depends on the weights it meets: it meets the base's, whoever comes first."""
    draw = torch.Generator().manual_seed(1)
    plain = models.create("tiny", seed=1)
    lora = made(plain, 1)
    dora = made(plain, 2)
    layers = {n: replace(layer, magnitude=torch.rand(len(layer.up), generator=draw) + 0.5)
              for n, layer in dora.layers.items()}  # fmt: skip
    soft = Adapter("soft", layers, kind="dora")
    merged = []
    for pairs in itertools.permutations([(lora, 1.0), (soft, 0.7)]):
        model = models.create("tiny", seed=1)
        merge_all(model, pairs)
        merged.append(adaptable(model))
    alone = []
    for adapter, weight in ((lora, 1.0), (soft, 0.7)):
        model = models.create("tiny", seed=1)
        merge(model, adapter, weight)
        alone.append(adaptable(model))
    sequence = models.create("tiny", seed=1)
    merge(sequence, lora)
    merge(sequence, soft, 0.7)
    before = adaptable(plain)
    apart = 0.0
    for name in lora.layers:
        base = before[name].weight
        expected = alone[0][name].weight + alone[1][name].weight - base
        assert torch.allclose(merged[0][name].weight, merged[1][name].weight, atol=1e-6)
        assert torch.allclose(merged[0][name].weight, expected, atol=1e-6)
        apart = max(apart, (adaptable(sequence)[name].weight - expected).abs().max().item())
    assert apart > 1e-2


def test_what_a_precision_cannot_hold_is_refused() -> None:
    model = models.create("tiny", seed=1).to(dtype=torch.float16)
    with pytest.raises(ModelError, match="too large for torch.float16"):
        merge(model, made(model, 1, size=1e6))


def test_ia3_is_read_from_pefts_folder_and_from_lycoris_keys(tmp_path: Path) -> None:
    """PEFT's says what becomes of outputs and of the feed-forward's inputs, LyCORIS' what is added."""
    torch.manual_seed(3)
    plain = models.create("tiny", seed=1)
    config = peft.IA3Config(
        target_modules=["attn1.to_q", "ff.net.2"], feedforward_modules=["ff.net.2"], init_ia3_weights=False
    )
    theirs = peft.get_peft_model(models.create("tiny", seed=1).unet, config)
    theirs.save_pretrained(str(tmp_path))
    read = read_adapter(tmp_path)
    assert read.kind == "ia3"
    assert {layer.on_input for layer in read.layers.values() if isinstance(layer, Factors)} == {True, False}
    again = read_adapter(write_adapter(read, tmp_path / "kohya.safetensors", kohya=True))
    expected = theirs.merge_and_unload().state_dict()
    for adapter in (read, again):
        ours = models.create("tiny", seed=1)
        merge(ours, adapter)
        for path, weight in ours.unet.state_dict().items():  # type: ignore[union-attr]
            assert torch.allclose(weight, expected[path], atol=1e-5)
    before = plain.unet.state_dict()  # type: ignore[union-attr]
    assert any(not torch.allclose(before[path], weight, atol=0.1) for path, weight in expected.items())


def test_boft_turns_outputs_as_lycoris_does(tmp_path: Path) -> None:
    """Rotation by rotation, output by output: the i-th joins outputs that lie n / 2 * 2**i apart."""
    draw = torch.Generator().manual_seed(1)
    path, layer = next(
        (path, layer)
        for path, layer in adaptable(models.create("tiny", seed=1)).items()
        if path.endswith("resnets.0.conv1") and layer.weight.shape[0] == 64
    )
    blocks = 0.3 * torch.randn(3, 16, 4, 4, generator=draw)
    given = Adapter("boft", {path: Factors("boft", {"oft_blocks": blocks})}, kind="boft")
    read = read_adapter(write_adapter(given, tmp_path / "a.safetensors", kohya=True))
    assert read.kind == "boft"
    weight = layer.weight.detach().flatten(1)
    expected = weight.clone()
    for i, some in enumerate(blocks):
        skew = some - some.transpose(1, 2)
        turns = (torch.eye(4) + skew) @ torch.linalg.inv(torch.eye(4) - skew)
        apart = 2 * 2**i
        # Outputs c * 2 * apart + g * apart + k stand in the order c, k, g.
        order = [c + k + g * apart for c in range(0, 64, 2 * apart) for k in range(apart) for g in (0, 1)]
        turned = torch.cat([turns[b] @ expected[order[4 * b : 4 * b + 4]] for b in range(16)])
        expected = torch.empty_like(expected)
        expected[order] = turned
    [changed] = read.layers.values()
    made_so = (layer.weight.detach() + changed.change(layer.weight.detach())).flatten(1)
    assert torch.allclose(made_so, expected, atol=1e-5)
    assert not torch.allclose(made_so, weight, atol=1e-2)


def whole_differences(model: Model, prefix: str = "lora_unet") -> dict[str, torch.Tensor]:
    """What LyCORIS' `full` with `train_norm` saves: of weights, biases and normalisations."""
    draw = torch.Generator().manual_seed(2)
    found = {}
    for path, layer in changeable(model).items():
        if not path.startswith("unet."):
            continue
        stem = f"{prefix}_{path.removeprefix('unet.').replace('.', '_')}"
        is_norm = isinstance(layer, (nn.GroupNorm, nn.LayerNorm))
        for role, parameter in zip(("w_norm", "b_norm") if is_norm else ("diff", "diff_b"),
                                   (layer.weight, layer.bias), strict=True):  # fmt: skip
            if parameter is not None:
                found[f"{stem}.{role}"] = 0.1 * torch.randn(parameter.shape, generator=draw)
    return found


@pytest.mark.parametrize("prefix", ["lora_unet", "lycoris"])
def test_whole_differences_change_biases_and_normalisations_too(prefix: str, tmp_path: Path) -> None:
    plain, merged = models.create("tiny", seed=1), models.create("tiny", seed=1)
    tensors = whole_differences(plain, prefix)
    save_file(tensors, tmp_path / "a.safetensors")
    read = read_adapter(tmp_path / "a.safetensors")
    assert read.kind == "full+norm"
    merge(merged, read, 0.5)
    before, after = plain.modules["unet"].state_dict(), merged.modules["unet"].state_dict()
    for name, weight in before.items():
        path, _, what = name.rpartition(".")
        stem = f"{prefix}_{path.replace('.', '_')}"
        roles = ("diff", "w_norm") if what == "weight" else ("diff_b", "b_norm")
        [change] = [tensors[f"{stem}.{role}"] for role in roles if f"{stem}.{role}" in tensors]
        assert torch.allclose(after[name], weight + 0.5 * change, atol=1e-6), name
    again = read_adapter(write_adapter(read, tmp_path / "b.safetensors", kohya=True))
    assert sorted(again.layers) == sorted(fit(read, plain).layers)
    assert again.num_parameters == read.num_parameters == sum(t.numel() for t in tensors.values())


@torch.no_grad()
def test_a_bank_adds_biases_and_normalisations_to_the_rows_that_have_them(tmp_path: Path) -> None:
    plain, merged = models.create("tiny", seed=1), models.create("tiny", seed=1)
    save_file(whole_differences(plain), tmp_path / "a.safetensors")
    read = read_adapter(tmp_path / "a.safetensors")
    merge(merged, read)
    draw = torch.Generator().manual_seed(1)
    unet: Any = plain.unet
    latents = torch.randn(2, unet.config.in_channels, 8, 8, generator=draw)
    text = torch.randn(2, 5, unet.config.cross_attention_dim, generator=draw)

    def drawn(model: Model) -> torch.Tensor:
        made: torch.Tensor = model.unet(latents, torch.tensor([500, 20]), text).sample  # type: ignore[misc]
        return made

    without, wanted = drawn(plain), drawn(merged)
    bank = Bank(plain, slots=1, max_rank=4)
    bank.load(1, read)
    rows = lay_out([[(1, 1.0)], []], "cpu")
    with bank.applied("unet", rows[SLOTS], rows[WEIGHTS]):
        blended = drawn(plain)
    assert torch.allclose(blended[0], wanted[0], atol=1e-4)
    assert torch.allclose(blended[1], without[1], atol=1e-5)
    assert not torch.allclose(wanted[0], without[0], atol=1e-2)
    bank.detach()
    assert torch.equal(drawn(plain), without)


@pytest.mark.parametrize("kind", ["oft", "boft"])
def test_a_rotations_rescale_comes_behind_it(kind: str, tmp_path: Path) -> None:
    """LyCORIS with `rescaled`: a factor for each output of what was turned."""
    draw = torch.Generator().manual_seed(3)
    path = "down_blocks.0.resnets.0.conv1"
    shape = (8, 4, 4) if kind == "oft" else (2, 8, 4, 4)
    blocks, factor = 0.2 * torch.randn(shape, generator=draw), 1 + torch.rand(32, 1, 1, 1, generator=draw)
    changed = {}
    for name, rescale in (("plain", {}), ("rescaled", {"rescale": factor})):
        model = models.create("tiny", seed=1)
        parts = {"oft_blocks": blocks, **rescale}
        stem = f"lora_unet_{path.replace('.', '_')}"
        save_file({f"{stem}.{role}": t for role, t in parts.items()}, tmp_path / f"{name}.safetensors")
        read = read_adapter(tmp_path / f"{name}.safetensors")
        assert read.kind == kind
        merge(model, read_adapter(write_adapter(read, tmp_path / "again.safetensors", kohya=True)))
        changed[name] = adaptable(model)[f"unet.{path}"].weight
    assert torch.allclose(changed["rescaled"], changed["plain"] * factor, atol=1e-6)
    assert not torch.allclose(changed["rescaled"], changed["plain"], atol=1e-2)


@pytest.mark.parametrize(
    ("stem", "parts"),
    [
        ("down_blocks_0_resnets_0_norm1", {"w_norm": (31,), "b_norm": (31,)}),
        ("down_blocks_0_resnets_0_norm1", {"diff": (32, 32)}),
        ("down_blocks_0_resnets_0_conv1", {"w_norm": (32,)}),
        ("mid_block_attentions_0_transformer_blocks_0_attn1_to_q", {"diff": (64, 64), "diff_b": (64,)}),
    ],
)
def test_what_changes_another_kind_of_layer_is_refused(
    stem: str, parts: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """The last: attention's queries have no bias that a difference could be added to."""
    tensors = {f"lora_unet_{stem}.{role}": torch.ones(shape) for role, shape in parts.items()}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="have another shape than in"):
        fit(read_adapter(tmp_path / "a.safetensors"), models.create("tiny", seed=1))


@pytest.mark.parametrize(
    "parts",
    [
        {"diff": (32, 32), "diff_b": (31,)},
        {"w_norm": (32,), "b_norm": (31,)},
        {"w_norm": (32, 1)},
        {"oft_blocks": (8, 4, 4), "rescale": (31, 1)},
        {"oft_blocks": (8, 4, 4), "rescale": (1, 32)},
        {"diff_b": (32,)},
        {"rescale": (32,)},
        {"diff": (32, 32), "rescale": (32, 1)},
    ],
)
def test_parts_of_whole_differences_that_do_not_go_together(
    parts: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    tensors = {f"lora_unet_conv_in.{role}": torch.ones(shape) for role, shape in parts.items()}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"do not go together|it has"):
        read_adapter(tmp_path / "a.safetensors")


def test_stabilitys_names_of_normalisations_are_read_and_written(tmp_path: Path) -> None:
    names = {
        "unet.conv_norm_out": "out_0",
        "unet.down_blocks.1.resnets.0.norm1": "input_blocks_4_0_in_layers_0",
        "unet.down_blocks.1.resnets.0.norm2": "input_blocks_4_0_out_layers_0",
        "unet.down_blocks.1.attentions.0.norm": "input_blocks_4_1_norm",
    }
    save_file(
        {f"lora_unet_{stem}.w_norm": torch.ones(64) for stem in names.values()}, tmp_path / "a.safetensors"
    )
    read = read_adapter(tmp_path / "a.safetensors")
    assert sorted(read.layers) == sorted(names)
    written = write_adapter(read, tmp_path / "b.safetensors", kohya=True, family="sdxl")
    assert {key.split(".")[0] for key in load_file(written)} == {f"lora_unet_{s}" for s in names.values()}
