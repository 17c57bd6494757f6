"""Adapters of every kind: trained, written, read back, against peft's layers and LyCORIS' formulas."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.optimizers import create_loraplus_optimizer
from safetensors import safe_open
from safetensors.torch import load_file
from subjects import check_resumes_exactly, recipe_for
from torch import nn

from darkroom import models
from darkroom.errors import ModelError, RecipeError
from darkroom.models.adapters.adapter import rotated
from darkroom.models.adapters.read import read_adapter
from darkroom.plan.training import profile_recipe
from darkroom.recipe.sections import AdapterSettings, OptimSettings
from darkroom.train.jobs import Pinned
from darkroom.train.optim import parameter_groups
from darkroom.train.run import export, train
from darkroom.train.setup import make_job
from darkroom.train.tasks.lora import adapter_of, add_adapters, limit_norms, parameter_table

KINDS: dict[str, dict[str, object]] = {
    "lora": {"rank": 3, "conv_rank": 2, "alpha": 6, "conv_alpha": 1, "rslora": True},
    "loha": {"rank": 3, "conv_rank": 2, "alpha": 6},
    "lokr": {"rank": 2, "alpha": 5},
    "lokr whole": {"kind": "lokr", "rank": 64, "alpha": 5},
    "lokr both": {"kind": "lokr", "rank": 1, "alpha": 2, "factor": 4, "decompose_both": True},
    "oft": {"rank": 4},
    "full": {},
}


def settings_of(case: str) -> AdapterSettings:
    return AdapterSettings.model_validate({"kind": case, "targets": "conv", **KINDS[case]})


def stirred(model: models.Model, settings: AdapterSettings) -> dict[str, torch.Tensor]:
    """Adapter layers whose values are anything, as after training."""
    parts = add_adapters(model, settings, seed=1)
    generator = torch.Generator().manual_seed(2)
    values = {}
    for part, module in parts.items():
        for name, param in module.named_parameters():
            if param.requires_grad:
                param.data = param.data + 0.05 * torch.randn(param.shape, generator=generator)
                values[f"{part}.{name}"] = param.data
    return values


def answer(model: models.Model) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    assert model.unet is not None
    width = model.unet.config["cross_attention_dim"]
    latents, text = (torch.randn(*shape, generator=generator) for shape in ((2, 4, 8, 8), (2, 5, width)))
    with torch.no_grad():
        out: torch.Tensor = model.unet.eval()(latents, torch.tensor([7, 300]), text, return_dict=False)[0]
    return out


@pytest.mark.parametrize("case", KINDS)
def test_what_was_trained_is_what_is_merged_from_its_file(case: str, tmp_path: Path) -> None:
    settings = settings_of(case)
    trained, plain = (models.create("tiny", seed=3) for _ in range(2))
    values = stirred(trained, settings)
    made = adapter_of("it", values, settings, {})
    file = models.adapters.write_adapter(made, tmp_path / "it.safetensors", kohya=True, family="sd15")
    before = answer(plain)
    models.adapters.merge(plain, read_adapter(file))
    torch.testing.assert_close(answer(plain), answer(trained), rtol=1e-3, atol=2e-4)
    assert (answer(plain) - before).abs().max() > 0.01
    with safe_open(file, framework="pt") as opened:
        module = opened.metadata()["ss_network_module"]
    assert module == ("networks.lora" if case == "lora" else "lycoris.kohya")


def test_lokr_of_two_whole_factors_has_no_alpha() -> None:
    """LyCORIS' rule: what has no rank is not divided by it. Of others the scale is alpha / rank."""
    layer = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    for rank, whole in ((64, True), (1, False)):
        settings = AdapterSettings(kind="lokr", targets=(layer,), rank=rank, alpha=rank / 8)
        model = models.create("tiny", seed=3)
        assert model.unet is not None
        before = model.unet.get_submodule(layer).weight.detach().clone()
        values = stirred(model, settings)
        made: Any = model.unet.get_submodule(layer)
        given = {name.split(".")[-2]: value for name, value in values.items()}
        assert ("lokr_w2" in given) == whole
        two = given["lokr_w2"] if whole else given["lokr_w2_a"] @ given["lokr_w2_b"]
        expected = torch.kron(given["lokr_w1"], two) * (1 if whole else 1 / 8)
        x = torch.randn(2, 3, before.shape[1])
        with torch.no_grad():
            torch.testing.assert_close(made.eval()(x) - x @ before.T, x @ expected.T, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(
            adapter_of("it", values, settings, {}).layers[f"unet.{layer}"].delta(), expected
        )


def test_an_untrained_adapter_of_every_kind_changes_nothing() -> None:
    before = answer(models.create("tiny", seed=3))
    for case in KINDS:
        model = models.create("tiny", seed=3)
        parts = add_adapters(model, settings_of(case))
        torch.testing.assert_close(answer(model), before, rtol=1e-4, atol=1e-5)
        trained, total = parameter_table(parts)
        assert 0 < trained < total, case


def test_rotations_are_lycoris_and_keep_lengths() -> None:
    """LyCORIS' diag-oft, written out with loops."""
    torch.manual_seed(0)
    blocks, weight = torch.randn(3, 4, 4), torch.randn(12, 5, 3, 3)
    found = rotated(blocks, weight)
    for k in range(3):
        skew = blocks[k] - blocks[k].T
        turn = (torch.eye(4) + skew) @ torch.inverse(torch.eye(4) - skew)
        torch.testing.assert_close(turn @ turn.T, torch.eye(4), atol=1e-4, rtol=0)
        for m in range(4):
            expected = sum(turn[n, m] * weight[4 * k + n] for n in range(4))
            torch.testing.assert_close(found[4 * k + m], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.square().sum(), weight.square().sum())
    assert not torch.allclose(rotated(-blocks, weight), found)


def test_ranks_and_alphas_by_pattern_are_pefts() -> None:
    patterns = {"unet.up_blocks.*": 5, "*.attn2.to_k": 2, "*.proj_in": 0}
    settings = AdapterSettings(
        targets="conv", rank=3, alpha=6, conv_rank=4, rank_pattern=patterns, alpha_pattern={"*.to_q": 1.5}
    )
    ours, theirs = (models.create("tiny", seed=3) for _ in range(2))
    values = stirred(ours, settings)
    layers = adapter_of("it", values, settings, {}).layers
    assert not [name for name in layers if name.endswith("proj_in") and "up_blocks" not in name]
    for name, layer in layers.items():
        kernel = name.rpartition(".")[2] in ("conv", "conv1", "conv2")
        first = 5 if "up_blocks" in name else 2 if name.endswith("attn2.to_k") else 4 if kernel else 3
        assert layer.rank == first, name
        alpha = 1.5 if name.endswith(".to_q") else first if kernel else 6
        assert layer.alpha == pytest.approx(alpha), name
    assert theirs.unet is not None
    inner = {name.partition(".")[2]: layer for name, layer in layers.items()}
    config = LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=list(inner),
        rank_pattern={name: layer.rank for name, layer in inner.items()},
        alpha_pattern={name: layer.alpha for name, layer in inner.items()},
    )
    inject_adapter_in_model(config, theirs.unet)
    state = {key.removeprefix("unet."): value for key, value in values.items()}
    assert not theirs.unet.load_state_dict(state, strict=False).unexpected_keys
    torch.testing.assert_close(answer(theirs), answer(ours))
    scales = [m.scaling["default"] for n, m in theirs.unet.named_modules() if n in inner]
    assert sorted(scales) == pytest.approx(sorted(layer.scale for layer in layers.values()))


