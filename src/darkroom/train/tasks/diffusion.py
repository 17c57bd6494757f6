"""What is trained: a task gives the modules, says what it reads, and turns a batch into a loss.

The loop around a task knows nothing of diffusion. Pre-training and every kind of fine-tuning are one class,
`Diffusion`, with other parameters trained and other pictures read. `Preference` is Diffusion-DPO: an adapter
that makes pictures more like preferred ones (Wallace et al. 2023). There rows of a batch come in pairs, the
preferred picture before the other, with one caption, noise and timestep.

Captions arrive with some of them dropped already (empty), and so do prepared text states. Masks say where in
a picture the loss counts, at the size of its latents.

Shapes: B rows of a batch, b of a micro-batch, P pairs of one, C latent channels, h and w latent pixels, H and
W pixels, L tokens, D text width, P pooled width.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from darkroom.data.loader import Draw, ReadSettings
from darkroom.errors import StoreError
from darkroom.hardware.accelerator import to_device
from darkroom.models.model import Model
from darkroom.prepare.columns import sample_latents, text_states, tokenize
from darkroom.recipe.sections import DataSettings, NoiseSettings
from darkroom.sample.prompts import part_states, part_tokens, with_mean_of
from darkroom.train.objective import (
    FlowObjective,
    Objective,
    multires_noise,
    offset_noise,
    offset_strength,
    square_error,
)
from darkroom.train.tasks.repa import RoutingAndAlignment, draw_bits

if TYPE_CHECKING:
    from darkroom.evaluate.extractors import Extractor

COLUMN = "mask"


class Masks:
    """Reads a batch's masks [B, 1, h, w]: 1 where they are white, `floor` where black; 1 without one.

    They are cut and mirrored as the batch says of its pictures.
    """

    def __init__(self, column: str, *, factor: int, floor: float) -> None:
        self.column, self._factor, self._floor = column, factor, floor
        self._read = lru_cache(maxsize=4096)(self._decoded)

    def __call__(self, columns: Mapping[str, Any], size: Sequence[int]) -> Tensor:
        height, width = size
        pictures, places = columns[self.column], columns.get("cut_at")
        if places is None:
            rows = [self._read(picture, height, width) for picture in pictures]
        else:  # each time at another place: nothing to be kept
            pairs = zip(pictures, places.tolist(), strict=True)
            rows = [self._decoded(picture, height, width, (u, v)) for picture, (u, v) in pairs]
        masks_B1hw = torch.stack(rows)
        if "mirrored" in columns:
            mirrored = columns["mirrored"]
            masks_B1hw[mirrored] = masks_B1hw[mirrored].flip(-1)
        return masks_B1hw

    def _decoded(
        self, picture: bytes | None, height: int, width: int, at: tuple[float, float] = (0.5, 0.5)
    ) -> Tensor:
        if picture is None:
            return torch.ones(1, height, width)
        from darkroom.data.images import PictureError, open_picture, resize_crop

        try:
            image = open_picture(picture).convert("L").convert("RGB")
        except PictureError as error:
            raise StoreError(f"column {self.column} holds what is no picture: {error}") from error
        # Cut as the picture is, then a latent pixel's mean.
        whole = resize_crop(image, (width * self._factor, height * self._factor), crop=at)
        grey_hw = np.asarray(whole.convert("L").resize((width, height), Image.Resampling.BOX), np.float32)
        return torch.from_numpy(self._floor + (1 - self._floor) * grey_hw / 255)[None]


def alpha_of(picture: bytes) -> bytes | None:
    """A picture's transparency as a mask: what is seen is white; None where it has none."""
    from darkroom.data.images import FORMATS

    image = Image.open(io.BytesIO(picture), formats=FORMATS)
    if not image.has_transparency_data:
        return None
    return png_of(image.convert("RGBA").getchannel("A"))


def png_of(image: Image.Image) -> bytes:
    """A picture's PNG."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


Columns = Mapping[str, Any]
"""A batch's columns and draws by name: tensors with B rows, and lists of B captions."""


