"""The denoising loop: different tables in one batch, guidance that drops out, rows that come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg
from torch._subclasses.fake_tensor import FakeTensorMode

from darkroom.models.adapters.bank import SLOTS, WEIGHTS
from darkroom.options import SOLVERS
from darkroom.sample import denoise
from darkroom.sample.choice import make_table
from darkroom.sample.denoise import (
    NEGATIVE,
    Condition,
    KnownPart,
    Owner,
    Row,
    RunningBatch,
    Stage,
    Unet,
    advance,
)

CONFIG = {
    "_class_name": "DDIMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "steps_offset": 1,
}
SHAPE = (4, 6, 10)


class CountingUnet:
    """A small function of everything a U-Net is told, that keeps the size of each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(
        self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        assert x.shape[0] == t.shape[0] == text.shape[0]
        assert all(value.shape[0] == x.shape[0] for value in added.values())
        self.calls.append(x.shape[0])
        told = text.mean((1, 2)) + sum(value.mean(1) for value in added.values())
        told = told[:, None, None, None]
        return torch.sin(0.7 * x + x.roll(1, -1) * told + t[:, None, None, None] / 200)


def told(value: float) -> Condition:
    return Condition(torch.full((3, 2), value), {"pooled": torch.full((5,), value / 2)})


def row(solver: str = "ddim", steps: int = 6, seed: int = 0, **options: Any) -> Row:
    table = make_table(solver, CONFIG, steps)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(SHAPE, generator=generator) * table.initial_scale
    defaults = {"negative": told(-0.2), "guidance": 3.0}
    return Row(table, noise, told(0.1 * (seed + 1)), generator=generator, **{**defaults, **options})


def mixed() -> list[Row]:
    """Every solver, each with another number of steps, some guided, some not, some rescaled."""
    return [
        row(solver, 4 + i, i, guidance=(1.0, 3.0, 7.5)[i % 3], guidance_rescale=(0.0, 0.7)[i % 2])
        for i, solver in enumerate(SOLVERS)
    ]


def run(rows: list[Row], unet: Unet | None = None) -> list[torch.Tensor]:
    for _ in denoise(unet or CountingUnet(), rows):
        pass
    return [one.latents_CHW for one in rows]


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / max(1.0, float(b.abs().max())))


def test_a_row_does_not_depend_on_who_shares_the_batch() -> None:
    together, alone = run(mixed()), [run([one])[0] for one in mixed()]
    for a, b in zip(together, alone, strict=True):
        assert far(a, b) < 1e-5
    # Controls: each row has a picture of its own, and noise that is not from its own seed is seen.
    for i in range(len(alone)):
        assert far(alone[i], alone[i - 1]) > 0.1
    other = mixed()
    other[3].generator = torch.Generator().manual_seed(99)
    assert far(run(other)[3], alone[3]) > 0.1