# ---- a start from a file


@pytest.mark.parametrize("case", ["lora", "loha", "lokr both", "oft", "full"])
def test_training_starts_where_a_file_ended(case: str, tmp_path: Path) -> None:
    settings = settings_of(case)
    first, second = (models.create("tiny", seed=3) for _ in range(2))
    made = adapter_of("it", stirred(first, settings), settings, {})
    file = models.adapters.write_adapter(made, tmp_path / "it.safetensors", kohya=True, family="sd15")
    other = {} if case in ("oft", "full") else {"alpha": 1.5}  # the file's own scale is kept
    content = {"kind": case, "targets": "conv", **KINDS[case], **other, "from": str(file)}
    add_adapters(second, AdapterSettings.model_validate(content))
    torch.testing.assert_close(answer(second), answer(first), rtol=1e-3, atol=2e-4)
    assert (answer(second) - answer(models.create("tiny", seed=3))).abs().max() > 0.01


def test_a_file_that_is_not_what_is_trained_is_refused(tmp_path: Path) -> None:
    settings = settings_of("lora")
    made = adapter_of("it", stirred(models.create("tiny"), settings), settings, {})
    file = str(models.adapters.write_adapter(made, tmp_path / "it.safetensors", family="sd15"))
    refused = {
        "is of kind lora, not loha; set adapter.kind": {"kind": "loha"},
        "changes .* layers that are not trained here .*; set adapter.targets": {"targets": "attention"},
        "has rank 3 in unet.* and the recipe 9; set adapter.rank=3": {"targets": "conv", "rank": 9},
        "adapter.from: no file": {"from": str(tmp_path / "nowhere.safetensors")},
    }
    for message, content in refused.items():
        with pytest.raises(RecipeError, match=message):
            add_adapters(models.create("tiny"), AdapterSettings.model_validate({"from": file, **content}))


