"""Blocks that rest in main memory: the same run to the bit, two blocks there at a time, copies in order.

That no copy and no block overtakes what it depends on is shown with streams that stand in for a card's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from subjects import check_resumes_exactly, recipe_for
from torch import Tensor, nn

from clocked_streams import Clocked, Stream
from darkroom import models, sample
from darkroom.counting import counting
from darkroom.errors import RecipeError
from darkroom.hardware import accelerator
from darkroom.hardware.cards import cards
from darkroom.models.compiling import blocks_in_order
from darkroom.plan.counts import TRAIN_STAGES
from darkroom.plan.jobs import TrainJob, Where, plan_training
from darkroom.plan.roofline import Software, efficiency
from darkroom.plan.training import profile_recipe
from darkroom.recipe import Recipe
from darkroom.train.block_swap import BlockSwap, swap_blocks, swap_of
from darkroom.train.jobs import Pinned, TrainingSetup
from darkroom.train.memory import MadeAnew, activation_bytes
from darkroom.train.run import export, train
from darkroom.train.setup import make_job
from darkroom.train.tasks.lora import parameter_table

CPU = torch.device("cpu")
SWAP = "train.blocks_to_swap=6"


def lora(base: Path, photos: Path, *overrides: str) -> Recipe:
    return recipe_for("lora", base, photos, "train.steps=3", *overrides)


def job_of(recipe: Recipe, run: Path) -> TrainingSetup:
    return make_job(recipe, Pinned(run))


def swap_in(job: TrainingSetup) -> BlockSwap:
    found = swap_of(job.task.modules["unet"])
    assert found is not None
    return found


def learned(job: TrainingSetup, steps: int = 3) -> dict[str, Tensor]:
    """The losses and the weights after some steps."""
    found = {}
    with job.feed(0) as batches:
        for k in range(steps):
            result = job.step(k, job.task.inputs(next(batches), job.device))
            found |= {f"loss {k}": result.losses["loss"], f"norm {k}": result.grad_norm}
    return found | {name: master.detach().clone() for name, master in job.step.weights.masters.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- which blocks


SDXL = {
    "block_out_channels": [8, 16, 16], "norm_num_groups": 4, "attention_head_dim": 2,
    "cross_attention_dim": 32, "addition_time_embed_dim": 16, "layers_per_block": 2,
    "projection_class_embeddings_input_dim": 112, "transformer_layers_per_block": [1, 2, 3],
}  # fmt: skip


@pytest.mark.parametrize("family", ["tiny", "tiny-dit", "sdxl"])
def test_blocks_are_in_the_order_of_a_forward_pass(family: str) -> None:
    overrides = {"unet": SDXL} if family == "sdxl" else {}
    unet: Any = models.create(family, seed=3, parts=("unet",), overrides=overrides).unet
    blocks, came = blocks_in_order(unet), []
    for block in blocks:
        block.register_forward_pre_hook(lambda module, _: came.append(module))
    text = torch.randn(1, 5, unet.config["cross_attention_dim"])
    added = {"text_embeds": torch.randn(1, 16), "time_ids": torch.zeros(1, 6)}
    more = {"added_cond_kwargs": added} if family == "sdxl" else {}
    with torch.no_grad():
        unet(torch.randn(1, 4, 8, 8), torch.tensor([300]), text, **more)
    assert came == blocks
    assert len(blocks) >= 4
    plain = [part for part in unet.modules() if part in set(blocks)]
    assert (plain == blocks) is (family == "tiny-dit")  # as they are registered is no order for a U-Net


def test_the_last_blocks_rest_and_nothing_else() -> None:
    unet: Any = models.create("tiny", seed=3, parts=("unet",)).unet.requires_grad_(False)
    names = {param: name for name, param in unet.named_parameters()}
    before = {name: param.clone() for name, param in unet.named_parameters()}
    swap_blocks(unet, 4, CPU)
    swap = swap_of(unet)
    assert swap is not None
    last = {layer for block in blocks_in_order(unet)[-4:] for layer in block.modules()}
    assert {layer for block in swap.blocks for layer in block} == {
        layer for layer in last if isinstance(layer, nn.Linear | nn.Conv2d)
    }
    assert sum(swap.block_bytes) == sum(home.nbytes for home in swap.resting)
    assert all(param.dim() > 1 for param in swap.resting)
    assert {name: param.shape for name, param in unet.named_parameters()} == {
        names[p]: p.shape for p in names
    }
    assert all(torch.equal(value, before[name]) for name, value in unet.state_dict().items())


# ---- the same numbers


WAYS = {
    "plain": (),
    "checkpointing": ("train.gradient_checkpointing=true",),
    "micro-batches": ("train.micro_batch=1",),
    "channels last": ("train.channels_last=true",),
    "bf16": ("train.precision=bf16",),
    "conv dora": ("adapter.targets=conv", "adapter.dora=true"),
    "nf4": ("model.base_precision=nf4",),
    "lokr text": ("adapter.kind=lokr", "adapter.text_encoder=true"),
}


@pytest.mark.parametrize(
    "way",
    ["plain", "nf4", *(pytest.param(way, marks=pytest.mark.nightly) for way in [*WAYS][1:] if way != "nf4")],
)
def test_a_run_learns_the_same_to_the_bit(way: str, base: Path, photos: Path, tmp_path: Path) -> None:
    plain = job_of(lora(base, photos, *WAYS[way]), tmp_path / "plain")
    swapped = job_of(lora(base, photos, SWAP, *WAYS[way]), tmp_path / "swapped")
    expected, found = learned(plain), learned(swapped)
    assert same(found, expected)
    spoilt = job_of(lora(base, photos, SWAP, *WAYS[way]), tmp_path / "spoilt")
    with torch.no_grad():  # the control: what rests is what is computed with
        first = swap_in(spoilt).resting[0]
        first.view(torch.uint8).bitwise_xor_(1) if first.dtype == torch.uint8 else first.mul_(1.01)
    assert not same(learned(spoilt), expected)


@pytest.mark.parametrize("task", ["textual-inversion", "dpo"])
@pytest.mark.nightly
def test_other_tasks_on_a_frozen_base_learn_the_same(
    task: str, base: Path, photos: Path, tmp_path: Path
) -> None:
    more: dict[str, Any] = {}
    if task == "dpo":
        for side in ("chosen", "rejected"):
            (tmp_path / "pairs" / side).mkdir(parents=True)
            for i, path in enumerate(sorted(photos.iterdir())[:4]):
                (tmp_path / "pairs" / side / f"{i}.png").write_bytes(path.read_bytes())
        more = {"data": {"resolution": 32, "folder": str(tmp_path / "pairs"), "prompt": "a dog"}}
    size = ("train.global_batch=2", "train.micro_batch=2", "train.steps=3")
    plain = job_of(recipe_for(task, base, photos, *size, **more), tmp_path / "plain")
    swapped = job_of(recipe_for(task, base, photos, SWAP, *size, **more), tmp_path / "swapped")
    assert same(learned(swapped), learned(plain))
    assert len(swap_in(swapped).blocks) == 6


def test_a_run_resumes_to_the_bit_and_the_number_may_change(base: Path, photos: Path, tmp_path: Path) -> None:
    run = check_resumes_exactly(
        lambda *over: recipe_for("lora", base, photos, SWAP, *over),
        tmp_path,
        control=("optim.lr=2e-2",),
    )
    expected = load_file(run / "adapter.safetensors")

    def again(folder: str, *overrides: str) -> dict[str, Tensor]:
        recipe = recipe_for("lora", base, photos, *overrides)
        made = train(recipe, out=tmp_path / folder, console=lambda _: None)
        return load_file(made.run / "adapter.safetensors")

    assert same(again("plain", "train.steps=4"), expected)
    assert not same(again("two", SWAP, "train.steps=2"), expected)
    assert same(again("two", "train.steps=4"), expected)
    assert export(run, tmp_path / "merged").exists()


# ---- what is held


def test_autograd_keeps_no_weight_and_counting_leaves_none_behind(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    job = job_of(lora(base, photos, SWAP), tmp_path / "run")
    plain = job_of(lora(base, photos), tmp_path / "plain")
    assert parameter_table(job.task.modules) == parameter_table(plain.task.modules)
    with job.feed(0) as batches:
        inputs = job.task.inputs(next(batches), job.device)
    assert activation_bytes(job.task, inputs) <= activation_bytes(plain.task, inputs)
    counts = []
    for one in (job, plain):
        with counting(*one.task.modules.values()) as counter:
            torch.autograd.backward(one.task.losses(counter.fake(inputs))["loss"].sum())
            counts.append(counter.result().flops)
    assert counts[0] == counts[1] > 0
    assert same(learned(job), learned(plain))  # not with what was counted


class Watch:
    """What a swap brings, in order, and how many bytes of it are there at once."""

    def __init__(self, swap: BlockSwap, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came: list[int] = []
        self.sent: list[int] = []
        self._swap, copies = swap, swap._copies
        arrive, send = copies.arrive, copies.send

        def arrived(key: object, waiting: Any) -> Any:
            self.came.append(self._index(key))
            return arrive(key, waiting)

        def begun(key: object, waiting: Any) -> None:
            self.sent.append(self._index(key))
            send(key, waiting)

        monkeypatch.setattr(copies, "arrive", arrived)
        monkeypatch.setattr(copies, "send", begun)

    def _index(self, key: object) -> int:
        return next(i for i in range(len(self._swap.blocks)) if self._swap._homes(i)[0] is key)


@pytest.mark.parametrize("checkpointing", [pytest.param("false", marks=pytest.mark.nightly), "true"])
def test_each_block_is_sent_ahead_and_the_pass_turns_at_the_last(
    checkpointing: str, base: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = f"train.gradient_checkpointing={checkpointing}"
    job = job_of(lora(base, photos, SWAP, again), tmp_path / "run")
    swap = swap_in(job)
    learned(job, 1)
    watch = Watch(swap, monkeypatch)
    learned(job, 2)
    way = [1, 2, 3, 4, 5, 4, 3, 2, 1, 0]
    assert watch.came == 2 * way
    assert [watch.sent[-1], *watch.sent[:-1]] == 2 * way  # each was on its way when it was asked for
    sizes = swap.block_bytes
    assert swap.copied_bytes == sum(sizes[i] for i in way)
    assert swap.saved_bytes == sum(sizes) - max(one + other for one, other in pairwise(sizes))


# ---- streams


def stepped(
    recipe: Recipe, run: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 2
) -> tuple[Clocked, dict[str, Tensor], TrainingSetup]:
    """Steps with blocks sent ahead on a stream of their own, watched."""
    clocked = Clocked()
    monkeypatch.setattr(accelerator, "new_stream", lambda device: clocked.copying)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: clocked.current)
    job = job_of(recipe, run)
    with job.feed(0) as batches, clocked:
        inputs = job.task.inputs(next(batches), job.device)
        found = {f"loss {k}": job.step(k, inputs).losses["loss"] for k in range(steps)}
    return clocked, found, job


@pytest.mark.parametrize(
    "more",
    [
        (),
        pytest.param(("train.gradient_checkpointing=true",), marks=pytest.mark.nightly),
        pytest.param(("model.base_precision=fp8",), marks=pytest.mark.nightly),
    ],
)
def test_blocks_sent_ahead_are_neither_read_early_nor_written_late(
    more: tuple[str, ...], base: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = job_of(lora(base, photos, *more), tmp_path / "plain")
    with plain.feed(0) as batches:
        inputs = plain.task.inputs(next(batches), plain.device)
    expected = {f"loss {k}": plain.step(k, inputs).losses["loss"] for k in range(2)}
    clocked, found, job = stepped(lora(base, photos, SWAP, *more), tmp_path / "run", monkeypatch)
    assert clocked.wrong == []
    assert clocked.copies > 40
    assert same(found, expected)
    swap = swap_in(job)
    assert clocked.most_there == sum(swap.block_bytes) - swap.saved_bytes  # two blocks
    assert clocked.most_there < 0.7 * sum(swap.block_bytes)


@pytest.mark.parametrize("wait", ["wait_event", "wait_stream"])
def test_a_wait_that_is_left_out_is_seen(
    wait: str, base: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(Stream, wait, lambda self, other: None)
    clocked, _, _ = stepped(lora(base, photos, SWAP), tmp_path / "run", monkeypatch)
    what = {"wait_event": "before its weights are there", "wait_stream": "still read"}[wait]
    assert any(what in one for one in clocked.wrong)


def test_pictures_between_steps_are_the_same_and_so_are_the_steps(
    base: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures are drawn in inference mode, whose tensors autograd refuses; DoRA's layers keep a weight."""
    dora = ("adapter.targets=conv", "adapter.dora=true", "adapter.dropout=0.1")
    found = []
    for swap in ((), (SWAP,)):
        job = job_of(lora(base, photos, *dora, *swap), tmp_path / f"run{len(swap)}")
        with job.feed(0) as batches:
            inputs = job.task.inputs(next(batches), job.device)
        made = {"before": job.step(0, inputs).losses["loss"]}
        for seed in (0, 1):
            [picture] = sample.generate(
                job.task.model, "a dog", steps=2, guidance=1.0, size=(32, 32), seed=seed, optimise="none"
            )
            made[f"picture {seed}"] = picture.latents
        found.append(made | {"after": job.step(1, inputs).losses["loss"]})
        clocked = Clocked()
        monkeypatch.setattr(accelerator, "new_stream", lambda device, clocked=clocked: clocked.copying)
        monkeypatch.setattr(accelerator, "current_stream", lambda device, clocked=clocked: clocked.current)
    for name, expected in found[0].items():  # a product may round as its factors lie in memory
        torch.testing.assert_close(found[1][name], expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(found[0]["picture 0"], found[0]["picture 1"])
    assert not torch.equal(found[0]["before"], found[0]["after"])


# ---- the plan


def test_a_plan_holds_less_where_a_card_has_memory_of_its_own(
    base: Path, photos: Path, tmp_path: Path
) -> None:
    planned = {}
    for over in ((), (SWAP,)):
        recipe = lora(base, photos, "train.micro_batch=1", "train.global_batch=1", *over)
        profile = profile_recipe(recipe.dump(), "float32", gpu=True)
        steps = [moment for moment in profile.moments if moment.stage in TRAIN_STAGES]
        planned[bool(over)] = replace(profile, moments=tuple(steps))  # a tiny model's peak is before them
    swap = swap_in(job_of(lora(base, photos, SWAP), tmp_path / "run"))
    facts = planned[True].facts
    assert facts["saved_by_swap_bytes"] == swap.saved_bytes
    assert facts["swapped_bytes"] == swap.copied_bytes
    assert planned[True].parameters == planned[False].parameters
    assert planned[True].flops(1) == planned[False].flops(1)
    made = {}
    for name in ("RTX 4090", "Apple M2"):
        where = Where(cards()[name])
        for swaps, profile in planned.items():
            made[name, swaps] = plan_training(profile, TrainJob("lora", 10, 1, 1), where, Software())
    less = made["RTX 4090", False].memory_bytes["weights"] - made["RTX 4090", True].memory_bytes["weights"]
    assert less == pytest.approx(swap.saved_bytes, rel=1e-6)
    assert made["Apple M2", True].memory_bytes == pytest.approx(made["Apple M2", False].memory_bytes)
    assert made["Apple M2", True].step_s == pytest.approx(made["Apple M2", False].step_s, rel=0.01)
    assert "saves nothing here" in made["Apple M2", True].notes[-1]
    assert "nobody has measured it" in made["RTX 4090", True].notes[-1]


def test_what_copies_take_beyond_computing_is_waited_for(base: Path, photos: Path) -> None:
    profile = profile_recipe(lora(base, photos, SWAP).dump(), "float32", gpu=True)
    slow = efficiency().with_values({("copy_bytes_s", "RTX 4090"): 1e6})
    job, card = TrainJob("lora", 10, 2, 1), cards()["RTX 4090"]
    quick, waits = (
        plan_training(profile, job, Where(card, known=known), Software()) for known in (efficiency(), slow)
    )
    passes = quick.step_s["total"] / 2
    copies = profile.facts["swapped_bytes"] / 1e6
    assert waits.step_s["communication"] == pytest.approx(
        2 * (copies - profile.facts["swapped_share"] * passes), rel=0.2
    )
    assert quick.step_s["communication"] < 0.01 * waits.step_s["communication"]
    assert "(measured)" in waits.notes[-1]


# ---- what cannot be


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        ("finetune", (), "train.blocks_to_swap: 6 with the task finetune, which trains the U-Net's own"),
        ("lora", ("adapter.kind=full",), "adapter.kind: full with train.blocks_to_swap=6"),
        ("lora", ("train.compile=whole",), "train.compile: whole with train.blocks_to_swap=6"),
        ("lora", ("train.compile=blocks",), "train.compile: blocks with train.blocks_to_swap=6"),
        ("lora", ("parallel.mode=fsdp",), "parallel.mode: fsdp with the task lora"),
        ("lora", ("train.blocks_to_swap=2",), "2, but two of them are on the card at a time"),
        ("lora", ("train.blocks_to_swap=-1",), "train.blocks_to_swap: "),
    ],
)
def test_impossible_pairs_are_refused(task: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        recipe_for(task, Path("nowhere"), Path("nowhere"), SWAP, *overrides)
    assert "\n" not in str(caught.value)


def test_a_model_of_fewer_blocks_is_refused(base: Path, photos: Path, tmp_path: Path) -> None:
    number = len(blocks_in_order(models.load(base, parts=("unet",)).unet))  # type: ignore[arg-type]
    most = job_of(lora(base, photos, f"train.blocks_to_swap={number}"), tmp_path / "all")
    assert len(swap_in(most).blocks) == number
    assert "train.blocks_to_swap saves nothing on cpu, which has no memory of its own" in most.notes
    with pytest.raises(RecipeError, match=f"{number + 1}, but the model has {number} blocks"):
        job_of(lora(base, photos, f"train.blocks_to_swap={number + 1}"), tmp_path / "more")


def test_layers_are_asked_for_by_their_blocks_alone(base: Path, photos: Path, tmp_path: Path) -> None:
    """A layer's weight is there whoever reads it, DoRA's norm too."""
    swap = swap_in(job_of(lora(base, photos, SWAP), tmp_path / "run"))
    for layers in (swap.blocks[0], swap.blocks[-1]):
        for layer in layers:
            assert isinstance(layer, MadeAnew)
            assert torch.equal(torch.as_tensor(layer.weight), layer.table["weight"])