class AdaptedUnet(CountingUnet):
    """Rows have adapters too, and which of a call have some is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.adapted: list[list[int]] = []

    def __call__(
        self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        slots = added.get(SLOTS, torch.zeros(len(x), 1))
        self.adapted.append([i for i, some in enumerate(slots.tolist()) if any(some)])
        plain = {name: value for name, value in added.items() if name not in (SLOTS, WEIGHTS)}
        return super().__call__(x, t + 90 * slots.sum(1), text, plain)


def test_rows_with_adapters_follow_one_another_in_a_call() -> None:
    """With those that have some last, also beside rows that are guided in part or composed of several."""

    def rows() -> list[Row]:
        composed = replace(row(seed=7), further=(told(0.9),), weights=(1.0, 0.5))
        adapted = [row("euler", seed=seed) for seed in (8, 9)]
        return [composed, *mixed(), *(replace(one, adapters=((2, 1.0),)) for one in adapted)]

    unet = AdaptedUnet()
    together = run(rows(), unet)
    alone = [run([one], AdaptedUnet())[0] for one in rows()]
    assert max(far(*pair) for pair in zip(together, alone, strict=True)) < 1e-5
    assert min(far(together[-1], other) for other in together[:-1]) > 1e-2
    assert unet.adapted[0] == list(range(unet.adapted[0][0], unet.adapted[0][0] + 4))
    run(rows()[::-1], other := AdaptedUnet())
    assert other.adapted[0][-1] - other.adapted[0][0] > 3


def test_rows_join_and_leave_between_steps() -> None:
    alone = [run([one])[0] for one in mixed()]
    rows = mixed()
    aboard = rows[:3]
    for state in denoise(CountingUnet(), aboard):
        if state.index == 1:
            aboard += rows[3:]
        if state.index == 2:
            aboard.remove(rows[1])  # leaves with its state, and comes back
        if state.index == 4:
            aboard.append(rows[1])
    assert all(one.done for one in rows)
    for one, expected in zip(rows, alone, strict=True):
        assert far(one.latents_CHW, expected) < 1e-5


def test_a_stopped_loop_goes_on_where_it_was() -> None:
    def made() -> list[Row]:
        return [*mixed(), row(seed=9, guidance=5.0, guidance_interval=(0.5, 0.9))]

    expected = run(made())
    rows = made()
    steps: Iterator[Any] = denoise(CountingUnet(), rows)
    for _ in range(3):
        state = next(steps)
    steps.close()
    assert [one.step for one in rows] == [3] * len(rows)
    assert torch.equal(rows[2].latents_CHW, state.latents_BCHW[2])
    for got, want in zip(run(rows), expected, strict=True):
        assert far(got, want) < 1e-5


def test_each_step_yields_what_it_made() -> None:
    states = list(denoise(CountingUnet(), [row(steps=5), row(steps=5, seed=1)]))
    assert [state.index for state in states] == list(range(5))
    assert states[0].latents_BCHW.shape == states[0].x0_BCHW.shape == (2, *SHAPE)
    assert not torch.equal(states[0].latents_BCHW, states[1].latents_BCHW)  # no buffer is used again
    again = list(denoise(CountingUnet(), [row(steps=5), row(steps=5, seed=1)]))
    for a, b in zip(states, again, strict=True):
        assert torch.equal(a.latents_BCHW, b.latents_BCHW)
    # DDIM with set_alpha_to_one ends on its last prediction.
    torch.testing.assert_close(states[-1].latents_BCHW, states[-1].x0_BCHW, rtol=0, atol=0.05)


def test_guidance_adds_a_row_only_where_it_is_on() -> None:
    unet = CountingUnet()
    rows = [
        row(guidance=5.0),
        row(guidance=1.0, seed=1),
        row(guidance=5.0, seed=2, negative=None),
        row(guidance=5.0, seed=3, guidance_interval=(0.5, 0.9)),
    ]
    for _ in denoise(unet, rows):
        pass
    assert unet.calls == [5, 5, 5, 6, 6, 6]


def test_a_guidance_interval_holds_its_lower_end_and_not_its_upper() -> None:
    """Steps at 0, 1/4, 2/4 and 3/4 of the way: neighbouring intervals share no step and leave none out."""
    calls = []
    for interval in ((0.0, 0.25), (0.25, 0.75), (0.75, 1.0)):
        unet = CountingUnet()
        for _ in denoise(unet, [row(steps=4, guidance_interval=interval)]):
            pass
        calls.append([rows - 1 for rows in unet.calls])
    assert calls == [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]


def test_guidance_interval_is_guidance_there_and_none_elsewhere() -> None:
    unguided, always, late = (
        [state.latents_BCHW for state in denoise(CountingUnet(), [row(**options)])]
        for options in ({"guidance": 1.0}, {}, {"guidance_interval": (0.5, 1.0)})
    )
    assert torch.equal(late[2], unguided[2])
    assert far(late[3], unguided[3]) > 0.01
    assert far(always[0], unguided[0]) > 0.01


def guided_by_hand(rescale: float) -> torch.Tensor:
    """One DDIM step with diffusers' own guidance arithmetic."""
    one = row()
    unet, x = CountingUnet(), one.latents_CHW[None]
    t = torch.tensor(one.table.timesteps[:1])

    def ask(condition: Condition) -> torch.Tensor:
        return unet(x, t, condition.text_LD[None], {"pooled": condition.added["pooled"][None]})

    text, negative = ask(one.positive), ask(told(-0.2))
    out = negative + 3.0 * (text - negative)
    if rescale:
        out = rescale_noise_cfg(out, text, rescale)
    plain = Row(one.table, one.latents_CHW, one.positive)
    advance(lambda *_: out, [plain])
    return plain.latents_CHW