# ---- through the trainer


@pytest.mark.parametrize(
    "kind",
    [pytest.param("lokr", marks=pytest.mark.nightly), "oft", pytest.param("full", marks=pytest.mark.nightly)],
)
def test_a_run_of_each_kind_resumes_to_the_bit_and_is_merged(
    kind: str, base: Path, photos: Path, tmp_path: Path
) -> None:
    overrides = (f"adapter.kind={kind}", "adapter.rank=4", "optim.lr=2e-2")
    run = check_resumes_exactly(
        lambda *more: recipe_for("lora", base, photos, *overrides, *more), tmp_path, control=("train.seed=1",)
    )
    assert read_adapter(run / "adapter.safetensors").kind == kind
    merged = models.load(export(run, tmp_path / "merged"))
    plain = models.load(base)
    assert merged.unet is not None
    assert plain.unet is not None
    moved = [
        name
        for (name, one), other in zip(merged.unet.named_parameters(), plain.unet.parameters(), strict=True)
        if not torch.equal(one, other)
    ]
    assert moved
    assert all(".to_" in name for name in moved)


def test_a_run_goes_on_from_another_runs_adapter(base: Path, photos: Path, tmp_path: Path) -> None:
    first = train(recipe_for("lora", base, photos), out=tmp_path / "first", console=lambda _: None)
    file = first.outputs[0]
    job = make_job(recipe_for("lora", base, photos, f"adapter.from={file}"), Pinned(tmp_path / "second"))
    values = job.step.weights.masters
    again = {key: value for key, value in load_file(file).items() if key.endswith("lora_B.weight")}
    assert again
    for key, value in again.items():
        assert torch.equal(values[key.replace("lora_B.weight", "lora_B.default.weight")], value)
    assert job.base["adapter"] == read_adapter(file).sha256[:16]


def test_plans_count_each_kind(base: Path, photos: Path) -> None:
    trained = {}
    for kind in ("loha", "oft"):
        recipe = recipe_for(
            "lora", base, photos, f"adapter.kind={kind}", "adapter.rank=4", "train.micro_batch=1"
        )
        profile = profile_recipe(recipe.dump(), "float32", gpu=True)
        parts = add_adapters(models.load(base), recipe.adapter or AdapterSettings())
        assert profile.trained == parameter_table(parts)[0], kind
        trained[kind] = profile.trained
    assert trained["loha"] != trained["oft"]


# ---- dropout and rates


@pytest.mark.parametrize("shape", [(64, 40, 6), (64, 6, 5, 5), (64, 6)])
def test_rank_dropout_leaves_out_ranks_of_whole_rows(shape: tuple[int, ...]) -> None:
    from darkroom.train.tasks.lora import _drop_module, _drop_ranks

    torch.manual_seed(0)
    module, out = nn.Identity(), torch.ones(shape)
    found = _drop_ranks(0.25, module, None, out)
    by_rank = found.movedim(1, -1).reshape(64, -1, 6) if len(shape) == 4 else found.reshape(64, -1, 6)
    assert torch.equal(by_rank, by_rank[:, :1].expand_as(by_rank))
    assert set(np.unique(found.numpy())) == {0.0, np.float32(1 / 0.75)}
    assert (found == 0).float().mean().item() == pytest.approx(0.25, abs=0.08)
    dropped = [_drop_module(0.5, module, None, out).mean().item() for _ in range(200)]
    assert set(dropped) == {0.0, 1.0}
    assert sum(dropped) / 200 == pytest.approx(0.5, abs=0.12)
    module.eval()
    assert _drop_ranks(0.25, module, None, out) is out


def test_dropout_is_of_training_alone_and_resumes(base: Path, photos: Path, tmp_path: Path) -> None:
    overrides = ("adapter.rank_dropout=0.5", "adapter.module_dropout=0.2")
    check_resumes_exactly(
        lambda *more: recipe_for("lora", base, photos, *overrides, *more),
        tmp_path,
        control=("adapter.rank_dropout=0.1",),
    )


