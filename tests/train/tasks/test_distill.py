"""Latent consistency distillation, against the formulas of diffusers' train_lcm_distill_lora_sd.py."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import torch

from darkroom import models, sample
from darkroom.errors import RecipeError
from darkroom.recipe import make_recipe
from darkroom.train import train
from darkroom.train.jobs import Pinned, TrainingSetup
from darkroom.train.setup import make_job
from train.conftest import MakeRecipe

GUIDED = ("objective.distill.guidance_min=3", "objective.distill.guidance_max=9")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights that answer to captions."""
    path = tmp_path_factory.mktemp("base") / "model"
    models.save(models.create("tiny", seed=3), path)
    return path


def job_of(recipe_of: MakeRecipe, base: Path, *overrides: str, **extra: object) -> TrainingSetup:
    told = (f"model.base={base}", "data.resolution=32", *overrides)
    return make_job(recipe_of("distill", *told, model={"base": str(base)}, **extra), Pinned(Path("nowhere")))


def first_inputs(job: TrainingSetup) -> dict[str, torch.Tensor]:
    with job.feed(0) as batches:
        return job.task.inputs(next(batches), job.device)


def scripts_loss(
    job: TrainingSetup,
    inputs: dict[str, torch.Tensor],
    index: torch.Tensor,
    w: torch.Tensor,
    target_unet: torch.nn.Module | None = None,
    *,
    velocity: bool = False,
):
    """The loss as the script's training loop has it, w being its guidance: the scale less one. `target_unet`
    is train_lcm_distill_sd_wds.py's; `velocity` compares what diffusers' scheduler calls so.
    """
    from diffusers import DDPMScheduler

    unet = job.task.model.unet
    noise_scheduler = DDPMScheduler.from_config(job.task.model.scheduler)
    alphas_cumprod = noise_scheduler.alphas_cumprod
    alpha, sigma = alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()
    ratio = 1000 // 50
    ddim_timesteps = (torch.arange(1, 51) * ratio).round().long() - 1
    alpha_prev = torch.cat([alphas_cumprod[:1], alphas_cumprod[ddim_timesteps[:-1]]])
    start = ddim_timesteps[index]
    timesteps = torch.where(start - ratio < 0, 0, start - ratio)

    def scalings(t):
        scaled = 10.0 * t
        skip, out = 0.5**2 / (scaled**2 + 0.5**2), scaled / (scaled**2 + 0.5**2) ** 0.5
        return skip.view(-1, 1, 1, 1), out.view(-1, 1, 1, 1)

    def rows(table, t):
        return table[t].view(-1, 1, 1, 1)

    def predicted(x, t, text, unet=unet):
        eps = unet(x, t, encoder_hidden_states=text).sample
        return (x - rows(sigma, t) * eps) / rows(alpha, t), eps

    noisy = noise_scheduler.add_noise(inputs["latents"], inputs["noise"], start)
    text, (nothing, _) = inputs["text"], job.task._empty
    (skip_start, out_start), (skip, out) = scalings(start), scalings(timesteps)
    model_pred = skip_start * noisy + out_start * predicted(noisy, start, text)[0]
    with torch.no_grad():
        teacher = job.task._teacher
        cond, uncond = (predicted(noisy, start, t, teacher) for t in (text, nothing.expand_as(text)))
        x0, noise = (c + w.view(-1, 1, 1, 1) * (c - u) for c, u in zip(cond, uncond, strict=True))
        prev = alpha_prev[index].view(-1, 1, 1, 1)
        x_prev = prev.sqrt() * x0 + (1.0 - prev).sqrt() * noise
        target = skip * x_prev + out * predicted(x_prev, timesteps, text, target_unet or unet)[0]
    if velocity:  # of each picture the noise that the noisy latent has besides it
        model_pred, target = (
            noise_scheduler.get_velocity(x0, (noisy - rows(alpha, start) * x0) / rows(sigma, start), start)
            for x0 in (model_pred, target)
        )
    return (torch.sqrt((model_pred - target) ** 2 + 0.001**2) - 0.001).mean(dim=(1, 2, 3))


def test_the_loss_is_the_scripts(recipe_of: MakeRecipe, base: Path) -> None:
    """Also at the first index, whose target is the boundary; the control has another guidance."""
    job = job_of(recipe_of, base, *GUIDED)
    inputs = first_inputs(job)
    inputs["index"][0] = 0
    index, w = inputs["index"], inputs["guidance"] - 1
    assert 2 <= w.min() < w.max() <= 8
    assert len(index.unique()) > 3
    found = job.task.losses(inputs)["loss"]
    torch.testing.assert_close(found, scripts_loss(job, inputs, index, w), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found, scripts_loss(job, inputs, index, w + 1), rtol=1e-3)
    assert found.requires_grad