@pytest.mark.parametrize("rescale", [0.0, 0.4, 1.0])
def test_guidance_and_its_rescaling_are_diffusers(rescale: float) -> None:
    one = row(guidance_rescale=rescale)
    advance(CountingUnet(), [one])
    torch.testing.assert_close(one.latents_CHW, guided_by_hand(rescale), rtol=1e-5, atol=1e-5)
    assert far(one.latents_CHW, guided_by_hand(0.7)) > 1e-3


def test_what_is_yielded_may_go_into_a_module_with_gradients() -> None:
    layer = torch.nn.Conv2d(4, 4, 1)
    for state in denoise(CountingUnet(), [row(steps=2)]):
        layer(state.x0_BCHW).sum().backward()
    assert layer.weight.grad is not None
    assert not state.latents_BCHW.requires_grad


def test_half_precision_output_is_added_up_in_float32() -> None:
    one = row()
    advance(lambda x, t, text, added: torch.ones_like(x, dtype=torch.bfloat16), [one])
    assert one.latents_CHW.dtype == torch.float32


def test_a_row_that_is_done_is_passed_over() -> None:
    one = row()
    (finished,) = run([one])
    assert list(denoise(CountingUnet(), [one])) == []
    assert torch.equal(one.latents_CHW, finished)
    with pytest.raises(ValueError, match="done"):
        RunningBatch([one])


def test_an_error_in_the_unet_leaves_the_rows_whole() -> None:
    rows = mixed()
    unet = CountingUnet()

    def failing(*args: Any) -> torch.Tensor:
        if len(unet.calls) == 2:
            raise RuntimeError("out of memory")
        return unet(*args)

    with pytest.raises(RuntimeError, match="out of memory"):
        list(denoise(failing, rows))
    assert [one.step for one in rows] == [2] * len(rows)
    for got, want in zip(run(rows), run(mixed()), strict=True):
        assert far(got, want) < 1e-5


def test_runs_under_fake_tensors() -> None:
    """What `plan` does: the very loop, without numbers."""
    tables = [make_table(solver, CONFIG, 5) for solver in ("unipc", "euler_a")]
    with FakeTensorMode():
        rows = [
            Row(table, torch.randn(SHAPE), told(0.1), told(0.2), guidance=3.0, guidance_rescale=0.5)
            for table in tables
        ]
        shapes = [tuple(state.latents_BCHW.shape) for state in denoise(CountingUnet(), rows)]
    assert shapes == [(2, *SHAPE)] * 5


def test_texts_of_several_lengths_share_a_batch() -> None:
    def rows() -> list[Row]:
        return [
            replace(row(seed=i), positive=Condition(torch.linspace(-1, 1, 2 * n).reshape(n, 2) + i,
                                                    {"pooled": torch.full((5,), 0.1 * i)}))
            for i, n in enumerate((3, 7, 5, 3))
        ]  # fmt: skip

    together, alone = run(rows()), [run([one])[0] for one in rows()]
    for i, (a, b) in enumerate(zip(together, alone, strict=True)):
        assert far(a, b) < 1e-5
        assert far(a, alone[i - 1]) > 0.1


