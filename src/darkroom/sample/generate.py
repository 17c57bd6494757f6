"""Prompts to pictures: `generate`, and the pieces it is made of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

import darkroom
from darkroom.errors import InputError, is_out_of_memory
from darkroom.hardware.accelerator import empty_cache, to_device
from darkroom.models.image_prompt import installed
from darkroom.models.reference import is_hub_id
from darkroom.models.upscaler import Upscaler, read_upscaler
from darkroom.options import MAX_SIDE
from darkroom.picture_settings import DEFAULT_STRENGTH, MAX_SEED, PLAIN_UPSCALERS, GenerateSettings
from darkroom.sample import inputs
from darkroom.sample.adapters import Adapted, Encode, Given, Named, named
from darkroom.sample.backends import open_backend
from darkroom.sample.backends.backend import Backend, torch_backend
from darkroom.sample.choice import CALL_PICTURES, Pass, second_pass, table_for, with_lcm
from darkroom.sample.control import Control, ControlledUnet, Controls
from darkroom.sample.denoise import Condition, KnownPart, Row, Stage, denoise
from darkroom.sample.memory import count_needs, optimise_within, pictures_that_fit
from darkroom.sample.optimisations.steps import interval_of
from darkroom.sample.optimisations.table import AUTO
from darkroom.sample.pictures import Picture, free_on_card
from darkroom.sample.prompt_schedule import PromptStage, composed, readings
from darkroom.sample.prompts import (
    check_text_parts,
    encode_prompts,
    guidance_embedding,
    read_parts,
    silent,
    time_ids,
)
from darkroom.sample.solvers import SolverTable

if TYPE_CHECKING:
    from darkroom.models.model import Model


LOG = logging.getLogger("darkroom")


def generate(
    model: Model,
    prompts: Sequence[str] | str,
    *,
    image: Image.Image | str | None = None,
    mask: Image.Image | str | None = None,
    adapters: Mapping[str, Given | tuple[Given, float]] | Sequence[Named] = (),
    controls: Sequence[Control] = (),
    upscale: Upscaler | str | Path | None = None,
    hires_network: Upscaler | str | Path | None = None,
    batch_rows: int | None = None,
    backend: str | Backend = "torch",
    optimise: Sequence[str] | str = AUTO,
    memory: str | int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
    notice: Callable[[str], None] = LOG.warning,
    explain: Callable[[str], None] = LOG.info,
    **settings: Any,
) -> list[Picture]:
    """Make `num` pictures of each prompt, in the order of the prompts; picture i of the call has seed + i.

    The settings are those of `GenerateSettings`. An `image` (a picture or a file) is what they start from;
    of it only what is white in the `mask` is painted anew. `adapters` are files (or `Adapter`s) by name,
    each also with a weight: blended on every picture, or chosen by prompt with `<lora:NAME:WEIGHT>`.
    `controls` are ControlNets, T2I-Adapters and IP-Adapters with their pictures. `upscale` is a network
    (ESRGAN) that makes finished pictures larger, `hires_network` one between the passes of `hires`.
    `batch_rows` bounds the pictures of one U-Net call (guidance doubles the rows in it); the pictures do
    not depend on it. `backend` computes: `torch`, `compile`, `onnx`, `openvino`, or one opened before
    (`open_backend`). `optimise` names some of `sample.optimisations`; the model stays as it is. `memory`
    ('3GB' or bytes) is what the job stays under: resident on a CPU, allocated on CUDA. `device` is where
    the work is done, if that is not where the weights lie, and `dtype` what it is done in with a limit on
    memory, if that is not the weights' type. `progress(done, total)` counts steps. What was substituted
    goes to `notice` and into each picture's parameters; what `auto` picked and why to `explain`.
    InputError for what cannot be.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    wanted = GenerateSettings.of(**settings)
    _check_seeds(wanted, len(texts))
    adapted = Adapted.of(texts, named(adapters))
    controlled = Controls.read(controls, model)
    larger, between = (_network(one) for one in (upscale, hires_network))
    opened = backend.model if isinstance(backend, Backend) else None
    with adapted.within(opened or model), installed(opened or model, controlled.in_attention):
        job = Generation(
            model,
            texts,
            wanted,
            backend,
            notice,
            image=image,
            mask=mask,
            adapted=adapted,
            controls=controlled,
            enlarger=between,
            optimise=optimise,
            memory=memory,
            device=device,
            dtype=dtype,
        )
        if job.backend.reasons:
            explain("; ".join(job.backend.reasons))
        for note in job.notes:
            notice(note)
        pictures = _pictures(job, batch_rows, progress)
    return pictures if larger is None else [_upscaled(one, larger.to(job.device)) for one in pictures]


