"""Solvers of rectified flow against diffusers' own schedulers, and in everything that drives a table."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from darkroom import models
from darkroom.errors import InputError
from darkroom.sample import denoise, generate
from darkroom.sample.choice import make_table, solvers_of
from darkroom.sample.denoise import Condition, KnownPart, Row, RunningBatch
from darkroom.sample.optimisations.steps import interval_of
from darkroom.sample.schedule import Flow
from darkroom.sample.solvers import TIMESTEP

SHAPE = (4, 8, 8)
CLASSES: dict[str, Any] = {
    "flow_euler": diffusers.FlowMatchEulerDiscreteScheduler,
    "flow_heun": diffusers.FlowMatchHeunDiscreteScheduler,
    "flow_dpmpp_2m": diffusers.DPMSolverMultistepScheduler,
}


def configured(solver: str, shift: float = 1.0) -> dict[str, Any]:
    config: dict[str, Any] = {"_class_name": CLASSES[solver].__name__, "num_train_timesteps": 1000}
    if solver == "flow_dpmpp_2m":
        flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift}
        return config | flow
    return config | {"shift": shift}


def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A smooth function of latents, position and timestep, in place of a model."""
    mixed = 0.6 * x + 0.3 * x.roll(1, -1) + 0.2 * x.flip(-2)
    return torch.sin(mixed + t.float().reshape(-1, 1, 1, 1) / 150) + 0.2 * x.roll(1, 1)


def call(x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: Any) -> torch.Tensor:
    return velocity(x, t)


def noise(seed: int = 11) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def row(table: Any, latents: torch.Tensor, **more: Any) -> Row:
    return Row(table, latents, Condition(torch.zeros(1, 1)), **more)


def ours(config: dict[str, Any], steps: int, seed: int = 11, **options: Any) -> list[torch.Tensor]:
    table = make_table(options.pop("solver", None), config, steps, **options)
    found = row(table, noise(seed) * table.initial_scale)
    return [state.latents_BCHW[0] for state in denoise(call, [found])]


def theirs(solver: str, config: dict[str, Any], steps: int) -> list[torch.Tensor]:
    scheduler = CLASSES[solver].from_config({k: v for k, v in config.items() if k != "_class_name"})
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    x = noise()[None]
    trajectory = []
    for t in scheduler.timesteps:
        x = scheduler.step(velocity(x, t), t, x, return_dict=False)[0]
        trajectory.append(x[0])
    return trajectory