def test_the_target_is_the_averaged_weights_answer(recipe_of: MakeRecipe, base: Path) -> None:
    """In bf16 too, where it is a rounded copy; the controls learn from the student's own answer."""
    for precision in ("float32", "bf16"):
        told = (*GUIDED, f"train.precision={precision}", "optim.lr=0.01", "optim.warmup_steps=0")
        job = job_of(recipe_of, base, *told)
        with job.feed(0) as batches:
            for k in range(4):
                inputs = job.task.inputs(next(batches), job.device)
                before = copy.deepcopy(job.step.ema.weights())
                job.step(k, inputs)
        target = job.task._target
        assert target.dtype == job.task.model.unet.dtype
        for name, weight in target.named_parameters(prefix="unet"):
            assert torch.equal(weight, before[name].to(weight.dtype))
        if precision == "float32":
            averaged = copy.deepcopy(target)
            index, w = inputs["index"], inputs["guidance"] - 1
            found = job.task.losses(inputs)["loss"]
            expected = scripts_loss(job, inputs, index, w, averaged)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            assert not torch.allclose(found, scripts_loss(job, inputs, index, w), rtol=1e-2)
    own = job_of(recipe_of, base, *GUIDED, "objective.distill.target=student")
    assert own.task._target is None
    assert job_of(recipe_of, base, *GUIDED, "train.ema.enabled=false").task._target is None
    assert job_of(recipe_of, base, *GUIDED, adapter={"rank": 4}).task._target is None