SIZES = ("width", "height")
"""A store's columns of pictures' sizes, which SDXL learns from."""
CACHED_CAPTIONS = 100_000
CACHED_STATES_BYTES = 2**28  # of captions whose states are kept: 1,000 of SD 1.5's
ENCODED_PIXELS = 2**22  # at a time, where pictures are encoded inline: 16 of 512 px


class Task(Protocol):
    """What the loop asks of a task."""

    model: Model
    modules: dict[str, nn.Module]  # the parts that gradients go through, by name
    rows_a_picture: int  # rows of a batch that each picture stands for
    rates: dict[str, float]  # peak learning rates by part that differ from optim.lr
    read: ReadSettings
    frozen: Sequence[nn.Module]  # what `losses` calls besides `modules`, without gradients: a teacher

    def inputs(self, columns: Columns, device: torch.device) -> dict[str, Tensor]:
        """A batch as tensors on the device, each with B rows. Frozen encoders run here, without gradients."""
        ...

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each row [b]: `loss`, which is trained on, and what else is to be logged."""
        ...

    def heldout(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each held-out row, what is measured: [b], or [b, n] with one for each of `points`."""
        ...

    @property
    def points(self) -> Sequence[int]:
        """What the columns of `heldout`'s [b, n] stand for: timesteps."""
        ...

    def measure(self, inputs: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        """What the model's configuration needs to know of its training data, such as `vae.scaling_factor`.

        Measured with the averaged weights and saved with each checkpoint.
        """
        ...


@dataclass(frozen=True)
class Reading:
    """How captions are read where not plainly: in several parts, with weights, without the last layers."""

    parts: int = 1
    weighted: bool = False
    clip_skip: int = 0

    @classmethod
    def of(cls, data: DataSettings) -> Reading:
        """As the recipe says it."""
        return cls(data.max_token_length // 75, data.weighted_captions, data.clip_skip)

    def tokens(self, model: Model, caption: str) -> tuple[Tensor, ...]:
        """Token ids [N, L] of a caption for each encoder, then the tokens' weights [N, L] for each.

        What is longer than N parts is cut off.
        """
        found = part_tokens(model, caption, "a1111" if self.weighted else "none", self.parts)
        return (*(ids for ids, _ in found), *(weights for _, weights in found))

    def states(
        self, model: Model, ids: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """States [B, N L, D] of tokens [B, N, L], as generate's; SDXL's pooled one of the first part."""
        states, pooled = [], None
        for encoder, ids_BNL, weights_BNL in zip(model.text_encoders, ids, weights, strict=True):
            rows, parts, length = ids_BNL.shape
            text, given = part_states(encoder, ids_BNL.flatten(0, 1), model.is_sdxl, self.clip_skip)
            if self.weighted:
                weights_RL1 = weights_BNL.flatten(0, 1)[..., None].to(text.dtype)
                plain = (weights_RL1 == 1).all(dim=1, keepdim=True)
                text = torch.where(plain, text, with_mean_of(text, text * weights_RL1))
            states.append(text.reshape(rows, parts * length, -1))
            pooled = given.reshape(rows, parts, *given.shape[1:])[:, 0] if model.is_sdxl else None
        return torch.cat(states, dim=-1), pooled


class Diffusion:
    """Train what of the U-Net and text encoders requires gradients to denoise latents."""

    def __init__(
        self,
        model: Model,
        objective: Objective | FlowObjective,
        read: ReadSettings,
        modules: Mapping[str, nn.Module],
        *,
        rates: Mapping[str, float] | None = None,
        noise: NoiseSettings | None = None,
        num_points: int = 8,
        encode: Callable[[Tensor], Tensor] | None = None,
        cache_text: bool = False,
        reading: Reading | None = None,
        prior_weight: float | None = None,
        masks: Masks | None = None,
        extras: RoutingAndAlignment | None = None,
        limit: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        """`modules` are the U-Net and the text encoders that gradients go through, by part.

        `rates` are peak learning rates by part. `encode` turns pixels [B, 3, H, W] into moments
        [B, 2, C, h, w] where latents are not read.
        `cache_text` keeps the states of captions, encoded one by one. `reading` is how else than plainly.
        With `prior_weight` every other row is
        a picture of the class, whose loss has this weight. `extras` are what a transformer is trained with.
        `limit` is done to the trained weights after each step.
        """
        assert model.unet is not None
        self._noise = noise or NoiseSettings()
        more: dict[Draw, float] = {
            "offset": self._noise.offset,
            "offset_strength": self._noise.offset_random_strength,
            "multires": self._noise.multires_iterations,
            "perturbation": self._noise.perturbation,
            "perturbation_strength": self._noise.perturbation_random_strength,
        }
        draws: tuple[Draw, ...] = ("noise", "posterior", "u", *(name for name, used in more.items() if used))
        multires = self._noise.multires_iterations, self._noise.multires_discount
        self.model, self.objective = model, objective
        self.read = read.model_copy(update={"draws": draws, "multires": multires})
        self.modules: dict[str, nn.Module] = {**modules, **(extras.modules if extras else {})}
        self._extras = extras
        self.limit = limit or (lambda masters: None)
        self.frozen: Sequence[nn.Module] = ()
        text = [name for name in modules if name != "unet"]
        self.rates: dict[str, float] = dict(rates or {})
        self.trains_text = bool(text)
        self.rows_a_picture = 1 if prior_weight is None else 2
        self._prior_weight, self._masks = prior_weight, masks
        self._state_cache: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._caches_text, self._reading = cache_text and not text, reading
        self._encode = encode
        total = objective.num_timesteps
        self._points = [int((i + 0.5) * total / num_points) for i in range(num_points)]
        self._token_cache: dict[str, tuple[Tensor, ...]] = {}

    @property
    def points(self) -> Sequence[int]:
        return self._points

    @property
    def extractor(self) -> Extractor | None:
        """What a transformer's tokens are aligned with."""
        return None if self._extras is None else self._extras.extractor

    @property
    def rested_text(self) -> list[str]:
        """Text encoders that do not run at each step."""
        stored = self.read.text is not None or self._caches_text
        names = (name for name in self.model.modules if name.startswith("text_encoder"))
        return [name for name in names if name not in self.modules] if stored else []

    def inputs(self, columns: Columns, device: torch.device) -> dict[str, Tensor]:
        """Latents and noise [B, C, h, w], timesteps [B] and text states [B, L, D] on the device."""
        drawn = {name: to_device(columns[name], device) for name in self.read.draws if name != "u"}
        moments_B2Chw = to_device(self._moments(columns), device)
        assert self.model.vae is not None
        latents_BChw = sample_latents(moments_B2Chw, drawn["posterior"], self.model.latent_scaling)
        noise_BChw = drawn["noise"]
        if "offset" in drawn:
            strength_B111 = offset_strength(
                latents_BChw, self._noise.offset, drawn.get("offset_strength"), self._noise.adaptive_scale
            )
            noise_BChw = offset_noise(noise_BChw, drawn["offset"], strength_B111)
        if "multires" in drawn:
            noise_BChw = multires_noise(noise_BChw, drawn["multires"])
        u_B = columns["u"]  # float64, which not every accelerator takes: it stays where it was drawn
        inputs = {
            "latents": latents_BChw,
            "noise": noise_BChw,
            "t": to_device(self.objective.timesteps(u_B), device),
        }
        if self._extras is not None and self._extras.routes:
            inputs["draw_bits"] = to_device(draw_bits(u_B), device)
        if "perturbation" in drawn:
            inputs["perturbation"] = drawn["perturbation"]
        if "perturbation_strength" in drawn:
            inputs["perturbation"] = inputs["perturbation"] * drawn["perturbation_strength"]
        inputs |= self._text(columns, device)
        if self.model.is_sdxl:
            target = (
                latents_BChw.shape[-2] * self.model.vae_factor,
                latents_BChw.shape[-1] * self.model.vae_factor,
            )
            inputs["time_ids"] = to_device(size_conditioning(columns, target), device)
        if "loss_weight" in columns:
            inputs["loss_weight"] = to_device(columns["loss_weight"], device).float()
        if "is_prior" in columns:
            inputs["is_prior"] = to_device(columns["is_prior"], device).float()
        if self._extras is not None and self._extras.extractor is not None:
            pixels_B3HW = to_device(columns["pixels"], device)
            inputs["features"] = self._extras.features(pixels_B3HW, self._tokens_of(latents_BChw))
        if self._masks is not None:
            inputs["mask"] = to_device(self._masks(columns, latents_BChw.shape[-2:]), device)
        return inputs

    def _moments(self, columns: Columns) -> Tensor:
        if self._encode is None or "moments" in columns:  # an online feed has encoded them
            moments: Tensor = columns["moments"]
            return moments
        pixels_B3HW: Tensor = columns["pixels"]
        rows = max(1, ENCODED_PIXELS // (pixels_B3HW.shape[-1] * pixels_B3HW.shape[-2]))
        return torch.cat([self._encode(some) for some in torch.split(pixels_B3HW, rows)])

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each row's loss [B], weighted; with class pictures as DreamBooth's prior preservation has it."""
        t_b = inputs["t"]
        if self._extras is not None:
            return self._losses_with(self._extras, inputs, t_b)
        out_bChw, target_bChw = self._predict(inputs, t_b)
        loss_b = self.objective.loss(out_bChw, target_bChw, t_b, inputs.get("mask"))
        if "loss_weight" in inputs:
            loss_b = loss_b * inputs["loss_weight"]
        if self._prior_weight is None or "is_prior" not in inputs:
            return {"loss": loss_b}
        # Half of the rows are the subject's: the mean over all rows of twice a half's losses is its own mean.
        prior_b = 2 * loss_b * inputs["is_prior"]
        subject_b = 2 * loss_b - prior_b
        return {
            "loss": subject_b + self._prior_weight * prior_b,
            "subject_loss": subject_b,
            "prior_loss": prior_b,
        }

    def _losses_with(
        self, extras: RoutingAndAlignment, inputs: Mapping[str, Tensor], t_b: Tensor
    ) -> dict[str, Tensor]:
        """With tokens routed past blocks, and a block's tokens aligned."""
        tokens = self._tokens_of(inputs["latents"])
        keep_bK = extras.keep(inputs.get("draw_bits"), tokens[0] * tokens[1])
        (out_bChw, *tapped), target_bChw = self._answer(inputs, t_b, **extras.arguments(keep_bK))
        masks = [m for m in (inputs.get("mask"), extras.mask(keep_bK, tokens)) if m is not None]
        mask = masks[0] * masks[-1] if len(masks) > 1 else next(iter(masks), None)
        loss_b = self.objective.loss(out_bChw, target_bChw, t_b, mask)
        if not tapped:
            return {"loss": loss_b}
        align_b = extras.distance(tapped[0], inputs["features"], keep_bK)
        return {
            "loss": loss_b + extras.align.weight * align_b,
            "denoise_loss": loss_b,
            "align_loss": align_b,
        }

    def _tokens_of(self, latents_bChw: Tensor) -> tuple[int, int]:
        """Rows and columns of a transformer's tokens."""
        assert self._extras is not None
        height, width = latents_bChw.shape[-2:]
        return height // self._extras.patch, width // self._extras.patch

    def heldout(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each row's mean squared error [B], and [B, n] at fixed points of the schedule."""
        errors = []
        for point in self._points:
            t_b = self.objective.at(point, inputs["t"])
            plain = {name: tensor for name, tensor in inputs.items() if name != "perturbation"}
            errors.append(square_error(*self._predict(plain, t_b), inputs.get("mask")))
        errors_bn = torch.stack(errors, dim=1)
        return {"heldout_loss": errors_bn.mean(dim=1), "heldout_loss_by_timestep": errors_bn}

    def measure(self, inputs: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        return {}

    def _predict(self, inputs: Mapping[str, Tensor], t_b: Tensor) -> tuple[Tensor, Tensor]:
        (out_bChw, *_), target_bChw = self._answer(inputs, t_b)
        return out_bChw, target_bChw

    def _answer(
        self, inputs: Mapping[str, Tensor], t_b: Tensor, **more: Any
    ) -> tuple[Sequence[Tensor], Tensor]:
        """All that the denoiser gives back, what is predicted first; and the target."""
        latents_bChw, noise_bChw = inputs["latents"], inputs["noise"]
        unet: Any = self.model.unet
        text_bLD, pooled_bD = self._states(inputs)
        added = {"text_embeds": pooled_bD, "time_ids": inputs["time_ids"]} if self.model.is_sdxl else None
        added_bChw = noise_bChw
        if "perturbation" in inputs:
            added_bChw = noise_bChw + self._noise.perturbation * inputs["perturbation"]
        noisy_bChw = self.objective.add_noise(latents_bChw, added_bChw, t_b)
        found: Sequence[Tensor] = unet(
            noisy_bChw.to(unet.dtype),
            t_b,
            encoder_hidden_states=text_bLD.to(unet.dtype),
            added_cond_kwargs=added,
            return_dict=False,
            **more,
        )
        return found, self.objective.target(latents_bChw, noise_bChw, t_b)

    # ---- text

    def _text(self, columns: Columns, device: torch.device) -> dict[str, Tensor]:
        if "text" in columns:
            return {name: to_device(columns[name], device) for name in ("text", "pooled") if name in columns}
        if self._caches_text:
            return self._cached(columns["caption"], device)
        rows = self._tokens(columns["caption"])
        ids = self._named(rows, device)
        if self.trains_text:
            return ids
        with torch.no_grad():
            text_BLD, pooled_BD = self._encoded(ids)
        return {"text": text_BLD} if pooled_BD is None else {"text": text_BLD, "pooled": pooled_BD}

    def _cached(self, captions: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        """States of captions, each encoded by itself, so that they do not depend on who shares the batch."""
        held = sum(states.nbytes for states, _ in self._state_cache.values())
        if held > CACHED_STATES_BYTES:
            self._state_cache.clear()
        for caption in dict.fromkeys(captions):
            if caption not in self._state_cache:
                ids = self._named(self._tokens([caption]), device)
                with torch.no_grad():
                    self._state_cache[caption] = self._encoded(ids)
        states, pooled = zip(*(self._state_cache[caption] for caption in captions), strict=True)
        found = {"text": torch.cat(states)}
        return found if pooled[0] is None else found | {"pooled": torch.cat(pooled)}

    def _tokens(self, captions: Sequence[str]) -> list[tuple[Tensor, ...]]:
        """Token ids [L] of each caption for each text encoder; captions come round every epoch."""
        if len(self._token_cache) > CACHED_CAPTIONS:
            self._token_cache.clear()
        new = [caption for caption in dict.fromkeys(captions) if caption not in self._token_cache]
        if new:
            if self._reading is None:
                ids = tokenize(self.model.tokenizers, new)
                self._token_cache |= zip(new, zip(*ids, strict=True), strict=True)
            else:
                self._token_cache |= {one: self._reading.tokens(self.model, one) for one in new}
        return [self._token_cache[caption] for caption in captions]

    def _states(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        return (inputs["text"], inputs.get("pooled")) if "text" in inputs else self._encoded(inputs)

    def _named(self, rows: Sequence[tuple[Tensor, ...]], device: torch.device) -> dict[str, Tensor]:
        """Tokens of rows as inputs: of each encoder, and their weights where captions have some."""
        return {
            f"ids_{i}": to_device(torch.stack(each), device) for i, each in enumerate(zip(*rows, strict=True))
        }

    def _encoded(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        encoders = self.model.text_encoders
        if self._reading is not None:
            count = len(encoders)
            ids, weights = ([inputs[f"ids_{i + at}"] for i in range(count)] for at in (0, count))
            return self._reading.states(self.model, ids, weights)
        return text_states(encoders, [inputs[f"ids_{i}"] for i in range(len(encoders))])


def size_conditioning(columns: Columns, target: tuple[int, int]) -> Tensor:
    """SDXL's size conditioning, float32 [B, 6]: original size, the cut's corner and target size, each with
    the height before the width.

    The corner is in pixels of the picture scaled to cover the target, mirrored where the picture is, as
    diffusers' train_text_to_image_sdxl.py has it. Prepared latents are cut at the centre.
    """
    width_B, height_B = (torch.as_tensor(columns[name]).long() for name in SIZES)
    height, width = target
    wide_B = width_B * height > height_B * width  # what stands over is at the sides
    scaled_w_B = torch.where(wide_B, width_B * height // height_B, width)
    scaled_h_B = torch.where(wide_B, height, height_B * width // width_B)
    over_B2 = torch.stack([scaled_w_B - width, scaled_h_B - height], dim=1).clamp(min=0)
    at_B2 = columns.get("cut_at")
    left_B, top_B = (over_B2 * (0.5 if at_B2 is None else at_B2)).round().unbind(1)
    if "mirrored" in columns:
        left_B = torch.where(columns["mirrored"], over_B2[:, 0] - left_B, left_B)
    target_B = [torch.full_like(left_B, side) for side in target]
    return torch.stack([height_B, width_B, top_B, left_B, *target_B], dim=1).float()


def distance(out_b3HW: Tensor, pixels_b3HW: Tensor, kind: str) -> Tensor:
    """Mean L1 or square distance of each picture [b]."""
    difference = out_b3HW - pixels_b3HW
    return (difference.abs() if kind == "l1" else difference.square()).mean(dim=(1, 2, 3))


def kl_divergence(mean_bChw: Tensor, logvar_bChw: Tensor) -> Tensor:
    """KL divergence of each row's posterior from the standard normal, summed over the latent [b]."""
    return 0.5 * (mean_bChw.square() + logvar_bChw.exp() - 1.0 - logvar_bChw).sum(dim=(1, 2, 3))


def edge_distance(out_b3HW: Tensor, pixels_b3HW: Tensor) -> Tensor:
    """Mean L1 distance between the pictures' differences of neighbouring pixels [b]."""
    difference = out_b3HW - pixels_b3HW
    across = difference.diff(dim=-1).abs().mean(dim=(1, 2, 3))
    down = difference.diff(dim=-2).abs().mean(dim=(1, 2, 3))
    return across + down


class Preference(Diffusion):
    """Train an adapter on pairs; what it is compared with is the model without it."""

    def __init__(self, *args: Any, beta: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self._beta = beta
        self.rows_a_picture = 2

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Diffusion-DPO's loss of each row [B], with whether the pair's preferred picture is nearer."""
        if len(inputs["t"]) % 2:  # one picture, to try a step with, stands for both of its pair
            inputs = {name: tensor.repeat_interleave(2, dim=0) for name, tensor in inputs.items()}
        t_b = inputs["t"]
        own_b = square_error(*self._predict(inputs, t_b), inputs.get("mask"))
        with torch.no_grad(), without_adapters(self.modules):
            base_b = square_error(*self._predict(inputs, t_b), inputs.get("mask"))
        loss_P, right_P = preference_loss(own_b, base_b, self._beta)
        # Each row has its pair's, so that the mean over rows is that over pairs.
        return {"loss": loss_P.repeat_interleave(2), "preferred": right_P.repeat_interleave(2)}


def preference_loss(own_b: Tensor, base_b: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """-log sigmoid(-beta / 2 ((own_w - base_w) - (own_l - base_l))) of each pair [P], and which are right.

    The errors [b] are those of the preferred (w) and the other picture (l) by turns, of the model that is
    trained and of the base. As in the paper's own code beta stands for beta T omega.
    """
    gap_P2 = (own_b - base_b).view(-1, 2)
    inside_P = -0.5 * beta * (gap_P2[:, 0] - gap_P2[:, 1])
    return -F.logsigmoid(inside_P), (inside_P > 0).float().detach()


@contextmanager
def without_adapters(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within, PEFT's layers pass their additions by."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for module in modules.values() for m in module.modules() if isinstance(m, BaseTunerLayer)]
    flags = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, flag in zip(layers, flags, strict=True):
            layer._disable_adapters = flag