def error(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The largest difference at any step, over 1e-4 * max(1, max|x|): at most 1 passes."""
    assert len(a) == len(b)
    return max(
        float((x - y).abs().max() / (1e-4 * max(1.0, float(y.abs().max()))))
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("steps", [1, 5, 20, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("solver", CLASSES)
def test_follows_diffusers(solver: str, shift: float, steps: int) -> None:
    config = configured(solver, shift)
    reference = theirs(solver, config, steps)
    assert error(ours(config, steps), reference) <= 1
    # Controls: another seed, another shift, and (after more than one step) another solver are off.
    assert error(ours(config, steps, seed=12), reference) > 100
    if steps > 1:
        assert error(ours(configured(solver, shift + 1), steps), reference) > 100
        other = "flow_heun" if solver == "flow_euler" else "flow_euler"
        last = ours({**configured("flow_euler", shift)}, steps, solver=other)[-1]
        assert error([last], [reference[-1]]) > 1


def consistency(config: dict[str, Any], steps: int, sigmas: list[float] | None = None) -> torch.Tensor:
    """What diffusers' class comes to, with fresh noise of seed 5."""
    scheduler = diffusers.FlowMatchLCMScheduler.from_config(config)
    scheduler.set_timesteps(steps, sigmas=sigmas)
    x, draws = noise()[None], torch.Generator().manual_seed(5)
    for t in scheduler.timesteps:
        x = scheduler.step(velocity(x, t), t, x, generator=draws, return_dict=False)[0]
    return x[0]


@pytest.mark.parametrize("steps", [1, 4, 7])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_few_steps_follow_diffusers_class(shift: float, steps: int) -> None:
    """On the levels that pipelines ask it for, which are ours unasked, and on its own."""
    config = {"_class_name": "FlowMatchLCMScheduler", "num_train_timesteps": 1000, "shift": shift}
    trailing = np.linspace(1, 0, steps + 1)[:-1].tolist()

    def drawn(config: dict[str, Any], **options: Any) -> torch.Tensor:
        table = make_table(None, config, steps, **options)
        assert table.solver == "flow_lcm"
        going = row(table, noise(), generator=torch.Generator().manual_seed(5))
        for _ in denoise(call, [going]):
            pass
        return going.latents_CHW

    assert error([drawn(config)], [consistency(config, steps, trailing)]) <= 1
    assert error([drawn(config, spacing="linspace")], [consistency(config, steps)]) <= 1
    if steps > 1:
        assert error([drawn(config)], [consistency(config, steps)]) > 100
        assert error([drawn({**config, "shift": 2.0})], [consistency(config, steps, trailing)]) > 100


def test_lcm_means_flow_lcm_here() -> None:
    assert make_table("lcm", configured("flow_euler"), 4).solver == "flow_lcm"


def test_a_level_is_so_much_noise_and_the_rest_picture() -> None:
    """As a share of their squares, which is what other schedules are told by."""
    known = Flow.from_config({"num_train_timesteps": 4}).alphas_cumprod
    assert known.tolist() == pytest.approx([9 / 10, 1 / 2, 1 / 10, 0.0])


def test_timesteps_given_to_the_model_are_those_of_diffusers() -> None:
    for solver, cls in CLASSES.items():
        config = configured(solver, 2.0)
        scheduler = cls.from_config({k: v for k, v in config.items() if k != "_class_name"})
        scheduler.set_timesteps(7)
        found = make_table(None, config, 7).values_SK[:, TIMESTEP]
        assert np.abs(found - scheduler.timesteps.numpy()).max() < 1e-3


def test_the_low_end_is_shifted_twice_as_by_diffusers_and_once_with_trailing() -> None:
    def shifted(sigma: float) -> float:
        return 3 * sigma / (1 + 2 * sigma)

    config = configured("flow_euler", 3.0)
    assert make_table(None, config, 20).levels_S2[-1, 1] == pytest.approx(shifted(shifted(1e-3)), rel=1e-5)
    trailing = make_table(None, config, 20, spacing="trailing").levels_S2[:, 1]
    assert trailing.tolist() == pytest.approx([shifted(i / 20) for i in range(20, 0, -1)], rel=1e-5)
    assert make_table(None, config, 20).levels_S2[0].tolist() == [0.0, 1.0]


def test_the_exact_velocity_of_one_picture_is_followed_to_it() -> None:
    """With out = (x - picture) / sigma Euler and Heun end on the picture, in any number of steps."""
    picture = noise(3)

    def exact(x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: Any) -> torch.Tensor:
        return (x - picture) / (t.reshape(-1, 1, 1, 1) / 1000)

    for solver in ("flow_euler", "flow_heun"):
        table = make_table(solver, configured("flow_euler", 2.0), 6)
        going = row(table, noise())
        for _ in denoise(exact, [going]):
            pass
        torch.testing.assert_close(going.latents_CHW, picture, atol=1e-4, rtol=0)


def test_heun_is_nearer_to_the_limit_than_euler_for_as_many_calls() -> None:
    config = configured("flow_euler")
    limit = ours(config, 1000)[-1]
    euler = (ours(config, 79)[-1] - limit).abs().max()
    heun = (ours(config, 40, solver="flow_heun")[-1] - limit).abs().max()
    assert heun < euler / 3


@pytest.mark.parametrize("solver", CLASSES)
def test_strength_takes_the_last_steps(solver: str) -> None:
    config = configured("flow_euler", 2.0)
    whole, part = (make_table(solver, config, 10, strength=share) for share in (1.0, 0.4))
    assert len(part) == (7 if solver == "flow_heun" else 4)
    assert np.array_equal(part.levels_S2, whole.levels_S2[-len(part) :])
    picture = torch.zeros(SHAPE)
    first = part.levels_S2[0, 1] * noise() + part.levels_S2[0, 0] * picture
    for _ in denoise(call, [going := row(part, first)]):
        pass
    assert torch.isfinite(going.latents_CHW).all()


def test_rows_of_other_solvers_share_a_batch() -> None:
    """Each row's way is the same alone and among rows of other tables; another row's way is not."""
    config = configured("flow_euler", 2.0)
    tables = [make_table(solver, config, steps) for solver, steps in zip(CLASSES, (4, 6, 9), strict=True)]
    tables.append(make_table("ddim", {"num_train_timesteps": 1000}, 5))
    alone = []
    for i, table in enumerate(tables):
        for _ in denoise(call, [going := row(table, noise(i))]):
            pass
        alone.append(going.latents_CHW)
    together = [row(table, noise(i)) for i, table in enumerate(tables)]
    for _ in denoise(call, together):
        pass
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.latents_CHW, other, atol=1e-5, rtol=0)
    assert (together[0].latents_CHW - alone[1]).abs().max() > 0.1


