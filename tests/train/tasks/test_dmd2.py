"""Distribution matching distillation, against the formulas of DMD2's sd_guidance.py and its sampler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from darkroom import models, sample
from darkroom.errors import RecipeError
from darkroom.plan.training import profile_recipe
from darkroom.recipe import Recipe
from darkroom.run import Run
from darkroom.train import train
from darkroom.train.jobs import Pinned, TrainingSetup, flops_per_image
from darkroom.train.setup import make_job
from train.conftest import MakeRecipe
from train.subjects import check_resumes_exactly

DMD2 = ("objective.distill.method=dmd2", "objective.distill.steps=3", "data.resolution=32")
GUIDED = ("objective.distill.guidance_min=3", "objective.distill.guidance_max=9")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights that answer to captions."""
    path = tmp_path_factory.mktemp("base") / "model"
    models.save(models.create("tiny", seed=3), path)
    return path


def recipe(recipe_of: MakeRecipe, base: Path, *overrides: str) -> Recipe:
    return recipe_of("distill", *DMD2, *overrides, model={"base": str(base)})


def job_of(recipe_of: MakeRecipe, base: Path, *overrides: str) -> TrainingSetup:
    return make_job(recipe(recipe_of, base, *overrides), Pinned(Path("nowhere")))


def first_inputs(job: TrainingSetup) -> dict[str, torch.Tensor]:
    with job.feed(0) as batches:
        return job.task.inputs(next(batches), job.device)