def test_a_generator_moves_on_by_what_its_solver_draws_and_no_more() -> None:
    """LCM draws at each step but the last; also where a batch begins in the middle of a row."""
    one = row("lcm", steps=4, seed=5)
    steps = denoise(CountingUnet(), [one])
    next(steps)
    steps.close()
    run([one])
    assert one.generator is not None
    generator = torch.Generator().manual_seed(5)
    for _ in range(1 + 3):
        torch.randn(SHAPE, generator=generator)
    assert torch.equal(torch.randn(SHAPE, generator=one.generator), torch.randn(SHAPE, generator=generator))


def test_a_prompt_changes_at_its_step_wherever_the_batch_begins() -> None:
    def staged(until: int) -> Row:
        return row(steps=6, stages=(Stage(until, told(0.1), told(-0.2)), Stage(4, told(0.9), told(-0.5))))

    for until in (1, 2, 3):
        (alone,) = run([staged(until)])
        for stop in (1, 2, 3, 4):
            one = staged(until)
            steps = denoise(CountingUnet(), [one])
            for _ in range(stop):
                next(steps)
            steps.close()
            assert far(run([one])[0], alone) < 1e-5
        assert far(run([row(steps=6)])[0], alone) > 0.1
        assert far(run([staged(until - 1)])[0], alone) > 1e-3
    first, *_, last = (staged(2).conditions_at(step)[0].text_LD[0, 0].item() for step in (2, 3, 4, 5))
    assert (first, last) == pytest.approx((0.1, 0.9))  # the last holds to the end


class OwnersUnet(CountingUnet):
    """Keeps whose each row of a call was said to be, with the first number of its text."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[tuple[Row, int, float]]] = []

    def of_rows(self, owners: Sequence[Owner]) -> Unet:
        def call(x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]) -> Any:
            firsts = text[:, 0, 0].tolist()
            self.told.append([(*owner, first) for owner, first in zip(owners, firsts, strict=True)])
            return self(x, t, text, added)

        return call


@pytest.mark.parametrize("lengths", [(3, 3), (3, 5)])
def test_a_unet_is_told_whose_each_row_is(lengths: tuple[int, int]) -> None:
    """Also of a prompt composed of three, and where texts of other lengths take a call of their own."""

    def text(value: float, length: int) -> Condition:
        return Condition(torch.full((length, 2), value), {"pooled": torch.full((5,), 0.1)})

    short, long = lengths
    rows = [
        replace(row(guidance=1.0), positive=text(0.1, short), negative=text(-0.1, short)),
        replace(row(), positive=text(0.2, long), negative=text(-0.2, long)),
        replace(
            row(),
            positive=text(0.3, short),
            negative=text(-0.3, short),
            further=(text(0.4, short), text(0.5, long)),
            weights=(1.0, 0.5, -0.5),
        ),
    ]
    unet = OwnersUnet()
    advance(unet, rows)
    assert len(unet.told) == len(set(lengths))
    told = sorted(
        (rows.index(one), which, round(first, 3)) for some in unet.told for one, which, first in some
    )
    assert told == [
        (0, 0, 0.1),
        (1, NEGATIVE, -0.2),
        (1, 0, 0.2),
        (2, NEGATIVE, -0.3),
        (2, 0, 0.3),
        (2, 1, 0.4),
        (2, 2, 0.5),
    ]


def test_what_is_known_stays_to_the_last_step() -> None:
    """Behind the mask the picture itself is left in the end, without noise; before it what was painted."""
    picture, noise = torch.full(SHAPE, 0.7), torch.full(SHAPE, 5.0)
    mask = torch.zeros(1, *SHAPE[1:])
    mask[:, :, 5:] = 1
    one, free = row(steps=4, known=KnownPart(picture, noise, mask)), row(steps=4)
    run([one, free])
    assert torch.equal(one.latents_CHW[:, :, :5], picture[:, :, :5])
    assert far(one.latents_CHW[:, :, 5:], picture[:, :, 5:]) > 0.1
    assert far(free.latents_CHW[:, :, :5], picture[:, :, :5]) > 0.1