def test_what_stays_is_kept_through_heun_steps() -> None:
    picture = noise(5)
    mask = torch.zeros(1, 8, 8)
    mask[:, :, 4:] = 1
    start = noise()
    table = make_table("flow_heun", configured("flow_euler"), 6)
    going = row(table, start, known=KnownPart(picture, start, mask))
    for _ in denoise(call, [going]):
        pass
    torch.testing.assert_close(going.latents_CHW[..., :4], picture[..., :4], atol=1e-5, rtol=0)
    assert (going.latents_CHW[..., 4:] - picture[..., 4:]).abs().max() > 0.1


def test_a_guidance_interval_is_of_noise_over_picture() -> None:
    table = make_table(None, configured("flow_euler"), 10, spacing="trailing")
    assert interval_of(table, 0.3, 1.6) == (0.4, 0.8)  # sigma of 0.6 down to 0.3: ratios 1.5 to 0.43
    assert interval_of(table, 0.0, 1e6) == (0.1, 1.0)  # pure noise lies above any level


GUESSES = [
    ("ddim", {}, "solver ddim with a model of rectified flow"),
    ("flow_euler", {"use_dynamic_shifting": True}, "use_dynamic_shifting"),
    ("flow_euler", {"shift": 0.0}, "shift to 0"),
    ("flow_euler", {"prediction_type": "epsilon"}, "prediction_type 'epsilon'"),
]


@pytest.mark.parametrize(("solver", "changes", "told"), GUESSES)
def test_what_cannot_be_is_refused(solver: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        make_table(solver, configured("flow_euler") | changes, 5)


def test_spacings_and_options_that_cannot_be_are_refused() -> None:
    config = configured("flow_euler")
    for options, told in (
        ({"spacing": "leading"}, "leading with solver flow_euler"),
        ({"solver": "flow_dpmpp_2m", "spacing": "trailing"}, "trailing with solver flow_dpmpp_2m"),
        ({"eta": 0.5}, "eta 0.5"),
        ({"karras": True}, "Karras"),
    ):
        with pytest.raises(InputError, match=told):
            make_table(**{"solver": None, **options}, config=config, num_steps=5)
    with pytest.raises(InputError, match="no rectified flow"):
        make_table("flow_euler", {"num_train_timesteps": 1000}, 5)
    assert make_table("euler", config, 5).notes == (
        "solver euler is flow_euler on this model's rectified flow",
    )
    assert solvers_of(config) == (*CLASSES, "flow_lcm")
    assert "ddim" in solvers_of({})


def test_a_model_makes_pictures_alone_and_in_a_batch() -> None:
    model = models.create("tiny-dit", seed=3)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.unet.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=draw))
    made = generate(model, ["a red circle", "a horse"], steps=4, guidance=3.0)
    alone = generate(model, ["a horse"], seed=1, steps=4, guidance=3.0)
    assert made[0].parameters["solver"] == "flow_euler"
    different = np.abs(np.asarray(made[1].image, int) - np.asarray(alone[0].image, int))
    assert different.max() <= 1
    other = np.abs(np.asarray(made[0].image, int) - np.asarray(alone[0].image, int))
    assert other.max() > 1
    again = generate(model, ["a horse"], seed=1, steps=4, image=made[0].image, strength=0.5)
    assert again[0].image.size == made[0].image.size
    guided = generate(model, ["a horse"], seed=1, steps=8, guidance=9.0, optimise="guidance_interval:0.3-1.5")
    always = generate(model, ["a horse"], seed=1, steps=8, guidance=9.0)
    assert np.abs(np.asarray(guided[0].image, int) - np.asarray(always[0].image, int)).max() > 0


def test_a_batch_of_flow_rows_takes_one_call_a_step() -> None:
    calls = []

    def counted(x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: Any) -> torch.Tensor:
        calls.append(len(x))
        return velocity(x, t)

    table = make_table(None, configured("flow_euler"), 3)
    against = Condition(torch.zeros(1, 1))
    rows = [row(table, noise(i), negative=against, guidance=2.0 + i) for i in range(2)]
    batch = RunningBatch(rows)
    while batch.steps_left:
        batch.advance(counted)
    assert calls == [4, 4, 4]
