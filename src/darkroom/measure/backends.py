"""`darkroom bench backends`: what computes the U-Net, each against diffusers' own float32 in turns with it.

Three tables: one U-Net call (`backends-unet`), a whole picture with guidance (`backends-picture`), and what
Python around the U-Net costs (`backends-overhead`).

Shapes: B rows, C H W latents, L tokens, D text width.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from darkroom.errors import DarkroomError, InputError
from darkroom.hardware.meters import PeakMemory
from darkroom.measure.timing import Measurement, interleave, measurement
from darkroom.options import BACKENDS
from darkroom.picture_settings import GenerateSettings
from darkroom.sample import denoise, generate
from darkroom.sample.backends import open_backend
from darkroom.sample.backends.backend import Backend
from darkroom.sample.denoise import Unet
from darkroom.sample.generate import Generation
from darkroom.sample.likeness import likeness
from darkroom.sample.optimisations.table import parse

if TYPE_CHECKING:
    from darkroom.models.model import Model

DIFFUSERS, PLAIN = "diffusers float32", "torch float32"
CASES = {
    PLAIN: ("torch", "none"),
    "torch bf16": ("torch", "bf16,auto"),
    "compile bf16": ("compile", "bf16,auto"),
    "onnx float32": ("onnx", "none"),
    "openvino float32": ("openvino", "none"),
    "openvino bf16": ("openvino", "bf16"),
    "openvino int8": ("openvino", "int8"),
}
"""Each case: the backend, and the optimisations it is opened with. Others are named by both, as
`openvino bf16,guidance_interval`."""
DEFAULT_CASES = (PLAIN, "torch bf16", "onnx float32", "openvino bf16")
PROMPT = "a photo of an astronaut riding a horse"
GUIDANCE, SOLVER = 7.5, "ddim"
"""Guidance of 1, as distilled models are drawn with, calls the U-Net with one row a picture."""
SLOW_CALL_S = 0.5
"""A U-Net call so long that the loop's overhead is small whatever is measured: one short loop then does."""


@dataclass(frozen=True)
class OpenedBackend:
    """A case ready to be called."""

    name: str
    backend: Backend
    grown_bytes: int
    """By how much the process's resident set grew at its highest while it was opened and first called."""
    warmup_s: float

    @property
    def row_settings(self) -> dict[str, Any]:
        """What a row says of it."""
        times = {f"{what}_s": round(seconds, 3) for what, seconds in self.backend.times_s.items()}
        return {"backend": self.backend.name, "precision": self.backend.precision, **times}


def bench_backends(
    model: Model,
    *,
    cases: Sequence[str] = DEFAULT_CASES,
    size: tuple[int, int] | None = None,
    steps: int = 20,
    rows: int = 1,
    repeats: int = 5,
    pictures: int = 1,
    guidance: float = GUIDANCE,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Measurement]:
    """Rows for a float32 model: a U-Net call of `rows` rows `repeats` times, `pictures` pictures of `steps`
    steps with `guidance` end to end, in turns with diffusers' pipeline, and the loop's overhead (over one
    loop of two steps where a call takes long). They come table by table, so that what was measured can be
    kept.

    A first call of each is left out and its seconds stand in `warmup_s`; exports and compiles stand in the
    settings. A case that cannot be opened here is a row that says why.
    """
    _check(model, cases, repeats, pictures)
    return _tables(model, cases, size, (steps, rows, repeats, pictures), guidance, say)