def _network(given: Upscaler | str | Path | None) -> Upscaler | None:
    return given if given is None or isinstance(given, Upscaler) else read_upscaler(given)


def _upscaled(picture: Picture, network: Upscaler) -> Picture:
    """A finished picture as a network makes it larger; its parameters say so."""
    image = network.enlarge(picture.image)
    size = f"{image.width}x{image.height}"
    more = {"upscaler": network.name, "upscaler_sha256": network.sha256, "upscaled_size": size}
    return replace(picture, image=image, parameters={**picture.parameters, **more})


def _without_folder(optimisation: str) -> str:
    """An optimisation as it was asked for, of a folder in it the last part alone: pictures are passed on."""
    name, colon, argument = optimisation.partition(":")
    if not colon or (is_hub_id(argument) and not Path(argument).exists()):
        return optimisation
    return f"{name}:{Path(argument).name or Path(argument).resolve().name}"


def _check_characters(prompts: Sequence[str]) -> None:
    """InputError for what a command line, a file or JSON may hold and no tokenizer or PNG takes."""
    for prompt in prompts:
        if "\0" in prompt:
            at = prompt.index("\0") + 1
            raise InputError(f"a prompt whose character {at} is a NUL", mend="give it without")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            message = f"a prompt whose character {error.start + 1} is no Unicode"
            raise InputError(message, mend="give it in UTF-8") from error


def _check_seeds(settings: GenerateSettings, prompts: int) -> None:
    """InputError unless every picture has a seed that generators take."""
    if settings.variation_strength and settings.variation_seed is None:
        raise InputError("variation_strength without variation_seed", mend="give the seed to go towards")
    if (size := settings.seed_size) is not None and not 8 <= min(size) <= max(size) <= MAX_SIDE:
        given = "x".join(map(str, size))
        raise InputError(f"seed_size {given}", allowed=f"sides of 8 to {MAX_SIDE} pixels")
    if max(settings.seed, settings.variation_seed or 0) + prompts * settings.num - 1 > MAX_SEED:
        raise InputError(f"seed {settings.seed}", allowed=f"at most {MAX_SEED} for the last picture")


def _pictures(
    job: Generation, batch_rows: int | None, progress: Callable[[int, int], None] | None
) -> list[Picture]:
    """All pictures of a job, chunk by chunk."""
    done = 0
    unet = ControlledUnet(job.backend.unet, dict(enumerate(job.controls.in_attention)))

    def run(rows: list[Row]) -> None:
        """Denoise some rows together and count their steps."""
        nonlocal done
        for state in denoise(unet, rows):
            done += len(state.rows)
            if progress is not None:
                progress(done, job.num_steps)

    def chunk(start: int, count: int) -> list[Picture]:
        """Pictures whose rows are denoised together."""
        rows = [job.row(i) for i in range(start, start + count)]
        run(rows)
        if job.hires is None:
            return job.finish(start, rows)
        made: list[Picture] = []
        for first, some in _chunks(count, job.hires.rows_a_call if batch_rows is None else batch_rows):
            larger = job.enlarged(start + first, rows[first : first + some])
            run(larger)
            made += job.finish(start + first, larger)
        return made

    pictures: list[Picture] = []
    size = job.rows_a_call if batch_rows is None else batch_rows
    # In halves where the device's memory does not hold them: what was free may be no more.
    waiting = list(_chunks(job.num_pictures, size))[::-1]
    while waiting:
        start, count = waiting.pop()
        before = done
        try:
            pictures += chunk(start, count)
            continue
        except (RuntimeError, MemoryError) as error:
            if count == 1 or not is_out_of_memory(error):
                raise
        # Here the error no longer holds the tensors of the call.
        done, half = before, count // 2
        empty_cache()
        LOG.warning("no memory for %d pictures a U-Net call: %d are tried", count, half)
        waiting += [(start + half, count - half), (start, half)]
    return pictures


