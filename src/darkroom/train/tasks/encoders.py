"""Tasks that train what encodes pictures: autoencoders (the VAE, and a tiny one of it), and an extractor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from darkroom.data.loader import ReadSettings
from darkroom.data.order import Rows
from darkroom.data.store import Store
from darkroom.errors import RecipeError
from darkroom.evaluate.small import (
    SmallExtractor,
    TrainingHashes,
    normalised,
    open_small,
    save_small,
    word_ids,
)
from darkroom.hardware.accelerator import to_device
from darkroom.libraries import quiet
from darkroom.models.folder import replaced_folder
from darkroom.models.model import Model
from darkroom.recipe.sections import AutoencoderLossSettings, DataSettings, ExtractorSettings, ModelSettings
from darkroom.sample.optimisations.tiny_vae import TinyPair, is_tiny_vae
from darkroom.train.objective import square_error
from darkroom.train.tasks.diffusion import Columns, distance, edge_distance, kl_divergence

if TYPE_CHECKING:
    from darkroom.recipe.sections import TinyVaeSettings


# ---- autoencoders: the VAE, by reconstruction, KL, perceptual and adversarial losses; and a tiny one of it
#
# The task `tiny-vae` has a small encoder and decoder learn to do what a VAE does (TAESD, Ollin Boer Bohan).
# The encoder learns the teacher's latents of pictures, the decoder what the teacher makes of its latents.
# Both work on latents as the denoiser sees them, so a scale and a shift of the VAE are learned with them.
#
# Shapes: b pictures of a micro-batch, H W pixels, C latent channels, h w latent pixels.


def _decibels(out_b3HW: Tensor, pixels_b3HW: Tensor) -> Tensor:
    """PSNR of pictures of -1 to 1 [b], in dB."""
    return 10 * torch.log10(4.0 / square_error(out_b3HW, pixels_b3HW).clamp(min=1e-10))


class _OfPictures:
    """What tasks share that learn from pictures without noise and timesteps."""

    rows_a_picture = 1

    def __init__(
        self,
        model: Model,
        read: ReadSettings,
        modules: dict[str, nn.Module],
        frozen: Sequence[nn.Module] = (),
    ) -> None:
        self.model, self.modules, self.frozen = model, modules, frozen
        self.rates: dict[str, float] = {}
        self.read = read.model_copy(update={"draws": ("posterior",)})

    @property
    def points(self) -> Sequence[int]:
        return ()

    def inputs(self, columns: Columns, device: torch.device) -> dict[str, Tensor]:
        """Pixels [B, 3, H, W] in [-1, 1], and the noise of the posterior [B, C, h, w]."""
        pixels_B3HW = to_device(columns["pixels"], device).float() / 127.5 - 1.0
        return {"pixels": pixels_B3HW, "posterior": to_device(columns["posterior"], device)}


class Autoencoder(_OfPictures):
    """Train the VAE to give back pictures through a small latent close to a normal distribution."""

    def __init__(self, model: Model, settings: AutoencoderLossSettings, read: ReadSettings) -> None:
        assert model.vae is not None
        super().__init__(model, read, {"vae": model.vae})
        self._settings = settings

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each row [b]: `loss`, and its parts `reconstruction` and `kl`."""
        pixels_b3HW = inputs["pixels"]
        mean_bChw, logvar_bChw = self._encode(pixels_b3HW)
        latents_bChw = mean_bChw + (0.5 * logvar_bChw).exp() * inputs["posterior"]
        out_b3HW = self._decode(latents_bChw)
        settings = self._settings
        reconstruction_b = distance(out_b3HW, pixels_b3HW, settings.reconstruction)
        kl_b = kl_divergence(mean_bChw, logvar_bChw) / pixels_b3HW[0].numel()
        loss_b = reconstruction_b + settings.kl_weight * kl_b
        if settings.edge_weight:
            loss_b = loss_b + settings.edge_weight * edge_distance(out_b3HW, pixels_b3HW)
        return {"loss": loss_b, "reconstruction": reconstruction_b, "kl": kl_b}

    def heldout(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each held-out row [b]: the reconstruction loss, and PSNR in dB."""
        pixels_b3HW = inputs["pixels"]
        out_b3HW = self.reconstruct(pixels_b3HW)
        return {
            "heldout_loss": distance(out_b3HW, pixels_b3HW, self._settings.reconstruction),
            "heldout_psnr_db": _decibels(out_b3HW, pixels_b3HW),
        }

    @torch.no_grad()
    def measure(self, inputs: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        """The factor that brings sampled latents to a standard deviation of one (Rombach et al. 2022).

        A shift and a deviation for each channel that the VAE's configuration has stay as they are.
        """
        scaling = replace(self.model.latent_scaling, factor=1.0)
        total, count = np.zeros(2), 0
        for some in inputs:
            mean_bChw, logvar_bChw = self._encode(some["pixels"])
            latents = scaling.seen(mean_bChw + (0.5 * logvar_bChw).exp() * some["posterior"]).cpu().double()
            total += np.array([latents.sum().item(), latents.square().sum().item()])
            count += latents.numel()
        mean, square = total / max(count, 1)
        variance = square - mean**2
        return {"vae.scaling_factor": float(variance**-0.5)} if variance > 0 else {}

    def reconstruct(self, pixels_b3HW: Tensor) -> Tensor:
        """What the VAE gives back of pictures, from the mean latent."""
        return self._decode(self._encode(pixels_b3HW)[0]).clamp(-1, 1)

    def _encode(self, pixels_b3HW: Tensor) -> tuple[Tensor, Tensor]:
        vae: Any = self.model.vae
        given = vae.encode(pixels_b3HW.to(vae.dtype), return_dict=False)[0]
        return given.mean.float(), given.logvar.float()

    def _decode(self, latents_bChw: Tensor) -> Tensor:
        vae: Any = self.model.vae
        out: Tensor = vae.decode(latents_bChw.to(vae.dtype), return_dict=False)[0]
        return out.float()


@dataclass
class TinyVaeModel(Model):
    """A VAE, the teacher, and the small one that learns from it; what is written is the small one alone."""

    tiny: Any = None

    @property
    def modules(self) -> dict[str, nn.Module]:
        assert self.vae is not None
        return {"vae": self.vae, "tiny_vae": self.tiny}

    def write(self, folder: Path) -> None:
        """Write the folder of diffusers' AutoencoderTiny, as the optimisation `tiny_vae` opens it."""
        with replaced_folder(folder) as temporary, quiet():
            self.tiny.save_pretrained(str(temporary))


def teacher_of(base: str) -> Model | None:
    """A model whose VAE is the tiny VAE in a folder; None where the folder holds none."""
    if not is_tiny_vae(base):
        return None
    vae: Any = TinyPair.read(Path(base))
    return Model("tiny-vae", vae=vae, path=base)


def with_student(model: Model, settings: TinyVaeSettings, seed: int) -> TinyVaeModel:
    """The teacher's model, with a student of random weights."""
    from darkroom.models.parts import AutoencoderTiny

    levels = model.vae_factor.bit_length()
    widths, blocks = (settings.width,) * levels, (settings.blocks,) * (levels - 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tiny = AutoencoderTiny(
            latent_channels=model.latent_channels,
            encoder_block_out_channels=widths,
            decoder_block_out_channels=widths,
            num_encoder_blocks=(1, *blocks),
            num_decoder_blocks=(*blocks, 1),
        )
    return TinyVaeModel("tiny-vae", vae=model.vae, path=model.path, tiny=tiny)


class LearnTinyVae(_OfPictures):
    """Train the small encoder and decoder."""

    def __init__(self, model: TinyVaeModel, settings: TinyVaeSettings, read: ReadSettings) -> None:
        assert model.vae is not None
        super().__init__(model, read, {"tiny_vae": model.tiny}, (model.vae,))
        self._tiny, self._settings, self._scaling = model.tiny, settings, model.latent_scaling
        self._tiny.requires_grad_(True)

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each row [b]: `loss`, and its parts `reconstruction` and `latents`."""
        settings = self._settings
        mean_bChw, drawn_bChw, target_b3HW = self._taught(inputs)
        out_b3HW = self._decode(drawn_bChw)
        reconstruction_b = distance(out_b3HW, target_b3HW, settings.reconstruction)
        latents_b = square_error(self._encode(inputs["pixels"]), mean_bChw)
        loss_b = reconstruction_b + settings.latent_weight * latents_b
        if settings.edge_weight:
            loss_b = loss_b + settings.edge_weight * edge_distance(out_b3HW, target_b3HW)
        return {"loss": loss_b, "reconstruction": reconstruction_b, "latents": latents_b}

    def heldout(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each held-out row [b]: the loss of the decoder, its PSNR in dB against what it learns from, and
        that of a picture that went through both halves against the picture.
        """
        mean_bChw, drawn_bChw, target_b3HW = self._taught(inputs)
        out_b3HW = self._decode(drawn_bChw).clamp(-1, 1)
        return {
            "heldout_loss": distance(out_b3HW, target_b3HW, self._settings.reconstruction),
            "heldout_psnr_db": _decibels(out_b3HW, target_b3HW.clamp(-1, 1)),
            "heldout_latents": square_error(self._encode(inputs["pixels"]), mean_bChw),
            "heldout_picture_psnr_db": _decibels(self.reconstruct(inputs["pixels"]), inputs["pixels"]),
        }

    def measure(self, inputs: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        return {}

    def reconstruct(self, pixels_b3HW: Tensor) -> Tensor:
        """What the small encoder and decoder give back of pictures."""
        return self._decode(self._encode(pixels_b3HW)).clamp(-1, 1)

    @torch.no_grad()
    def _taught(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The teacher's mean latent and a drawn one, as the denoiser sees them, and the decoder's target."""
        teacher: Any = self.model.vae
        given = teacher.encode(inputs["pixels"].to(teacher.dtype), return_dict=False)[0]
        mean_bChw = given.mean.float()
        drawn_bChw = mean_bChw + (0.5 * given.logvar.float()).exp() * inputs["posterior"]
        target_b3HW = inputs["pixels"]
        if self._settings.target == "teacher":
            target_b3HW = teacher.decode(drawn_bChw.to(teacher.dtype), return_dict=False)[0].float()
        return self._scaling.seen(mean_bChw), self._scaling.seen(drawn_bChw), target_b3HW

    def _encode(self, pixels_b3HW: Tensor) -> Tensor:
        latents: Tensor = self._tiny.encoder(pixels_b3HW.to(self._tiny.dtype))
        return latents.float()

    def _decode(self, latents_bChw: Tensor) -> Tensor:
        pixels: Tensor = self._tiny.decoder(latents_bChw.to(self._tiny.dtype))
        return pixels.float()


# ---- the task `extractor`: darkroom's own small extractor learns to tell a store's pictures apart
#
# Contrastive: two views of a picture, cut and tinted at random, shall be nearer to each other than to any
# other picture of the batch (Chen et al. 2020), and a picture nearer to its caption than to others' (Radford
# et al. 2021). Classifier: a picture shall be near its class, a column of the store.
#
# Shapes: b pictures of a batch, H W pixels, D numbers of an embedding, W words, K classes.

MOST_LABELS = 10_000
ROWS_A_READ = 256
CAPTION_WEIGHT = 0.5  # where the recipe leaves it open and there are captions


@dataclass
class ExtractorModel(Model):
    """An extractor in the place where the training loop expects a model."""

    network: SmallExtractor | None = None
    seen: Callable[[], TrainingHashes] | None = None
    """The pictures that it is trained on, read when the folder is written."""

    @property
    def modules(self) -> dict[str, nn.Module]:
        assert self.network is not None
        return {"extractor": self.network}

    def write(self, folder: Path) -> None:
        """Write the extractor's folder, as `darkroom evaluate` opens it."""
        assert self.network is not None
        assert self.seen is not None
        save_small(self.network, folder, self.seen().tensors())


def build_extractor(
    model: ModelSettings, settings: ExtractorSettings, side: int, store: Store, rows: Rows
) -> ExtractorModel:
    """The extractor before training: random weights for base 'extractor', else those of a folder."""
    base = model.base
    labels = _labels_of(store, rows, settings.label) if settings.loss == "classifier" else []
    text = settings.loss == "contrastive" and _reads_captions(settings, store, rows)
    before = None
    if base == "extractor":
        # The caller's random numbers stay as they were.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(model.seed)
            network = SmallExtractor(settings.network, resolution=side, text=text, labels=labels)
    elif Path(base).is_dir():
        network, before = open_small(Path(base)), TrainingHashes.read(Path(base))
        if network.resolution != side:
            raise RecipeError("data.resolution", f"{side}", allowed=f"{network.resolution}, as '{base}' has")
        follows = settings.loss == "contrastive" and settings.caption_weight is None
        text = network.words is not None if follows else text
        if (network.words is not None) != text or list(network.labels) != labels:
            raise RecipeError("objective.extractor", f"another loss or other classes than those of '{base}'")
    else:
        raise RecipeError(
            "model.base", f"'{base}' with the task extractor", allowed="extractor, or an extractor's folder"
        )
    return ExtractorModel("extractor", path=base, network=network, seen=lambda: _seen_of(store, rows, before))


def _reads_captions(settings: ExtractorSettings, store: Store, rows: Rows) -> bool:
    """Whether captions are learned: as asked, or because there are at least two to tell apart."""
    if settings.caption_weight is not None:
        return settings.caption_weight > 0
    found: set[str] = set()
    for values in _read(store, rows, ["caption"]):
        found |= {caption for caption in values["caption"] if caption}
        if len(found) > 1:
            return True
    return False


def _labels_of(store: Store, rows: Rows, column: str | None) -> list[str]:
    """The classes that a column of these rows has, sorted; RecipeError where they are no classes."""
    key = "objective.extractor.label"
    if column is None:
        raise RecipeError(key, "missing", mend="name the store's column of classes")
    if column not in store.columns():
        raise RecipeError(key, f"no column '{column}'", allowed=", ".join(store.columns()))
    found: set[str] = set()
    for values in _read(store, rows, [column]):
        found |= {str(value) for value in values[column] if value is not None}
        if len(found) > MOST_LABELS:
            raise RecipeError(key, f"'{column}' has more than {MOST_LABELS:,} classes")
    if len(found) < 2:
        raise RecipeError(key, f"'{column}' has {len(found)} class", allowed="2 or more")
    return sorted(found)


def _seen_of(store: Store, rows: Rows, before: TrainingHashes | None = None) -> TrainingHashes:
    """What is kept of the pictures that an extractor was trained on, and of those its base had seen."""
    columns = ["picture", "phash"]
    found = TrainingHashes.of(
        pair
        for values in _read(store, rows, columns)
        for pair in zip(values["picture"], values["phash"], strict=True)
    )
    return found if before is None else found | before


def _read(store: Store, rows: Rows, columns: Sequence[str]) -> Iterable[dict[str, list[Any]]]:
    for start in range(0, len(rows), ROWS_A_READ):
        positions = rows.positions(range(start, min(start + ROWS_A_READ, len(rows))))
        yield store.take(positions, columns).to_pydict()


class LearnExtractor:
    """Train the small extractor."""

    def __init__(
        self, model: ExtractorModel, settings: ExtractorSettings, data: DataSettings, seed: int
    ) -> None:
        assert model.network is not None
        self.model: Model = model
        self.network, self._settings = model.network, settings
        self.modules: dict[str, nn.Module] = dict(model.modules)
        self.rates: dict[str, float] = {}
        self.frozen: Sequence[nn.Module] = ()
        self.rows_a_picture = 1
        self.read = ReadSettings(
            pixels=data.resolution,
            crop=data.crop,
            flip=data.flip,
            seed=seed,
            caption=self.network.words is not None,
            columns=(settings.label,) if self.network.labels and settings.label else (),
        )
        self._places = {label: i for i, label in enumerate(self.network.labels)}

    @property
    def points(self) -> Sequence[int]:
        return ()

    def inputs(self, columns: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Pixels [B, 3, H, W], and word ids and labels where they are learned from."""
        inputs = {"pixels": columns["pixels"]}
        if self.network.words is not None:
            inputs["words"] = word_ids(columns["caption"], self.network.settings)
        if self._settings.label and self._places:
            # A row without a class has number -1, which counts in no loss.
            places = [self._places.get(str(value), -1) for value in list(columns[self._settings.label])]
            inputs["label"] = torch.tensor(places)
        return {name: to_device(value, device) for name, value in inputs.items()}

    def losses(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Drawn from torch's generator, which the step seeds by its number.
        views = [self._view(inputs["pixels"]) for _ in range(1 if self._places else 2)]
        return self._judged(inputs, views)

    def heldout(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same with fixed views: the whole picture, and its middle, mirrored."""
        pixels_b3HW = inputs["pixels"]
        side = pixels_b3HW.shape[-1]
        cut = max(1, side // 8)
        middle = pixels_b3HW[..., cut : side - cut, cut : side - cut].float()
        middle = F.interpolate(middle, size=pixels_b3HW.shape[-2:], mode="bilinear").flip(-1)
        found = self._judged(inputs, [normalised(pixels_b3HW), normalised(middle)])
        return {"heldout_loss": found["loss"], "heldout_accuracy": found["accuracy"]}

    def measure(self, inputs: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        return {}

    def _judged(self, inputs: Mapping[str, Tensor], views: Sequence[Tensor]) -> dict[str, Tensor]:
        dtype = self.network.stem.weight.dtype
        first_bD, *others = (self.network(view.to(dtype)) for view in views)
        if self._places:
            return self._classified(first_bD, inputs["label"])
        scale = self.network.logit_scale
        same_bb = torch.eye(len(first_bD), device=first_bD.device)
        found = matched(scale * first_bD @ others[0].T, same_bb)
        if self.network.words is None:
            return found
        words_bW = inputs["words"]
        alike_bb = (words_bW[:, None] == words_bW[None]).all(dim=-1).to(first_bD)
        text = matched(scale * first_bD @ self.network.read(words_bW).T, alike_bb)
        asked = self._settings.caption_weight
        share = CAPTION_WEIGHT if asked is None else asked
        loss_b = (1 - share) * found["loss"] + share * text["loss"]
        return {"loss": loss_b, "accuracy": found["accuracy"], "caption_accuracy": text["accuracy"]}

    def _classified(self, embeddings_bD: Tensor, label_b: Tensor) -> dict[str, Tensor]:
        logits_bK = self.network.class_logits(embeddings_bD)
        loss_b = F.cross_entropy(logits_bK, label_b, ignore_index=-1, reduction="none")
        return {"loss": loss_b, "accuracy": (logits_bK.argmax(dim=1) == label_b).float()}

    def _view(self, pixels_b3HW: Tensor) -> Tensor:
        return normalised(tinted(cut(pixels_b3HW.float(), self._settings.zoom), self._settings.tint))


def matched(logits_bb: Tensor, alike_bb: Tensor) -> dict[str, Tensor]:
    """Cross-entropy of rows with their partners, both ways, and whether the nearest is one [b].

    `alike_bb` is 1 where row and column are partners; several share the probability.
    """
    loss_b = torch.zeros(len(logits_bb), device=logits_bb.device)
    for logits, alike in ((logits_bb, alike_bb), (logits_bb.T, alike_bb.T)):
        wanted = alike / alike.sum(dim=1, keepdim=True)
        loss_b = loss_b - 0.5 * (wanted * logits.log_softmax(dim=1)).sum(dim=1)
    nearest_b1 = logits_bb.argmax(dim=1, keepdim=True)
    return {"loss": loss_b, "accuracy": alike_bb.gather(1, nearest_b1)[:, 0]}


def cut(pixels_b3HW: Tensor, zoom: float) -> Tensor:
    """A random part of each picture, of at least `zoom` of the sides, at full size; half of them mirrored."""
    count = len(pixels_b3HW)
    share_b = zoom + (1 - zoom) * torch.rand(count)
    off_2b = (2 * torch.rand(2, count) - 1) * (1 - share_b)
    mirror_b = torch.where(torch.rand(count) < 0.5, -1.0, 1.0)
    theta_b23 = torch.zeros(count, 2, 3)
    theta_b23[:, 0, 0], theta_b23[:, 1, 1] = share_b * mirror_b, share_b
    theta_b23[:, :, 2] = off_2b.T
    grid = F.affine_grid(
        to_device(theta_b23, pixels_b3HW.device), list(pixels_b3HW.shape), align_corners=False
    )
    return F.grid_sample(pixels_b3HW, grid, padding_mode="border", align_corners=False)


def tinted(pixels_b3HW: Tensor, strength: float) -> Tensor:
    """Brightness, contrast and colour of each picture of 0 to 255 moved by up to `strength`."""
    bright, contrast, colour = (
        to_device(1 + strength * (2 * torch.rand(len(pixels_b3HW), 1, 1, 1) - 1), pixels_b3HW.device)
        for _ in range(3)
    )
    mean = pixels_b3HW.mean(dim=(1, 2, 3), keepdim=True)
    pixels = mean * bright + (pixels_b3HW - mean) * contrast
    grey = pixels.mean(dim=1, keepdim=True)
    return (grey + (pixels - grey) * colour).clamp(0, 255)