def with_steps(task: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the second network reads: a row's caption, and the token of the student's step."""
    token = task.modules["step_tokens"].weight[inputs["index"]]
    return torch.cat([inputs["text"], token[:, None]], dim=1)


def shaken(module: torch.nn.Module, by: float) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.add_(by * torch.randn_like(param))


def table(values: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return values[t].view(-1, 1, 1, 1)


class Published:
    """The method as its authors have it, on diffusers' scheduler and U-Nets of this job."""

    def __init__(self, job: TrainingSetup) -> None:
        from diffusers import DDPMScheduler

        self.task: Any = job.task
        self.scheduler = DDPMScheduler.from_config(job.task.model.scheduler)
        self.alpha = self.scheduler.alphas_cumprod.sqrt()
        self.sigma = (1 - self.scheduler.alphas_cumprod).sqrt()

    def x0(self, unet: Any, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        eps = unet(x, t, encoder_hidden_states=text).sample
        return (x - table(self.sigma, t) * eps) / table(self.alpha, t)

    def student(self, inputs: dict[str, torch.Tensor], row: int, steps: list[int]) -> torch.Tensor:
        """One row's picture, as LCMScheduler's sampler comes to it step by step."""
        text, x = inputs["text"][row : row + 1], inputs["noise"][row : row + 1]
        for i, step in enumerate(steps):
            t = torch.tensor([step])
            skip, out = 0.25 / ((10 * step) ** 2 + 0.25), 10 * step / ((10 * step) ** 2 + 0.25) ** 0.5
            x0 = skip * x + out * self.x0(self.task.model.unet, x, t, text)
            if i == int(inputs["index"][row]):
                return x0
            then, noise = torch.tensor([steps[i + 1]]), inputs["further"][row : row + 1, i]
            x = self.scheduler.add_noise(x0.detach(), noise, then)
        raise AssertionError

    def gradient(
        self, x: torch.Tensor, inputs: dict[str, torch.Tensor], guidance: torch.Tensor
    ) -> torch.Tensor:
        """`compute_distribution_matching_loss` of sd_guidance.py: the gradient by the student's picture."""
        t, noise, text = inputs["t_matched"], inputs["further"][:, -2], inputs["text"]
        with torch.no_grad():
            noisy, teacher = self.scheduler.add_noise(x, noise, t), self.task._teacher
            seen = with_steps(self.task, inputs)
            fake = self.x0(self.task.modules["fake_unet"], noisy, t, seen)
            cond = self.x0(teacher, noisy, t, text)
            uncond = self.x0(teacher, noisy, t, self.task._empty[0].expand_as(text))
            real = uncond + guidance.view(-1, 1, 1, 1) * (cond - uncond)
            p_real, p_fake = x - real, x - fake
            grad = (p_real - p_fake) / p_real.abs().mean(dim=[1, 2, 3], keepdim=True)
            return grad / x[0].numel()


@pytest.mark.parametrize("interval", [None, (0.5, 3.0)])
def test_the_students_gradient_is_the_formulas(
    recipe_of: MakeRecipe, base: Path, interval: tuple[float, float] | None
) -> None:
    """By every weight of the U-Net, also where the teacher is guided in an interval of noise alone; the
    control has another guidance, or guidance everywhere."""
    names = ("objective.distill.guidance_sigma_min", "objective.distill.guidance_sigma_max")
    more = [f"{name}={sigma}" for name, sigma in zip(names, interval or (0.0, "null"), strict=True)]
    job = job_of(recipe_of, base, *GUIDED, *more)
    inputs, published = first_inputs(job), Published(job)
    guidance, other = inputs["guidance"], inputs["guidance"] + 1
    if interval is not None:
        ratio = (published.sigma / published.alpha)[inputs["t_matched"]]
        inside = (interval[0] < ratio) & (ratio <= interval[1])
        assert 0 < inside.sum() < len(inside)
        guidance, other = torch.where(inside, guidance, 1.0), guidance
    unet: Any = job.task.model.unet
    shaken(job.task.modules["fake_unet"], 0.01)  # else both scores are alike without guidance
    shaken(job.task.modules["step_tokens"], 1.0)
    assert len(inputs["index"].unique()) > 1
    assert 3 <= inputs["guidance"].min() < inputs["guidance"].max() <= 9
    job.task.begin(0)
    losses = job.task.losses(inputs)
    losses["loss"].sum().backward()
    found = {name: param.grad.clone() for name, param in unet.named_parameters() if param.grad is not None}
    unet.zero_grad()
    x = torch.cat([published.student(inputs, row, [999, 679, 339]) for row in range(8)])
    for scale, is_same in ((guidance, True), (other, False)):
        (x * published.gradient(x, inputs, scale)).sum().backward(retain_graph=True)
        wanted = {name: param.grad.clone() for name, param in unet.named_parameters()}
        unet.zero_grad()
        gap = sum(float((found[name] - grad).square().sum()) for name, grad in wanted.items())
        whole = sum(float(grad.square().sum()) for grad in wanted.values())
        assert (gap / whole < 1e-6) is is_same, (gap, whole)
    square = (published.gradient(x, inputs, guidance) * x[0].numel()).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(losses["matching_loss"], 0.5 * square, rtol=1e-3, atol=1e-6)


def test_the_second_score_learns_by_denoising_at_every_step(recipe_of: MakeRecipe, base: Path) -> None:
    """At its own steps the student has no gradient, at the others both have; the teacher never has.

    It reads at which step the student drew; the control has another step's token.
    """
    job = job_of(recipe_of, base, "objective.distill.fake_updates=3")
    inputs, published = first_inputs(job), Published(job)
    shaken(job.task.modules["step_tokens"], 3.0)
    fake, unet = job.task.modules["fake_unet"], job.task.model.unet
    x = torch.cat([published.student(inputs, row, [999, 679, 339]) for row in range(8)]).detach()
    t, noise = inputs["t_learned"], inputs["further"][:, -1]
    noisy = published.scheduler.add_noise(x, noise, t)

    def error(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        seen = with_steps(job.task, inputs)
        return (fake(noisy, t, encoder_hidden_states=seen).sample - noise).square().mean(dim=(1, 2, 3))

    wanted, others = error(inputs), error(inputs | {"index": (inputs["index"] + 1) % 3})
    assert not torch.allclose(wanted, others, rtol=1e-3, atol=1e-6)
    for k, moves in enumerate((True, False, False, True)):
        job.task.begin(k)
        losses = job.task.losses(inputs)
        torch.testing.assert_close(losses["fake_loss"], wanted, rtol=1e-3, atol=1e-6)
        losses["loss"].sum().backward()
        assert any(p.grad is not None for p in unet.parameters()) is moves
        assert all(p.grad is not None for p in fake.parameters())
        assert all(p.grad is None for p in job.task._teacher.parameters())
        unet.zero_grad()
        fake.zero_grad()


def test_one_step_needs_no_token_for_it(recipe_of: MakeRecipe, base: Path) -> None:
    """The control has two."""
    for steps in (1, 2):
        job = job_of(recipe_of, base, f"objective.distill.steps={steps}")
        assert ("step_tokens" in job.task.modules) is (steps == 2)
        job.task.losses(first_inputs(job))["loss"].sum().backward()


def test_a_step_moves_the_student_at_its_turn_alone(recipe_of: MakeRecipe, base: Path) -> None:
    job = job_of(recipe_of, base, "objective.distill.fake_lr=1e-2", "optim.warmup_steps=0")
    assert {group["peak_lr"] for group in job.step.optimiser.param_groups} == {2e-3, 1e-2}
    inputs, before = first_inputs(job), {n: p.clone() for n, p in job.step.weights.masters.items()}

    def moved() -> set[str]:
        return {n.split(".")[0] for n, p in job.step.weights.masters.items() if not torch.equal(p, before[n])}

    job.step(1, inputs)
    assert moved() == {"fake_unet", "step_tokens"}
    job.step(5, inputs)
    assert moved() == {"fake_unet", "step_tokens", "unet"}


def test_the_gan_losses_gradients_are_the_formulas(recipe_of: MakeRecipe, base: Path) -> None:
    """Of softplus(-drawn) by the student's pictures, of softplus(drawn) + softplus(-real) by the weights that
    tell them apart; the control has another weight.
    """
    job = job_of(
        recipe_of, base, "objective.distill.gan_weight=0.3", "objective.distill.discriminator_weight=0.2"
    )
    inputs, task = first_inputs(job), cast(Any, job.task)
    fake, discriminator = task.modules["fake_unet"], task.modules["discriminator"]
    scheduler, t, text = Published(job).scheduler, inputs["t_matched"], with_steps(task, inputs)

    def answer(picture: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """By the U-Net's parts, without its second half."""
        emb = fake.time_embedding(fake.time_proj(t))
        h = fake.conv_in(scheduler.add_noise(picture, noise, t))
        for block in fake.down_blocks:
            given = {"encoder_hidden_states": text} if getattr(block, "has_cross_attention", False) else {}
            h, _ = block(hidden_states=h, temb=emb, **given)
        logits: torch.Tensor = discriminator(fake.mid_block(h, emb, encoder_hidden_states=text))
        return logits

    weights = [*fake.mid_block.parameters(), *fake.conv_in.parameters(), *discriminator.parameters()]
    x = torch.randn_like(inputs["latents"]).requires_grad_()
    error = task.told_apart(discriminator, x, inputs, (inputs["text"], None))
    found = torch.autograd.grad(0.2 * error.sum(), [x, *weights])
    drawn = answer(x, inputs["further"][:, -2])
    real = answer(inputs["latents"], inputs["further"][:, -1])
    apart = F.softplus(drawn) + F.softplus(-real)
    torch.testing.assert_close(error, apart, rtol=1e-4, atol=1e-6)
    by_weights = torch.autograd.grad(0.2 * apart.sum(), weights, retain_graph=True)
    torch.testing.assert_close(found[1:], by_weights, rtol=1e-3, atol=1e-6)
    (by_picture,) = torch.autograd.grad(F.softplus(-drawn).sum(), [x])
    torch.testing.assert_close(found[0], 0.3 * by_picture, rtol=1e-3, atol=1e-7)
    assert not torch.allclose(found[0], 0.2 * by_picture, rtol=1e-1)


def test_the_gan_loss_is_the_students_at_its_turn_alone(recipe_of: MakeRecipe, base: Path) -> None:
    """The control has none: the student's gradient is another, and nothing tells pictures apart."""
    gradients = []
    for more in (("objective.distill.gan_weight=1",), ()):
        job = job_of(recipe_of, base, "objective.distill.fake_updates=2", *more)
        inputs, unet = first_inputs(job), job.task.modules["unet"]
        assert ("discriminator" in job.task.modules) is bool(more)
        for k, moves in enumerate((True, False)):
            job.task.begin(k)
            losses = job.task.losses(inputs)
            losses["loss"].sum().backward()
            assert any(p.grad is not None for p in unet.parameters()) is moves
            assert ("discriminator_loss" in losses) is bool(more)
            for name, module in job.task.modules.items():
                assert name == "unet" or all(p.grad is not None for p in module.parameters())
            if moves:
                gradients.append(
                    torch.cat([p.grad.flatten() for p in unet.parameters() if p.grad is not None])
                )
            for module in job.task.modules.values():
                module.zero_grad()
    assert not torch.allclose(*gradients, rtol=1e-2)


def test_a_run_with_a_gan_loss_goes_on_as_if_it_had_not_stopped(
    recipe_of: MakeRecipe, base: Path, tmp_path: Path
) -> None:
    more = ("objective.distill.fake_updates=2", "optim.warmup_steps=0", "train.gradient_checkpointing=true")
    run = check_resumes_exactly(
        lambda *overrides: recipe(recipe_of, base, *more, "objective.distill.gan_weight=1", *overrides),
        tmp_path,
        control=("objective.distill.gan_weight=0.1",),
    )
    assert not (run / "model" / "discriminator").exists()


def test_a_resumed_run_learns_the_same_and_is_drawn_in_few_steps(
    recipe_of: MakeRecipe, base: Path, tmp_path: Path
) -> None:
    more = ("objective.distill.fake_updates=2", "optim.warmup_steps=0")
    run = check_resumes_exactly(
        lambda *overrides: recipe(recipe_of, base, *more, *overrides),
        tmp_path,
        control=("objective.distill.fake_updates=1",),
    )
    config = json.loads((run / "model" / "scheduler" / "scheduler_config.json").read_text())
    assert config["_class_name"] == "LCMScheduler"
    picture = sample.generate(models.load(run / "model"), ["a red square"], seed=1)[0]
    assert (picture.parameters["solver"], picture.parameters["steps"]) == ("lcm", 4)
    assert not (run / "model" / "fake_unet").exists()


def test_a_plan_and_the_count_of_work_know_both_kinds_of_steps(recipe_of: MakeRecipe, base: Path) -> None:
    """The teacher's and the second score's passes are counted, at the student's steps alone."""
    often, seldom = (
        profile_recipe(
            recipe(recipe_of, base, f"objective.distill.fake_updates={n}").dump(), "float32", gpu=True
        )
        for n in (1, 4)
    )
    tokens = 3 * models.load(base).unet.config.cross_attention_dim
    assert often.trained == 2 * often.parameters["unet"] + tokens == seldom.trained
    assert often.memory(2) == pytest.approx(seldom.memory(2), rel=0.02)
    full, mean = often.flops(1, "forward", "backward"), seldom.flops(1, "forward", "backward")
    assert 0.3 * full < mean < 0.8 * full
    job = job_of(recipe_of, base, "objective.distill.fake_updates=4")
    assert flops_per_image(job.task, first_inputs(job)) == pytest.approx(mean, rel=0.1)


def test_a_plan_knows_that_teachers_are_cut_too(recipe_of: MakeRecipe, base: Path) -> None:
    """Among four devices: masters, and the teacher, of which two blocks are whole."""
    counted = profile_recipe(recipe(recipe_of, base).dump(), "bf16", gpu=True)
    unet, blocks = counted.parameters["unet"], 2 * counted.facts["block_bytes"]
    whole, cut = counted.memory(2)["weights"], counted.memory(2, shards=4)["weights"]
    tokens = 3 * models.load(base).unet.config.cross_attention_dim
    assert whole - cut == 4 * (2 * unet + tokens) * 3 / 4 + (2 * unet * 3 / 4 - blocks)
    plain = recipe_of("finetune", "data.resolution=32", model={"base": str(base)}).dump()
    assert "frozen_cut_bytes" not in profile_recipe(plain, "bf16", gpu=True).facts


def test_the_work_of_lcm_is_counted_with_its_teacher(recipe_of: MakeRecipe, base: Path) -> None:
    """A run of more than a minute counts it: the teacher's weights are not the task's."""
    lcm = recipe_of("distill", "data.resolution=32", model={"base": str(base)})
    job = make_job(lcm, Pinned(Path("nowhere")))
    whole = flops_per_image(job.task, first_inputs(job))
    tune = recipe_of("finetune", "data.resolution=32", model={"base": str(base)})
    plain = make_job(tune, Pinned(Path("nowhere")))
    # Forward and backward, and besides the teacher's two rows and the student's second answer.
    assert whole == pytest.approx(2 * flops_per_image(plain.task, first_inputs(plain)), rel=0.15)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("adapter.rank=2",), "adapter: given with objective.distill.method=dmd2"),
        (("objective.distill.ddim_steps=2",), "steps 3 is more than ddim_steps 2"),
        (("objective.distill.method=lcm",), "steps with method lcm"),
        (
            ("objective.distill.method=lcm", "objective.distill.steps=4", "objective.distill.gan_weight=1"),
            "gan_weight with method lcm",
        ),
        (("objective.distill.discriminator_weight=0.1",), "discriminator_weight without gan_weight"),
        (
            ("objective.distill.guidance_sigma_min=3", "objective.distill.guidance_sigma_max=2"),
            "guidance_sigma_max 2 is not above guidance_sigma_min",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    recipe_of: MakeRecipe, base: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        job_of(recipe_of, base, *overrides)


def test_a_discriminator_needs_a_middle(recipe_of: MakeRecipe) -> None:
    hollow = recipe_of(
        "distill",
        *(*DMD2, "objective.distill.gan_weight=1"),
        model={"base": "tiny", "unet": {"mid_block_type": None}},
    )
    with pytest.raises(RecipeError, match="gan_weight: given, but the U-Net has no middle block"):
        make_job(hollow, Pinned(Path("nowhere")))


def test_the_second_score_gets_better_at_what_the_student_draws(
    recipe_of: MakeRecipe, base: Path, tmp_path: Path
) -> None:
    """On held-out captions and noise; the control's rates are next to nothing."""
    told = ("train.steps=16", "data.holdout=8", "evaluate.every=16", "checkpoint.every=16")
    for rate, falls in ((5e-3, True), (1e-9, False)):
        rates = (f"optim.lr={min(rate, 1e-6)}", f"objective.distill.fake_lr={rate}", "optim.warmup_steps=0")
        run = train(
            recipe(recipe_of, base, *told, *rates), out=tmp_path / f"{rate}", console=lambda _: None
        ).run
        losses = [row["heldout_fake_loss"] for row in Run.open(run).metrics() if "heldout_fake_loss" in row]
        assert (losses[-1] < 0.99 * losses[0]) is falls, losses


def test_of_rectified_flow_the_student_draws_as_diffusers_does(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    """And its gradient is the difference of the two scores' pictures; the controls have other noise."""
    from diffusers import FlowMatchLCMScheduler

    model = models.create("tiny", seed=3)
    kind = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 2.0}
    model.scheduler = kind
    models.save(model, tmp_path / "flow")
    job = job_of(recipe_of, tmp_path / "flow", *GUIDED)
    inputs, task = first_inputs(job), job.task
    scheduler = FlowMatchLCMScheduler.from_config(task.model.scheduler)
    scheduler.set_timesteps(sigmas=[1.0, 2 / 3, 1 / 3])
    sigmas = scheduler.sigmas

    def drawn(row: int, further: torch.Tensor) -> torch.Tensor:
        text, x = inputs["text"][row : row + 1], inputs["noise"][row : row + 1]
        for i in range(int(inputs["index"][row]) + 1):
            v = task.model.unet(x, 1000 * sigmas[i], encoder_hidden_states=text).sample
            x0 = x - sigmas[i] * v
            x = (1 - sigmas[i + 1]) * x0 + sigmas[i + 1] * further[row : row + 1, i]
        return x0

    text = (inputs["text"], None)
    with torch.no_grad():
        found = task.draw(inputs, text)
        wanted = torch.cat([drawn(row, inputs["further"]) for row in range(len(found))])
        other = torch.cat([drawn(row, -inputs["further"]) for row in range(len(found))])
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        assert int(inputs["index"].max()) > 0
        assert not torch.allclose(found, other, rtol=1e-2)
        sigma = (inputs["t_matched"] / 1000).view(-1, 1, 1, 1)
        noisy = (1 - sigma) * found + sigma * inputs["further"][:, -2]

        def picture(unet: Any, text: torch.Tensor) -> torch.Tensor:
            return noisy - sigma * unet(noisy, inputs["t_matched"], encoder_hidden_states=text).sample

        empty = task._empty[0].expand_as(inputs["text"])
        cond, uncond = (picture(task._teacher, states) for states in (inputs["text"], empty))
        real = uncond + inputs["guidance"].view(-1, 1, 1, 1) * (cond - uncond)
        gap = picture(task.modules["fake_unet"], with_steps(task, inputs)) - real
        direction = gap / (found - real).abs().mean(dim=(1, 2, 3), keepdim=True)
        torch.testing.assert_close(task.direction(found, inputs, text), direction, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(task.direction(found, inputs, text), gap, rtol=1e-2)