def test_the_distance_of_velocities(recipe_of: MakeRecipe, base: Path) -> None:
    """The same answers, compared as velocities; the control compares pictures."""
    job = job_of(recipe_of, base, *GUIDED, "objective.distill.distance=velocity")
    inputs = first_inputs(job)
    index, w = inputs["index"], inputs["guidance"] - 1
    found = job.task.losses(inputs)["loss"]
    expected = scripts_loss(job, inputs, index, w, velocity=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(found, scripts_loss(job, inputs, index, w), rtol=1e-2)


def test_the_average_is_on_where_the_student_learns_from_it() -> None:
    def ema(**more: object) -> tuple[bool, float]:
        told = {
            "task": "distill",
            "model": {"base": "tiny"},
            "data": {"store": "x", "resolution": 32},
            **more,
        }
        settings = make_recipe(told).train.ema
        return settings.enabled, settings.decay

    assert ema() == (True, 0.95)
    assert ema(train={"ema": {"decay": 0.9}}) == (True, 0.9)
    others = (
        {"adapter": {"rank": 4}},
        {"objective": {"distill": {"target": "student"}}},
        {"objective": {"distill": {"method": "dmd2"}}},
        {"optim": {"name": "schedule-free"}},
    )
    assert [ema(**other)[0] for other in others] == [False] * len(others)


@pytest.fixture(scope="module")
def flowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of rectified flow."""
    path = tmp_path_factory.mktemp("flow") / "model"
    model = models.create("tiny", seed=3)
    model.scheduler = {
        "_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 2.0,
    }  # fmt: skip
    models.save(model, path)
    return path


@pytest.mark.parametrize(
    ("velocity", "interval"), [(False, None), (True, None), (False, (0.3, 3.0)), (True, (0.3, 3.0))]
)
def test_rectified_flows_loss_follows_eulers_steps(
    recipe_of: MakeRecipe, flowing: Path, velocity: bool, interval: tuple[float, float] | None
) -> None:
    """Of diffusers' scheduler, from pure noise to the picture itself; the control has another guidance, or
    guidance everywhere."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    more = [*GUIDED, f"objective.distill.distance={'velocity' if velocity else 'picture'}"]
    if interval is not None:  # so much guidance that one step of a small model shows it
        more += ["objective.distill.guidance_min=90", "objective.distill.guidance_max=99"]
        more.append(f"objective.distill.guidance_sigma_min={interval[0]}")
        more.append(f"objective.distill.guidance_sigma_max={interval[1]}")
    job = job_of(recipe_of, flowing, *more)
    inputs = first_inputs(job)
    drawn = inputs["index"]
    assert ((drawn > -1) & (drawn <= 49)).all()
    assert (drawn != drawn.round()).any()  # also between the teacher's own steps
    inputs["index"] = drawn.ceil()
    inputs["index"][:2] = torch.tensor([0, 49])
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(job.task.model.scheduler)
    assert scheduler.config.shift == 2
    text, (nothing, _) = inputs["text"], job.task._empty
    unet, target, teacher = job.task.model.unet, job.task._target, job.task._teacher
    with torch.no_grad():  # else the average is the student
        for param in target.parameters():
            param.add_(0.01 * torch.randn_like(param))

    def expected(guidance: torch.Tensor) -> torch.Tensor:
        found = []
        for i, index in enumerate(inputs["index"].int().tolist()):
            scheduler.set_timesteps(sigmas=[share / 50 for share in range(50, 0, -1)])
            scheduler.set_begin_index(49 - index)
            t, sigma = scheduler.timesteps[49 - index], scheduler.sigmas[49 - index]
            then = scheduler.sigmas[50 - index]
            noisy = (1 - sigma) * inputs["latents"][i : i + 1] + sigma * inputs["noise"][i : i + 1]
            one, none = text[i : i + 1], nothing[:1]
            online = noisy - sigma * unet(noisy, t, encoder_hidden_states=one).sample
            with torch.no_grad():
                cond, uncond = (teacher(noisy, t, encoder_hidden_states=x).sample for x in (one, none))
                if interval is not None and not interval[0] < sigma / (1 - sigma) <= interval[1]:
                    uncond = cond
                v = uncond + guidance[i] * (cond - uncond)
                earlier = scheduler.step(v, t, noisy).prev_sample
                wanted = earlier - then * target(earlier, then * 1000, encoder_hidden_states=one).sample
            apart = (online - wanted) / (sigma if velocity else 1)
            found.append((torch.sqrt(apart**2 + 0.001**2) - 0.001).mean())
        return torch.stack(found)

    found = job.task.losses(inputs)["loss"]
    torch.testing.assert_close(found, expected(inputs["guidance"]), rtol=1e-3, atol=1e-5)
    if interval is None:
        assert not torch.allclose(found, expected(inputs["guidance"] + 1), rtol=1e-2)
    else:
        interval = None
        assert not torch.allclose(found, expected(inputs["guidance"]), rtol=1e-3, atol=1e-5)
    assert job.task.points[0] < job.task.points[-1] < 1000


def test_a_distilled_flow_is_drawn_in_four_steps_here_and_opens_in_diffusers(
    recipe_of: MakeRecipe, flowing: Path, tmp_path: Path
) -> None:
    from diffusers import FlowMatchLCMScheduler

    told = [f"model.base={flowing}", "data.resolution=32", "train.steps=2", "optim.warmup_steps=0"]
    train(
        recipe_of("distill", *told, model={"base": str(flowing)}),
        out=tmp_path / "run",
        console=lambda _: None,
    )
    folder = tmp_path / "run" / "model"
    assert FlowMatchLCMScheduler.from_pretrained(folder, subfolder="scheduler").config.shift == 2.0
    drawn = sample.generate(models.load(folder), ["a red square"], seed=1)[0].parameters
    assert [drawn[key] for key in ("solver", "steps", "guidance")] == ["flow_lcm", 4, 1.0]
    with pytest.raises(RecipeError, match="timestep_scaling: 5 with rectified flow"):
        job_of(recipe_of, flowing, "objective.distill.timestep_scaling=5")


def test_a_loras_teacher_is_the_model_without_it(recipe_of: MakeRecipe, base: Path) -> None:
    """At the start both are the same model; then the teacher stays."""
    whole, lora = job_of(recipe_of, base, *GUIDED), job_of(recipe_of, base, *GUIDED, adapter={"rank": 4})
    inputs = first_inputs(lora)
    before = lora.task.losses(inputs)["loss"]
    torch.testing.assert_close(before, whole.task.losses(inputs)["loss"], rtol=1e-4, atol=1e-6)
    layers = [p for n, p in lora.task.model.unet.named_parameters() if "lora_B" in n]
    assert layers
    assert all(p.requires_grad for p in layers)

    def teachers() -> torch.Tensor:
        t = torch.full((len(inputs["noise"]),), 499)
        with torch.no_grad(), lora.task._as_teacher() as unet:
            return lora.task._call(unet, inputs["noise"], t, inputs, (inputs["text"], None))

    first = teachers()
    with torch.no_grad():
        for layer in layers:
            layer.add_(0.1)
    assert torch.equal(teachers(), first)
    assert not torch.allclose(lora.task.losses(inputs)["loss"], before, rtol=1e-3)


def test_a_distilled_folder_is_drawn_in_four_steps_without_a_word(
    recipe_of: MakeRecipe, base: Path, tmp_path: Path
) -> None:
    """And a run from its middle checkpoint ends with the same weights."""
    told = [f"model.base={base}", "data.resolution=32", "train.steps=4", "optim.warmup_steps=0"]
    recipe = recipe_of("distill", *told, model={"base": str(base)})
    train(recipe, out=tmp_path / "run", console=lambda _: None)
    folder = tmp_path / "run" / "model"
    config = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    assert (config["_class_name"], config["original_inference_steps"]) == ("LCMScheduler", 50)
    model = models.load(folder)
    picture = sample.generate(model, ["a red square"], seed=1)[0]
    assert (picture.parameters["solver"], picture.parameters["steps"]) == ("lcm", 4)
    assert picture.parameters["guidance"] == 1.0
    middle = min((tmp_path / "run" / "checkpoints").iterdir())
    train(recipe, out=tmp_path / "other", console=lambda _: None, resume=str(middle))
    first, again = (models.load(place).unet.state_dict() for place in (folder, tmp_path / "other" / "model"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    start = models.load(base).unet.state_dict()
    assert not all(torch.equal(first[name], start[name]) for name in first)


def test_an_lcm_lora_opens_in_diffusers(recipe_of: MakeRecipe, base: Path, tmp_path: Path) -> None:
    """Its U-Net there answers as darkroom's with the adapter merged, and draws with LCMScheduler."""
    from diffusers import LCMScheduler, StableDiffusionPipeline

    told = [f"model.base={base}", "data.resolution=32", "train.steps=3", "optim.warmup_steps=0"]
    recipe = recipe_of("distill", *told, model={"base": str(base)}, adapter={"rank": 2}, optim={"lr": 0.05})
    train(recipe, out=tmp_path / "run", console=lambda _: None)
    pipe = StableDiffusionPipeline.from_pretrained(base)
    inputs = (torch.randn(1, 4, 8, 8), torch.tensor(499), torch.randn(1, 77, 64))
    with torch.no_grad():
        plain = pipe.unet(*inputs).sample
        pipe.load_lora_weights(tmp_path / "run" / "adapter.safetensors")
        found = pipe.unet(*inputs).sample
        merged = models.load(base)
        models.merge(merged, models.read_adapter(tmp_path / "run" / "adapter.safetensors"))
        torch.testing.assert_close(found, merged.unet(*inputs).sample, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, plain, rtol=1e-3)
    pipe.scheduler = LCMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    drawn = pipe("a red square", num_inference_steps=4, guidance_scale=0.0, output_type="np").images
    assert drawn.std() > 0


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("objective.min_snr_gamma=5", "min_snr_gamma"),
        ("objective.distill.ddim_steps=1", "ddim_steps"),
        ("model.train_text_encoder=true", "train_text_encoder"),
        ("objective.timesteps.min=100", "objective.timesteps.min: 100 with the task distill"),
        ("objective.flow.mean=0", "objective.flow.mean: 0.0 with the task distill"),
        ("objective.distill={target: average},train.ema.enabled=false", "average without averaged weights"),
        ("objective.distill={target: average, method: dmd2}", "target average with method dmd2"),
        ("objective.distill={distance: velocity, method: dmd2}", "distance velocity with method dmd2"),
    ],
)
def test_what_cannot_be_is_refused(recipe_of: MakeRecipe, base: Path, override: str, word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        job_of(recipe_of, base, *re.split(",(?=train)", override))


def test_schedule_free_has_an_average_that_no_step_reads(recipe_of: MakeRecipe, base: Path) -> None:
    """Where it is asked for; unasked the student's own answer is the target."""
    free = {"optim": {"name": "schedule-free"}}
    with pytest.raises(RecipeError, match="average with schedule-free; allowed: student"):
        job_of(recipe_of, base, "objective.distill.target=average", **free)


def test_an_adapter_is_not_cut_among_ranks(recipe_of: MakeRecipe, base: Path) -> None:
    with pytest.raises(RecipeError, match="adapter: given with parallel.mode=fsdp; allowed: all of"):
        job_of(recipe_of, base, "parallel.mode=fsdp", adapter={"rank": 4})


def test_an_adapter_has_no_averaged_target(recipe_of: MakeRecipe, base: Path) -> None:
    with pytest.raises(RecipeError, match="average with an adapter"):
        job_of(recipe_of, base, "objective.distill.target=average", adapter={"rank": 4})