def added(down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """A layer's addition without its scale, as sd-scripts multiply it out."""
    if down.ndim == 2:
        return up @ down
    return torch.nn.functional.conv2d(down.permute(1, 0, 2, 3), up).permute(1, 0, 2, 3)


def test_norms_are_limited_as_kohyas_are() -> None:
    settings = AdapterSettings(
        rank=3, alpha=6, conv_rank=2, conv_alpha=1, targets="conv", scale_weight_norms=0.7
    )
    values = stirred(models.create("tiny", seed=3), settings)
    before = {name: value.clone() for name, value in values.items()}
    limit_norms(values, settings)
    scaled = 0
    for name in (name for name in values if "lora_A" in name):
        other, scale = name.replace("lora_A", "lora_B"), settings.scale_of(name.partition(".lora_A")[0])
        norm = (added(before[name], before[other]) * scale).norm().clamp(min=0.7 / 2)
        ratio = (torch.clamp(norm, max=0.7) / norm) ** 0.5
        for one in (name, other):
            torch.testing.assert_close(values[one], before[one] * ratio, rtol=1e-5, atol=1e-8)
        scaled += int(ratio < 1)
    assert 0 < scaled < len(values) // 2
    kept = {name: value.clone() for name, value in before.items()}
    limit_norms(kept, settings.model_copy(update={"scale_weight_norms": None}))
    assert all(torch.equal(kept[name], before[name]) for name in before)


def test_a_run_keeps_its_norms_below_the_limit_and_resumes(base: Path, photos: Path, tmp_path: Path) -> None:
    overrides = ("adapter.scale_weight_norms=0.02", "optim.lr=1e-2")
    check_resumes_exactly(
        lambda *more: recipe_for("lora", base, photos, *overrides, *more),
        tmp_path / "resumed",
        control=("adapter.scale_weight_norms=0.01",),
    )
    largest = []
    for limit in ("0.02", "null"):
        recipe = recipe_for("lora", base, photos, "optim.lr=1e-2", f"adapter.scale_weight_norms={limit}")
        job = make_job(recipe, Pinned(tmp_path / limit))
        with job.feed(0) as batches:
            for k in range(2):
                job.step(k, job.task.inputs(next(batches), job.device))
        masters = job.step.weights.masters
        downs = [name for name in masters if "lora_A" in name]
        norms = [added(masters[name], masters[name.replace("lora_A", "lora_B")]).norm() for name in downs]
        largest.append(float(max(norms).detach()))
    assert largest[0] == pytest.approx(0.02, rel=1e-4)
    assert largest[1] > 0.03


def test_loraplus_groups_are_pefts() -> None:
    model = models.create("tiny", seed=3)
    parts = add_adapters(model, AdapterSettings(rank=2))
    named = {f"unet.{n}": p for n, p in parts["unet"].named_parameters() if p.requires_grad}
    groups = parameter_groups(named, {"unet": 1e-3}, 0.0, OptimSettings(loraplus_lr_ratio=16))
    ours = {id(p): group["lr"] for group in groups for p in group["params"]}
    theirs = create_loraplus_optimizer(
        model=parts["unet"], optimizer_cls=torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16
    )
    expected = {id(p): g["lr"] for g in theirs.param_groups for p in g["params"] if p.requires_grad}
    assert ours == pytest.approx(expected)
    assert sorted(set(ours.values())) == pytest.approx([1e-3, 1.6e-2])
    plain = parameter_groups(named, {"unet": 1e-3}, 0.0, OptimSettings())
    assert {group["lr"] for group in plain} == {1e-3}


def test_layers_have_rates_and_times_of_their_own(base: Path, photos: Path, tmp_path: Path) -> None:
    """Frozen weights stay to the bit, and what is trained at another rate moves by that much."""
    rules = (
        "optim.layers=[{match: 'unet.down_blocks.*', lr_scale: 0}, "
        "{match: 'unet.mid_block', lr_scale: 0.1}, {match: 'unet.up_blocks.*', start_step: 2}]"
    )
    text = ("adapter.text_encoder=true", "optim.text_encoder_lr=5e-3", "optim.text_encoder_steps=1")
    recipe = recipe_for("lora", base, photos, rules, *text, "optim.weight_decay=0")
    job = make_job(recipe, Pinned(tmp_path / "run"))
    masters = job.step.weights.masters
    seen = [{name: value.detach().clone() for name, value in masters.items()}]
    with job.feed(0) as batches:
        for k in range(3):
            job.step(k, job.task.inputs(next(batches), job.device))
            seen.append({name: value.detach().clone() for name, value in masters.items()})
    moved = [
        {name: (after[name] - before[name]).abs().max().item() for name in after if "lora_B" in name}
        for before, after in itertools.pairwise(seen)
    ]
    for name, first in moved[0].items():
        if "down_blocks" in name:
            assert [step[name] for step in moved] == [0, 0, 0]
        elif "mid_block" in name:
            assert first == pytest.approx(1e-3, rel=1e-2)  # Adam's first step is the rate
        elif "up_blocks" in name:
            assert [step[name] > 0 for step in moved] == [False, False, True], name
        else:
            assert first == pytest.approx(5e-3, rel=1e-2)
            assert [step[name] > 0 for step in moved] == [True, False, False], name


def test_sdxls_encoders_and_the_unet_have_rates_of_their_own() -> None:
    settings = OptimSettings(lr=1e-3, unet_lr=2e-3, text_encoder_lr=3e-3)
    parts = ("unet", "text_encoder", "text_encoder_2")
    assert [settings.part_lr(part) for part in parts] == [2e-3, 3e-3, 3e-3]
    settings = OptimSettings(lr=1e-3, text_encoder_2_lr=4e-3)
    assert [settings.part_lr(part) for part in parts] == [1e-3, 1e-3, 4e-3]


REFUSED = [
    (("adapter.kind=loha", "adapter.dora=true"), "dora with kind loha, which has none; use kind lora"),
    (("adapter.kind=oft", "adapter.rank_dropout=0.1"), "rank_dropout with kind oft"),
    (("adapter.kind=loha", "adapter.scale_weight_norms=1"), "scale_weight_norms with kind loha"),
    (("adapter.dora=true", "adapter.scale_weight_norms=1"), "scale_weight_norms with dora"),
    (
        ("adapter.init_lora_weights=pissa", "adapter.scale_weight_norms=1"),
        "scale_weight_norms with init_lora_weights pissa",
    ),
    (
        ("optim.name=schedule-free", "adapter.scale_weight_norms=1"),
        "scale_weight_norms: 1 with optim.name=schedule-free",
    ),
    (("adapter.factor=4",), "factor and decompose_both with kind lora"),
    (("adapter.dora=true", "adapter.rank_dropout=0.1"), "with dora, whose magnitudes need all ranks"),
    (("adapter.conv_rank=4",), "conv_rank or conv_alpha with targets attention; use targets conv"),
    (("adapter.kind=full", "parallel.mode=fsdp"), "fsdp with adapter.kind=full; allowed: none or ddp"),
    (("adapter.kind=lokr", "optim.loraplus_lr_ratio=16"), "there is no second matrix"),
    (("optim.text_encoder_steps=3",), "text_encoder_steps: given, but nothing reads it"),
    (("optim.name=prodigy", "optim.unet_lr=0.5"), "unet_lr: given, but Prodigy has one rate for all"),
    (("optim.layers=[{match: a, start_step: 4, stop_step: 2}]",), "stop_step 2 is not after start_step 4"),
    (("adapter.form=x",), "adapter.form: no such key; allowed: kind, from, .*did you mean 'from'"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_impossible_pairs_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        recipe_for("lora", Path("nowhere"), Path("nowhere"), *overrides)
    assert "\n" not in str(caught.value)


def test_patterns_that_name_nothing_are_refused() -> None:
    for key in ("rank_pattern", "alpha_pattern"):
        with pytest.raises(RecipeError, match=f"adapter.{key}: '\\*.to_z' names no layer of adapter.targets"):
            add_adapters(models.create("tiny"), AdapterSettings.model_validate({key: {"*.to_z": 2}}))
    with pytest.raises(RecipeError, match=r"0 for every layer"):
        add_adapters(models.create("tiny"), AdapterSettings(rank_pattern={"*": 0}))


def test_a_rotation_with_a_constraint_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    stem = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors = {f"{stem}.oft_blocks": torch.zeros(2, 4, 4), f"{stem}.alpha": torch.tensor(0.1)}
    save_file(tensors, tmp_path / "it.safetensors")
    with pytest.raises(ModelError, match=r"a rotation with a constraint \(0.1\); allowed: none: alpha 0"):
        read_adapter(tmp_path / "it.safetensors")