def _tables(
    model: Model,
    cases: Sequence[str],
    size: tuple[int, int] | None,
    counts: tuple[int, int, int, int],
    guidance: float,
    say: Callable[[str], None],
) -> Iterator[Measurement]:
    steps, rows, repeats, pictures = counts
    wide, high = size or (model.sample_size, model.sample_size)
    given = _inputs(model, rows, high // model.vae_factor, wide // model.vae_factor)
    settings = {"model": model.family, "size": f"{wide}x{high}", "threads": torch.get_num_threads()}
    ready: list[OpenedBackend] = []
    for name in cases:
        say(f"backends: opening {name}")
        try:
            ready.append(_opened(model, name, given, say))
        except DarkroomError as error:
            settings_of = {**settings, "backend": name}
            yield Measurement(benchmark="backends-unet", case=name, settings=settings_of, note=str(error))
    say("backends: one U-Net call")
    calls = _unet_rows(model, ready, given, repeats, {**settings, "rows": rows})
    yield from calls
    if pictures:
        say(f"backends: pictures of {steps} steps")
        case_settings = {**settings, "steps": steps, "guidance": guidance, "solver": SOLVER}
        yield from _picture_rows(model, ready, (wide, high), steps, pictures, case_settings)
    say("backends: the loop around the U-Net")
    if (calls[0].median_s or 0) > SLOW_CALL_S:
        steps, repeats = min(steps, 2), 1
    yield from _overhead_rows(model, (wide, high), steps, repeats, settings)


def _check(model: Model, cases: Sequence[str], repeats: int, pictures: int) -> None:
    for name in cases:
        _case(name)
    if repeats < 1 or pictures < 0:
        raise InputError(f"repeats {repeats}, pictures {pictures}", allowed="repeats >= 1, pictures >= 0")
    if model.unet is None or next(model.unet.parameters()).dtype != torch.float32:
        raise InputError("a U-Net that is not float32", mend="float32 is what the others are compared with")


def _case(name: str) -> tuple[str, str]:
    """Backend and optimisations of a case by its name; InputError where there is no such."""
    backend, _, names = name.partition(" ")
    if name in CASES:
        return CASES[name]
    if backend not in BACKENDS or not names:
        raise InputError(f"case '{name}'", allowed=f"{', '.join(CASES)}; or BACKEND OPTIMISATIONS")
    parse(names)
    return backend, names


def _opened(
    model: Model, name: str, given: tuple[torch.Tensor, ...], say: Callable[[str], None]
) -> OpenedBackend:
    backend_name, names = _case(name)
    before, peak = _resident_bytes(), PeakMemory("cpu")
    backend = open_backend(backend_name, model, optimise=names, notice=say)
    start = time.perf_counter()
    _call(backend.unet, given, backend.dtype)
    return OpenedBackend(name, backend, max(0, peak.bytes() - before), time.perf_counter() - start)


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _inputs(model: Model, rows: int, height: int, width: int) -> tuple[torch.Tensor, ...]:
    config: Any = model.unet.config  # type: ignore[union-attr]
    if model.is_sdxl or getattr(config, "time_cond_proj_dim", None):
        raise InputError(
            f"family {model.family}",
            allowed="SD 1 and 2",
            mend="bench optimisations and bench batch take SDXL",
        )
    generator = torch.Generator().manual_seed(0)
    x_BCHW = torch.randn(rows, config.in_channels, height, width, generator=generator)
    text_BLD = torch.randn(rows, 77, config.cross_attention_dim, generator=generator)
    return x_BCHW, torch.full((rows,), 500.0), text_BLD


@torch.inference_mode()
def _call(unet: Unet, given: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
    x_BCHW, t_B, text_BLD = given
    return unet(x_BCHW, t_B, text_BLD.to(dtype), {}).float()


def _unet_rows(
    model: Model,
    ready: Sequence[OpenedBackend],
    given: tuple[torch.Tensor, ...],
    repeats: int,
    settings: dict[str, Any],
) -> list[Measurement]:
    unet: Any = model.unet

    @torch.no_grad()  # as diffusers' own pipelines call it
    def plain() -> torch.Tensor:
        x_BCHW, t_B, text_BLD = given
        out: torch.Tensor = unet(x_BCHW, t_B, encoder_hidden_states=text_BLD, return_dict=False)[0]
        return out

    reference = plain()
    spread = reference.abs().mean()

    def error(case: OpenedBackend) -> float:
        out = _call(case.backend.unet, given, case.backend.dtype)
        return float((out - reference).abs().mean() / spread)

    errors = {case.name: error(case) for case in ready}
    turns: dict[str, Callable[[], object]] = {DIFFUSERS: plain}
    turns |= {case.name: _turn(case, given) for case in ready}
    timings = interleave(turns, repeats=repeats)
    found = [measurement("backends-unet", timings[DIFFUSERS], settings=settings)]
    for case in ready:
        settings_shown = {**settings, **case.row_settings, "mean_error": float(f"{errors[case.name]:.3g}")}
        found.append(
            measurement(
                "backends-unet",
                timings[case.name],
                baseline=timings[DIFFUSERS],
                settings=settings_shown,
                peak_memory_bytes=case.grown_bytes,
                note="memory: growth while opened and first called",
            ).model_copy(update={"warmup_s": case.warmup_s})
        )
    return found


def _turn(case: OpenedBackend, given: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    return lambda: _call(case.backend.unet, given, case.backend.dtype)


def _picture_rows(
    model: Model,
    ready: Sequence[OpenedBackend],
    size: tuple[int, int],
    steps: int,
    pictures: int,
    settings: dict[str, Any],
) -> list[Measurement]:
    pipeline = _pipeline(model)
    drawn: dict[str, Image.Image] = {}
    asked: dict[str, Any] = {"size": size, "guidance": settings["guidance"], "solver": SOLVER}

    def theirs(steps: int = steps) -> None:
        """Draw with diffusers' own pipeline and keep the picture."""
        made = pipeline(
            PROMPT,
            num_inference_steps=steps,
            guidance_scale=settings["guidance"],
            width=size[0],
            height=size[1],
            generator=torch.Generator().manual_seed(0),
        )
        drawn[DIFFUSERS] = made.images[0]

    def ours(case: OpenedBackend, steps: int = steps) -> None:
        picture = generate(model, PROMPT, backend=case.backend, steps=steps, **asked)[0]
        drawn[case.name] = picture.image

    start = time.perf_counter()
    theirs(2)
    warm = {DIFFUSERS: time.perf_counter() - start}
    for case in ready:
        start = time.perf_counter()
        ours(case, 2)
        warm[case.name] = time.perf_counter() - start
    turns: dict[str, Callable[[], object]] = {DIFFUSERS: theirs}
    turns |= {case.name: (lambda case=case: ours(case)) for case in ready}  # type: ignore[misc]
    timings = interleave(turns, repeats=pictures, warmup=0)
    reference = drawn.get(PLAIN, drawn[DIFFUSERS])
    case_settings = {case.name: case.row_settings for case in ready}
    return [
        measurement(
            "backends-picture",
            timing,
            baseline=None if name == DIFFUSERS else timings[DIFFUSERS],
            images=1,
            steps=steps,
            settings={**settings, **case_settings.get(name, {}), **_likeness_columns(drawn[name], reference)},
        ).model_copy(update={"warmup_s": warm[name]})
        for name, timing in timings.items()
    ]


def _likeness_columns(picture: Image.Image, reference: Image.Image) -> dict[str, Any]:
    found = likeness([picture], [reference])
    return {
        "psnr_db": str(found["psnr_db"]) if found["max_diff"] == 0 else round(found["psnr_db"], 2),
        "max_diff": found["max_diff"],
    }


def _pipeline(model: Model) -> Any:
    """diffusers' own pipeline around the model's parts, with DDIM as its scheduler."""
    import diffusers

    scheduler = {**model.scheduler, "_class_name": "DDIMScheduler", "clip_sample": False}
    pipeline = diffusers.StableDiffusionPipeline(
        vae=model.vae,
        unet=model.unet,
        text_encoder=model.text_encoders[0],
        tokenizer=model.tokenizers[0],
        scheduler=diffusers.DDIMScheduler.from_config(scheduler),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _overhead_rows(
    model: Model, size: tuple[int, int], steps: int, repeats: int, settings: dict[str, Any]
) -> list[Measurement]:
    """The loop from noise to latents, text encoded before: diffusers', ours around the plain U-Net, and ours
    as `generate` draws if nothing else is said. Ours tell their share outside the U-Net.
    """
    pipeline = _pipeline(model)
    asked = GenerateSettings.of(size=size, steps=steps, guidance=GUIDANCE, solver=SOLVER)
    positive, negative = pipeline.encode_prompt(PROMPT, "cpu", 1, True)
    shares: dict[str, list[float]] = {}

    def theirs() -> object:
        """Denoise with diffusers' own pipeline, to latents."""
        return pipeline(
            prompt_embeds=positive,
            negative_prompt_embeds=negative,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            width=size[0],
            height=size[1],
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )

    def ours(name: str, job: Generation) -> None:
        in_the_unet, start = [0.0], time.perf_counter()
        for _ in denoise(_clocked(job.backend.unet, in_the_unet), [job.row(0)]):
            pass
        shares.setdefault(name, []).append(1 - in_the_unet[0] / (time.perf_counter() - start))

    turns: dict[str, Callable[[], object]] = {"diffusers loop": theirs}
    for name, optimise in (("darkroom loop", "none"), ("darkroom loop, auto", "auto")):
        job = Generation(model, [PROMPT], asked, open_backend("torch", model, optimise=optimise))
        turns[name] = functools.partial(ours, name, job)
    timings = interleave(turns, repeats=repeats)
    case_settings = {**settings, "steps": steps, "guidance": GUIDANCE, "solver": SOLVER}
    return [
        measurement(
            "backends-overhead",
            timing,
            baseline=None if name not in shares else timings["diffusers loop"],
            steps=steps,
            settings=case_settings
            if name not in shares
            else {**case_settings, "share_outside_the_unet": _share(shares[name])},
        )
        for name, timing in timings.items()
    ]


def _share(found: Sequence[float]) -> float:
    """The median of all but the first, which is warm-up."""
    return float(f"{statistics.median(found[1:]):.3g}")


def _clocked(unet: Unet, seconds: list[float]) -> Unet:
    def call(
        x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        with _adding(seconds):
            return unet(x, t, text, added)

    return call


@contextlib.contextmanager
def _adding(seconds: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[0] += time.perf_counter() - start
