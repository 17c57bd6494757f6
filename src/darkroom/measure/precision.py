"""`darkroom bench precision`: the same noise through two precisions, as runs and as one run's intermediates.

A published comparison takes the intermediates of one 100-step run for runs of fewer steps. They are not the
same: a run of 5 steps ends in a picture, the fifth of 100 steps is nearly all noise. Both are measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL import Image

from darkroom.errors import InputError
from darkroom.measure.drawing import Workload
from darkroom.measure.optimisations import rounded
from darkroom.measure.timing import Measurement, Timing, interleave, measurement
from darkroom.picture_settings import MAX_STEPS, GenerateSettings
from darkroom.sample import denoise
from darkroom.sample.backends.backend import Backend
from darkroom.sample.generate import Generation
from darkroom.sample.likeness import likeness

STEPS = (5, 10, 20, 30, 50, 75, 100)
RUNS, INTERMEDIATES, APART = "runs", "intermediates", "runs against intermediates"


def parse_steps(text: str) -> list[int]:
    """Numbers of steps from '5,10,20', in order. InputError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_STEPS for part in parts):
        raise InputError(
            f"steps '{text}'", allowed=f"numbers of 1 to {MAX_STEPS} with commas, such as 5,10,20"
        )
    return sorted({int(part) for part in parts})


@dataclass(frozen=True)
class PicturePair:
    """Two pictures after so many steps, and how alike they are."""

    series: str
    steps: int
    first: Image.Image
    second: Image.Image
    likeness: dict[str, float]


@dataclass(frozen=True)
class Precisions:
    """A comparison: the pairs of every series, and the rows."""

    names: tuple[str, str]
    pairs: list[PicturePair]
    rows: list[Measurement]

    def series(self, name: str) -> list[PicturePair]:
        """The pairs of one series, by steps."""
        return [pair for pair in self.pairs if pair.series == name]


def compare_precisions(
    drawing: Workload,
    *,
    against: str = "bf16",
    steps: Sequence[int] = STEPS,
    repeats: int = 3,
    say: Callable[[str], None] = lambda _: None,
) -> Precisions:
    """Compare the model's own precision with another (`bf16`, `fp16`, `tf32`, `autocast`, any optimisation).

    Three series by steps: whole runs of n steps in both precisions; what both have after n steps of the
    longest run; and, in the model's own precision, the run of n steps against those intermediates.
    """
    wanted = sorted(set(steps))
    if not wanted or wanted[0] < 1 or repeats < 1:
        raise InputError(f"steps {list(steps)}, repeats {repeats}", allowed="1 or more of each")
    backends = (drawing.open("none"), drawing.open(against))
    names = (drawing.precision, against)
    longest = [_intermediates(drawing, backend, wanted) for backend in backends]
    pairs: list[PicturePair] = []
    rows: list[Measurement] = []
    for count in wanted:
        say(f"precision: {count} steps")
        runs = [drawing.run(backend, steps=count)[0].image for backend in backends]
        pairs += [
            _pair(RUNS, count, runs[1], runs[0]),
            _pair(INTERMEDIATES, count, longest[1][count], longest[0][count]),
            _pair(APART, count, runs[0], longest[0][count]),
        ]
        timings = interleave(
            {name: _job(drawing, b, count) for name, b in zip(names, backends, strict=True)},
            repeats=repeats,
            warmup=0,
            device=drawing.device,
        )
        rows += _rows(drawing, names, count, timings, pairs[-3:])
    return Precisions(names, pairs, rows)


def _job(drawing: Workload, backend: Backend, count: int) -> Callable[[], object]:
    return lambda: drawing.run(backend, steps=count)


def _intermediates(drawing: Workload, backend: Backend, steps: Sequence[int]) -> dict[int, Image.Image]:
    """The pictures decoded from the latents of one run of the most steps, after each number of steps."""
    settings = GenerateSettings.of(
        seed=drawing.seed,
        size=drawing.size,
        steps=max(steps),
        guidance=drawing.guidance,
        solver=drawing.solver,
    )
    job = Generation(drawing.model, list(drawing.prompts[:1]), settings, backend)
    found = {}
    for state in denoise(backend.unet, [job.row(0)]):
        if state.index + 1 in steps:
            found[state.index + 1] = backend.decode(state.latents_BCHW)[0]
    return found


def _pair(series: str, steps: int, first: Image.Image, second: Image.Image) -> PicturePair:
    return PicturePair(series, steps, first, second, likeness([first], [second]))


def _rows(
    drawing: Workload,
    names: tuple[str, str],
    count: int,
    timings: dict[str, Timing],
    pairs: Sequence[PicturePair],
) -> list[Measurement]:
    own, other = names
    by_series = {pair.series: pair for pair in pairs}
    rows = []
    for name, series, base in ((own, APART, None), (other, RUNS, timings[own])):
        settings = drawing.settings(series=series, against=other, **rounded(by_series[series].likeness))
        rows.append(
            measurement(
                "precision", timings[name], baseline=base, images=1, device=drawing.device,
                precision=name if name in ("bf16", "fp16") else drawing.precision,
                settings=settings | {"steps": count},
                note=f"likeness: {series}",
            )
        )  # fmt: skip
    settings = drawing.settings(
        series=INTERMEDIATES, against=other, **rounded(by_series[INTERMEDIATES].likeness)
    )
    like = rows[-1]
    rows.append(
        Measurement(
            benchmark="precision",
            case=INTERMEDIATES,
            settings=settings | {"steps": count},
            machine=like.machine,
            device=like.device,
            versions=like.versions,
            commit=like.commit,
            date=like.date,
            note="likeness after so many steps of the longest run; not timed",
        )
    )
    return rows