def _chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    if size < 1:
        raise InputError(f"batch_rows {size}", allowed="1 or more")
    for start in range(0, total, size):
        yield start, min(size, total - start)


class Generation:
    """One call of `generate`, checked and ready: table, encoded prompts, and a row for each picture.

    A server drives it row by row: `row(i)`, then `denoise` or `RunningBatch`; where `hires` is set,
    `enlarged` gives the rows of the second pass; `finish` decodes.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[str],
        settings: GenerateSettings,
        backend: str | Backend = "torch",
        notice: Callable[[str], None] = LOG.warning,
        *,
        image: Image.Image | str | None = None,
        mask: Image.Image | str | None = None,
        adapted: Adapted | None = None,
        controls: Controls | None = None,
        enlarger: Upscaler | None = None,
        optimise: Sequence[str] | str = AUTO,
        memory: str | int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        settings = with_lcm(settings, optimise)
        self.image = None if image is None else inputs.read_image(image)
        self.mask = None if mask is None else inputs.read_mask(mask)
        check_parts(model, has_mask=self.mask is not None)
        inputs.check_pictures(settings, self.image, self.mask)
        self.model, self.prompts = model, prompts
        self.adapted = adapted or Adapted.of(prompts)
        self.controls = controls or Controls()
        self.enlarger = enlarger
        _check_enlarger(settings, enlarger)
        if self.image is not None and settings.strength is None:
            strength = DEFAULT_STRENGTH if self.mask is None else 1.0
            settings = settings.model_copy(update={"strength": strength})
        self.table = table_for(model, settings)
        self.settings = settings.resolved(self.table.solver, model.guidance)
        self.size = inputs.checked_size(model, settings.size, self.image)
        self.part: inputs.MaskedRegion | None = None
        if settings.only_masked is not None and self.image is not None and self.mask is not None:
            self.size = inputs.checked_size(model, settings.size)
            self.part = inputs.MaskedRegion.around(self.image, self.mask, settings.only_masked, self.size)
            self.controls = self.controls.cropped(self.part.box, self.image.size)
            self.image, self.mask = self.part.image, self.part.mask
        self.first = Pass(model, self.table, self.size)
        self.hires = second_pass(model, self.settings, self.size)
        self.num_pictures = len(prompts) * settings.num
        if not prompts:
            raise InputError("no prompt", mend="give at least one")
        _check_characters([*prompts, settings.negative or ""])
        _check_seeds(settings, len(prompts))
        self._weights = [self._weights_of(text) for text in self.adapted.prompts]
        if isinstance(backend, str):
            backend, most = self._opened(backend, optimise, memory, device, dtype, notice)
            for taken in filter(None, (self.first, self.hires)):
                taken.most_a_call = most
        self.model = backend.model or model
        check_adapters(self.adapted, backend)
        self.controls.to(backend)
        self.backend, self.device, self.dtype = backend, backend.device, backend.dtype
        self._stages: dict[tuple[int, bool], list[Stage]] = {}
        self.positives, self.negatives, notes = self._conditions()
        self.source = self._source()
        more = [*self._size_note(), *self.adapted.notes, *self.controls.notes(self.size)]
        self.notes = [*self.table.notes, *backend.notes, *notes, *more]

    def _opened(
        self,
        name: str,
        optimise: Sequence[str] | str,
        memory: str | int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        notice: Callable[[str], None],
    ) -> tuple[Backend, int]:
        """The backend, and how many pictures may share a U-Net call."""
        if memory is None:
            backend = open_backend(name, self.model, optimise=optimise, device=device, notice=notice)
            self._follow_free_memory(backend)
            return backend, CALL_PICTURES
        if name != "torch":
            raise InputError(f"memory with backend {name}", mend="use backend torch")
        for given, what in ((self.controls.nets, "controls"), (any(self._weights), "AND in a prompt")):
            if given:
                raise InputError(f"a limit on memory with {what}", mend="leave one of them out")
        taken = self.hires or self.first
        applied, plan = optimise_within(
            self.model,
            optimise,
            memory,
            device=device,
            size=taken.size,
            pictures=min(self.num_pictures, taken.rows_a_call),
            guided=self.guidance > 1,
            dtype=dtype,
        )
        notice(plan.says())
        return torch_backend(applied), plan.pictures_a_call

    def _follow_free_memory(self, backend: Backend) -> None:
        """Where more pictures are asked for than a call has, as many as the card has memory for.

        What one takes is counted, in seconds: not for a job that makes but one call.
        """
        free = free_on_card(backend.device)
        if free is None or backend.name not in ("torch", "compile"):
            return
        for taken in filter(None, (self.first, self.hires)):
            if self.num_pictures > taken.rows_a_call:
                needs = count_needs(backend.model or self.model, taken.size)
                most = min(CALL_PICTURES, self.num_pictures)
                # A U-Net that waits in main memory comes to the card whole.
                comes = needs.weights["unet"] if "offload_model" in backend.optimised else 0
                fitting = pictures_that_fit(needs, max(0, free - comes), guided=self.guidance > 1, most=most)
                taken.least_a_call = fitting

    @property
    def rows_a_call(self) -> int:
        """Pictures for one U-Net call of the first pass."""
        return max(1, 2 * self.first.rows_a_call // max(2, self._evaluations))

    @property
    def _evaluations(self) -> int:
        """U-Net rows of a picture, at most."""
        return max(1 + max(1, len(weights)) for weights in self._weights)

    @property
    def num_steps(self) -> int:
        """Steps of all pictures together."""
        hires = len(self.hires.table) if self.hires is not None else 0
        return self.num_pictures * (len(self.table) + hires)

    def _conditions(self) -> tuple[list[Condition], list[Condition | None], list[str]]:
        """The first positive and negative condition of each prompt; `_stages` holds what follows.

        All conditions of a prompt have as many parts as the longest of them.
        """
        model, weighting = self.model, self.settings.weighting
        width = getattr(model.unet.config, "time_cond_proj_dim", None)  # type: ignore[union-attr]
        guided = [self._is_guided(bool(weights), width is not None) for weights in self._weights]
        encodes_negative = self.settings.negative is not None or not model.is_sdxl
        plans = [self._readings(text) for text in self.adapted.prompts]
        stages = [(i, stage) for i, plan in enumerate(plans) for stage in plan]
        positive_texts = [(i, text) for i, stage in stages for text in stage.prompts]
        against = [(i, stage.negative) for i, stage in stages if guided[i] and encodes_negative]
        parts: dict[int, int] = {}
        for i, text in dict.fromkeys(positive_texts + against):
            parts[i] = max(parts.get(i, 1), len(read_parts(model, text, weighting)[0]))
        skip = self.settings.clip_skip
        positives, notes = self._encoded(positive_texts, parts, skip)
        if width is not None:
            embedded = guidance_embedding(self.guidance, width).to(self.device, self.dtype)
            for condition in positives.values():
                condition.added["timestep_cond"] = embedded
        # diffusers skips layers for the prompt alone; A1111, whose syntax comes with its ways, for both.
        negatives, more = self._encoded(against, parts, skip if weighting == "a1111" else 0)

        def negative(i: int, text: str, positive: Condition) -> Condition | None:
            if not guided[i]:
                return None
            return negatives[i, text] if encodes_negative else silent(positive)

        for i, plan in enumerate(plans):
            for stage in plan:
                found, *further = (positives[i, text] for text in stage.prompts)
                made = Stage(stage.until, found, negative(i, stage.negative, found), tuple(further))
                self._stages.setdefault((i, stage.second_pass), []).append(made)
        firsts = [self._stages[i, False][0] for i in range(len(plans))]
        return [one.positive for one in firsts], [one.negative for one in firsts], [*notes, *more]

    def _is_guided(self, is_composed: bool, is_distilled: bool) -> bool:
        """Whether pictures of a prompt have evaluations with the negative one."""
        if is_composed and is_distilled:
            raise InputError(
                "AND in a prompt: this model's guidance is distilled into it", mend="write one prompt"
            )
        return not is_distilled and (is_composed or self.guidance > 1)

    def _readings(self, prompt: str) -> list[PromptStage]:
        """What is read of a prompt and when; with A1111's syntax it may change between steps."""
        calls = self.table.calls_a_step
        steps = (self.settings.steps or 1) * calls
        # The last step of a solver of two calls a step is one call, which A1111 counts as two.
        second = None if self.hires is None else len(self.hires.table) + calls - 1
        return readings(prompt, self.settings.negative or "", self.settings.weighting, steps, second)

    def _weights_of(self, prompt: str) -> tuple[float, ...]:
        """How much each of the prompts counts that AND composes; nothing where there is one."""
        if self.settings.weighting != "a1111" or len(parts := composed(prompt)) == 1:
            return ()
        return tuple(weight for _, weight in parts)

    def _encoded(
        self, texts: Sequence[tuple[int, str]], parts: Mapping[int, int], clip_skip: int
    ) -> tuple[dict[tuple[int, str], Condition], list[str]]:
        """Conditions of texts by prompt and text; equal ones that are read alike are encoded once."""
        kinds = {(parts[i], self.adapted.text_choice(i), text): i for i, text in reversed(texts)}
        asked = sorted(kinds, key=lambda kind: kinds[kind])
        if not asked:
            return {}, []
        conditions, notes = self.adapted.encode(
            self._encode(clip_skip),
            [text for _, _, text in asked],
            [count for count, _, _ in asked],
            [kinds[kind] for kind in asked],
        )
        moved = {kind: self._moved(one) for kind, one in zip(asked, conditions, strict=True)}
        return {(i, text): moved[parts[i], self.adapted.text_choice(i), text] for i, text in texts}, notes

    def _encode(self, clip_skip: int) -> Encode:
        """Prompts to conditions in this job's syntax and size."""

        def encode(prompts: Sequence[str], parts: Sequence[int]) -> tuple[list[Condition], list[str]]:
            weighting = self.settings.weighting
            return encode_prompts(
                self.model, prompts, self.size, weighting=weighting, clip_skip=clip_skip, parts=parts
            )

        return encode

    def _moved(self, condition: Condition) -> Condition:
        added = {
            name: value.to(self.device, torch.float32 if name == "time_ids" else self.dtype)
            for name, value in condition.added.items()
        }
        return Condition(condition.text_LD.to(self.device, self.dtype), added)

    def _source(self) -> inputs.StartPicture | None:
        if self.image is None:
            return None
        shows = inputs.repaints(self.model)
        return inputs.StartPicture.encoded(
            self.backend,
            self.image,
            self.mask,
            self.size,
            self.model.vae_factor,
            shows=shows,
            content=self.settings.masked_content,
        )

    def _size_note(self) -> list[str]:
        if self.image is None or self.image.size == self.size:
            return []
        given, taken = ("x".join(map(str, size)) for size in (self.image.size, self.size))
        what = "the picture" if self.part is None else "the masked part"
        return [f"{what} of {given} pixels is taken at {taken}"]

    @property
    def guidance(self) -> float:
        """The guidance scale, the default resolved."""
        assert self.settings.guidance is not None
        return self.settings.guidance

    def row(self, i: int) -> Row:
        """Picture i at its first step: noise from its own seed, drawn on the CPU as diffusers does."""
        generator = self._generator(i)
        if self.source is not None:
            strength = self.settings.strength
            assert strength is not None
            latents, known, extra = self.source.start(self.table, strength, generator, self._noise(i))
        else:
            noise = self._noise(i)(self.first.latent_shape, generator)
            latents, known, extra = noise * self.table.initial_scale, None, None
        return self._row(i, self.first, latents, generator, known, extra)

    def _generator(self, i: int) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(self.settings.seed_of(i))

    def _noise(self, i: int) -> inputs.Noise:
        """How the first noise of picture i is drawn."""
        settings, factor = self.settings, self.model.vae_factor
        size = settings.seed_size
        return inputs.Noise(
            settings.seed_of(i),
            (settings.variation_seed or 0) + i,
            settings.variation_strength,
            None if size is None else (size[1] // factor, size[0] // factor),
        )

    def _row(
        self,
        i: int,
        taken: Pass,
        latents_CHW: torch.Tensor,
        generator: torch.Generator,
        known: KnownPart | None = None,
        extra_CHW: torch.Tensor | None = None,
    ) -> Row:
        prompt = i // self.settings.num
        negative = self.negatives[prompt]
        if known is not None:
            known = KnownPart(
                to_device(known.latents_CHW, self.device),
                to_device(known.noise_CHW, self.device),
                to_device(known.mask_1HW, self.device),
            )
        return Row(
            taken.table,
            to_device(latents_CHW, self.device),
            sized(self.positives[prompt], taken.size),
            None if negative is None else sized(negative, taken.size),
            guidance=self.guidance,
            guidance_rescale=self.settings.guidance_rescale,
            guidance_interval=self._guided_steps(taken.table),
            generator=generator,
            known=known,
            extra_CHW=None if extra_CHW is None else to_device(extra_CHW, self.device),
            adapters=self.adapted.choice(prompt),
            further=tuple(sized(one, taken.size) for one in self._stages[prompt, False][0].further),
            weights=self._weights[prompt],
            stages=self._stages_of(prompt, taken),
            controls=self.controls.at(taken.size, taken.latent_shape),
        )

    def _stages_of(self, prompt: int, taken: Pass) -> tuple[Stage, ...]:
        """Of a prompt that changes between steps; nothing of one that does not."""
        stages = self._stages[prompt, taken is self.hires]
        if len(stages) == 1 and taken is self.first:
            return ()
        return tuple(
            Stage(
                stage.until,
                sized(stage.positive, taken.size),
                None if stage.negative is None else sized(stage.negative, taken.size),
                tuple(sized(one, taken.size) for one in stage.further),
            )
            for stage in stages
        )

    def _guided_steps(self, table: SolverTable) -> tuple[float, float]:
        interval = self.backend.guidance_interval
        return (0.0, 1.0) if interval is None else interval_of(table, *interval)

    def enlarged(self, start: int, rows: Sequence[Row]) -> list[Row]:
        """The second pass of rows that are done, the first of which is picture `start`.

        Each starts from its seed anew, as a picture made from the enlarged one with that seed.
        """
        assert self.hires is not None
        assert self.settings.hires is not None
        larger, made = self.hires, []
        latents_BCHW = torch.stack([row.latents_CHW for row in rows])
        by_pixels = self.settings.hires.upscaler != "latent"
        images = self.backend.decode(latents_BCHW) if by_pixels else []
        resized = torch.nn.functional.interpolate(latents_BCHW, size=larger.latent_shape[1:], mode="bilinear")
        for at in range(len(rows)):
            generator = self._generator(start + at)
            latents = resized[at].cpu()
            if by_pixels:
                network = self.enlarger
                image = images[at] if network is None else network.to(self.device).enlarge(images[at])
                pixels = inputs.to_pixels(image, larger.size)
                latents = inputs.Spread.of(self.backend, pixels).draw(generator)
            noise = self._noise(start + at)(larger.latent_shape, generator)
            first = inputs.noised(latents, noise, larger.table)
            made.append(self._row(start + at, larger, first, generator))
        return made

    def finish(self, start: int, rows: Sequence[Row]) -> list[Picture]:
        """Decode finished rows, the first of which is picture `start`."""
        latents_BCHW = torch.stack([row.latents_CHW for row in rows])
        return self.finished(start, self.backend.decode(latents_BCHW), latents_BCHW.cpu())

    def finished(
        self, start: int, images: Sequence[Image.Image], latents_BCHW: torch.Tensor
    ) -> list[Picture]:
        """Decoded pictures, the first of which is picture `start`, with what they are made with."""
        if self.image is not None and self.mask is not None and self.settings.paste:
            images = [inputs.pasted(made, self.image, self.mask) for made in images]
        if self.part is not None:
            images = [self.part.put_back(made) for made in images]
        return [Picture(image, self.parameters(start + i), latents_BCHW[i]) for i, image in enumerate(images)]

    def parameters(self, i: int) -> dict[str, Any]:
        """What picture i is made with, as plain values."""
        width, height = (self.hires or self.first).size if self.part is None else self.part.whole.size
        settings, model = self.settings, self.model
        values = {
            "prompt": self.prompts[i // settings.num],
            "negative": settings.negative or "",
            "seed": settings.seed_of(i),
            "width": width,
            "height": height,
            "steps": settings.steps,
            "guidance": self.guidance,
            "guidance_rescale": settings.guidance_rescale,
            "solver": self.table.solver,
            "eta": settings.eta,
            "karras": self.table.karras,
            "spacing": self.table.spacing,
            "model": model.name,
            "precision": self.backend.precision,
            "backend": self.backend.name,
            "optimise": [_without_folder(name) for name in self.backend.optimised],
            "notes": self.notes,
            "version": darkroom.__version__,
        }
        adapters = self.adapted.parameters(i // settings.num)
        if model.digest is not None:
            values |= {"model_file": model.digest["file"], "model_sha256": model.digest["sha256"]}
        return {**values, **({"adapters": adapters} if adapters else {}), **self._further_parameters(i)}

    def _further_parameters(self, i: int) -> dict[str, Any]:
        """Parameters that are there only where they were asked for."""
        settings = self.settings
        values: dict[str, Any] = {}
        if settings.variation_strength:
            values["variation_seed"] = (settings.variation_seed or 0) + i
            values["variation_strength"] = settings.variation_strength
        if settings.seed_size is not None:
            values["seed_width"], values["seed_height"] = settings.seed_size
        if settings.masked_content not in (None, "original"):
            values["masked_content"] = settings.masked_content
        if self.table.sigmas == "exponential":
            values["exponential"] = True
        elif self.table.sigmas not in (None, "karras"):
            values["sigmas"] = self.table.sigmas
        if settings.weighting != "none":
            values["weighting"] = settings.weighting
        if settings.clip_skip:
            values["clip_skip"] = settings.clip_skip
        if self.part is not None:
            values |= {"only_masked": settings.only_masked, "drawn_size": "x".join(map(str, self.size))}
        if self.image is not None:
            image = self.image if self.part is None else self.part.whole
            values |= {"strength": settings.strength, "image": f"{image.width}x{image.height}"}
        if self.mask is not None:
            values |= {"mask": f"{self.mask.width}x{self.mask.height}", "paste": settings.paste}
        if self.controls.nets:
            values["controls"] = self.controls.parameters()
        if settings.hires is not None:
            values["hires"] = settings.hires.model_dump()
            values["first_size"] = "x".join(map(str, self.first.size))
        return values


def _check_enlarger(settings: GenerateSettings, enlarger: Upscaler | None) -> None:
    """InputError unless there is what a second pass begins with, and nothing that none asked for."""
    wanted = None if settings.hires is None else settings.hires.upscaler
    if enlarger is None and wanted not in (None, *PLAIN_UPSCALERS):
        raise InputError(
            f"hires upscaler '{wanted}'", allowed=f"{', '.join(PLAIN_UPSCALERS)}, or a network's file"
        )
    if enlarger is not None and wanted != enlarger.name:
        raise InputError(
            f"upscaler '{enlarger.name}' for a second pass",
            mend="ask for one (hires), with this upscaler's name",
        )


def sized(condition: Condition, size: tuple[int, int]) -> Condition:
    """A condition that tells SDXL another size; of other models, the same."""
    sizes = condition.added.get("time_ids")
    if sizes is None:
        return condition
    return replace(condition, added={**condition.added, "time_ids": time_ids(size, sizes)})


def check_parts(model: Model, *, has_mask: bool) -> None:
    """InputError unless the model has what it takes to make pictures, of the kind that is asked for."""
    missing = [name for name in ("unet", "vae") if getattr(model, name) is None]
    if missing:
        raise InputError(f"the model has no {' and no '.join(missing)}", mend="load it with all its parts")
    check_text_parts(model)
    assert model.unet is not None
    takes, latents = int(model.unet.config.in_channels), model.latent_channels
    if takes == latents:
        return
    if takes != 2 * latents + 1:
        raise InputError(
            f"the U-Net takes {takes} channels and the latents have {latents}",
            allowed=f"{latents}, or {2 * latents + 1} of an inpainting U-Net",
        )
    if not has_mask:
        raise InputError(
            f"the U-Net takes {takes} channels: it repaints a part of a picture",
            mend="give the picture and a mask, white where it is painted anew",
        )


def check_adapters(adapted: Adapted, backend: Backend) -> None:
    """InputError unless the backend runs the model's own layers, which adapters change."""
    if not adapted.has_any:
        return
    if backend.name not in ("torch", "compile"):
        raise InputError(
            f"adapters with backend {backend.name}",
            allowed="torch, compile",
            mend="or merge them: darkroom export MODEL --merge ADAPTER --to FOLDER",
        )
    if adapted.bank is not None:
        adapted.bank.verify()
