"""The section `objective` of a recipe: what is learned, by which loss, of which timesteps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from darkroom.evaluate.settings import SmallSettings

HUBER = ("huber", "smooth-l1")
"""Losses with a threshold."""


class LossSettings(BaseModel):
    """How far an answer is from its target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["mse", "l1", "huber", "smooth-l1"] = Field(
        default="mse",
        description="huber and smooth-l1 are the smooth forms that kohya's trainers know: square below the "
        "threshold c, linear above. huber: 2c (sqrt(d^2 + c^2) - c); smooth-l1: 2 (sqrt(d^2 + c^2) - c)",
    )
    huber_c: float = Field(default=0.1, gt=0, le=10, description="the threshold c, where the schedule ends")
    huber_schedule: Literal["constant", "exponential", "snr"] = Field(
        default="snr",
        description="c by timestep. constant; exponential: from huber_scale down to huber_c times it; snr: "
        "(1 - huber_c) / (1 + sigma)^2 + huber_c with sigma = noise / signal",
    )
    huber_scale: float = Field(
        default=1.0, gt=0, le=100, description="factor of c with schedules constant and exponential"
    )


class TimestepSettings(BaseModel):
    """Which timesteps are trained, and how often."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min: int = Field(default=0, ge=0, description="the first timestep that is trained")
    max: int | None = Field(
        default=None, gt=0, description="the first that is not trained any more; null: the schedule's length"
    )
    distribution: Literal["uniform", "logit-normal", "mode"] | None = Field(
        default=None,
        description="how they are drawn in that range. logit-normal: the logistic of a normal number; mode: "
        "heavy at both ends or in the middle (both Esser et al. 2024); null: uniform, and logit-normal for "
        "rectified flow",
    )
    mean: float | None = Field(
        default=None,
        ge=-10,
        le=10,
        description="of logit-normal's normal number; null: 0, for rectified flow objective.flow.mean",
    )
    std: float | None = Field(
        default=None, gt=0, le=10, description="its standard deviation; null: 1, or objective.flow.std"
    )
    mode_scale: float = Field(default=1.29, ge=-1, le=1.75, description="of mode: above 0 favours the middle")

    @model_validator(mode="after")
    def _possible(self) -> TimestepSettings:
        if self.max is not None and self.min >= self.max:
            raise ValueError(f"min {self.min} is not below max {self.max}")
        if (self.mean is not None or self.std is not None) and self.distribution != "logit-normal":
            raise ValueError("mean and std are given, which distribution logit-normal alone has")
        return self


class PreferenceSettings(BaseModel):
    """Diffusion-DPO, the task `dpo`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    beta: float = Field(
        default=2500.0,
        gt=0,
        le=1e6,
        description="how closely the model keeps to its base (Wallace et al. 2023): larger is closer",
    )


class FlowSettings(BaseModel):
    """Rectified flow: at which times it is trained. What is left out is what the model's scheduler says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: float | None = Field(
        default=None,
        ge=-10,
        le=10,
        description="of the normal number whose logistic is the time (0 picture, 1 noise); null: the "
        "model's, else 0",
    )
    std: float | None = Field(
        default=None, gt=0, le=10, description="its standard deviation; null: the model's, else 1"
    )
    shift: Annotated[float, Field(gt=0, le=100)] | Literal["auto", "model"] = Field(
        default="auto",
        description="times are moved to shift * t / (1 + (shift - 1) * t), more noise above 1; auto: by "
        "data.resolution, sqrt(latent pixels / 1024), at least 1, of the task distill as model; model: as "
        "its scheduler says",
    )


class NoiseSettings(BaseModel):
    """How noise grows with the timestep. What is left out is what the model's scheduler says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schedule: Literal["scaled-linear", "linear", "cosine"] | None = Field(
        default=None, description="shape of the betas over the timesteps; null: the model's own"
    )
    beta_start: float | None = Field(default=None, gt=0, lt=1, description="beta of the first timestep")
    beta_end: float | None = Field(default=None, gt=0, lt=1, description="beta of the last timestep")
    num_timesteps: int | None = Field(default=None, gt=1, le=100_000, description="length of the schedule")
    zero_terminal_snr: bool | None = Field(
        default=None,
        description="rescale the betas so that the last timestep is pure noise (Lin et al. 2023)",
    )
    offset: float = Field(
        default=0.0, ge=0, le=1, description="offset noise: strength of a shift common to a channel's pixels"
    )
    offset_random_strength: bool = Field(
        default=False, description="draw each picture's strength between 0 and offset"
    )
    adaptive_scale: float | None = Field(
        default=None,
        ge=-10,
        le=10,
        description="kohya's adaptive_noise_scale: so many times the size of a latent channel's mean is "
        "added to offset, at least 0 in all; null: nothing",
    )
    multires_iterations: int = Field(
        default=0,
        ge=0,
        le=16,
        description="multi-resolution noise: how many coarser noises are added; 0: none; 6 is usual",
    )
    multires_discount: float = Field(
        default=0.3, gt=0, le=1, description="each coarser noise's strength as a share of the one before"
    )
    perturbation: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="input perturbation (Ning et al. 2023; kohya's ip_noise_gamma): further noise in the "
        "input that the target lacks; 0.1 is usual",
    )
    perturbation_random_strength: bool = Field(
        default=False, description="draw each picture's strength between 0 and perturbation"
    )

    @model_validator(mode="after")
    def _possible(self) -> NoiseSettings:
        needs = {
            "offset_random_strength": (self.offset_random_strength, "offset"),
            "adaptive_scale": (self.adaptive_scale is not None, "offset"),
            "perturbation_random_strength": (self.perturbation_random_strength, "perturbation"),
        }
        for name, (given, of) in needs.items():
            if given and not getattr(self, of):
                raise ValueError(f"{name}, but {of} is 0; set noise.{of}")
        return self


class AutoencoderLossSettings(BaseModel):
    """The loss of the task `autoencoder`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reconstruction: Literal["l1", "mse"] = Field(default="l1", description="distance of pixels in [-1, 1]")
    kl_weight: float = Field(
        default=1e-6, ge=0, description="weight of the KL divergence, summed over a latent"
    )
    edge_weight: float = Field(
        default=0.0,
        ge=0,
        description="weight of the L1 distance between the pictures' horizontal and vertical "
        "differences; sharpens outlines",
    )


class TinyVaeSettings(BaseModel):
    """Of the task tiny-vae: the small encoder and decoder (TAESD), and what they learn from the VAE."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(default=64, ge=4, le=1024, description="channels of every layer")
    blocks: int = Field(
        default=3,
        ge=1,
        le=32,
        description="residual blocks at each size but the pictures' own, which has one",
    )
    target: Literal["teacher", "picture"] = Field(
        default="teacher",
        description="what the decoder makes of a latent: what the VAE makes of it, or the picture it is of, "
        "for which the VAE need not decode",
    )
    reconstruction: Literal["l1", "mse"] = Field(default="l1", description="distance of pixels in [-1, 1]")
    edge_weight: float = Field(
        default=0.0,
        ge=0,
        description="weight of the L1 distance between the pictures' horizontal and vertical differences",
    )
    latent_weight: float = Field(
        default=1.0, gt=0, description="weight of the encoder's square distance from the VAE's mean latent"
    )


class ExtractorSettings(BaseModel):
    """What the task extractor learns from, and its network."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: Literal["contrastive", "classifier"] = Field(
        default="contrastive", description="tell pictures apart, or tell the classes of a column"
    )
    label: str | None = Field(default=None, description="the store's column of classes, for classifier")
    caption_weight: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of the contrastive loss that captions have; null: 0.5 where there are any",
    )
    zoom: float = Field(default=0.4, gt=0, le=1, description="smallest share of the sides that a view shows")
    tint: float = Field(default=0.3, ge=0, le=1, description="how far brightness, contrast, colour vary")
    network: SmallSettings = Field(default=SmallSettings(), description="the network's shape")


class DistillSettings(BaseModel):
    """Of the task distill: how the few-step model learns from its teacher."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["lcm", "dmd2"] = Field(
        default="lcm",
        description="lcm: latent consistency (Luo et al. 2023); dmd2: distribution matching (Yin et al. "
        "2024), whose student draws by itself while it learns",
    )
    ddim_steps: int = Field(
        default=50, ge=2, le=1000, description="the teacher's steps; few steps are drawn at some of theirs"
    )
    guidance_min: float | None = Field(
        default=None,
        ge=1,
        le=100,
        description="the teacher's guidance scale, drawn evenly from here; null: the model's own, else 7.5",
    )
    guidance_max: float | None = Field(
        default=None, ge=1, le=100, description="to here; null: the model's own, else 7.5, or guidance_min"
    )
    guidance_sigma_min: float = Field(
        default=0.0,
        ge=0,
        description="the teacher is guided only above this sigma, noise over picture, as with generate's "
        "guidance_interval (Kynkaanniemi et al. 2024)",
    )
    guidance_sigma_max: float | None = Field(
        default=None, gt=0, description="and up to this one; null: at any above guidance_sigma_min"
    )
    huber_c: float = Field(
        default=0.001, gt=0, description="of lcm, its pseudo-Huber loss: where it turns linear"
    )
    distance: Literal["picture", "velocity"] = Field(
        default="picture",
        description="of lcm: between the two pictures, as in the paper, or between the velocities that they "
        "mean at the student's timestep: the pictures' distance / sigma, so that low noise counts as much",
    )
    target: Literal["average", "student"] | None = Field(
        default=None,
        description="of lcm: whose answer one of ddim_steps earlier is learned: that of the averaged weights "
        "of train.ema, as in the paper, or the student's own; null: the average where there is one and the "
        "whole U-Net is trained",
    )
    timestep_scaling: float = Field(
        default=10.0, gt=0, description="how quickly answers count more than inputs as timesteps rise"
    )
    steps: int = Field(default=4, ge=1, le=64, description="of dmd2: the steps that the student draws in")
    fake_updates: int = Field(
        default=5, ge=1, le=100, description="of dmd2: updates of the second network for each of the student"
    )
    fake_lr: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="of dmd2: peak rate of the network that learns what the student draws; null: optim.lr",
    )
    gan_weight: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="of dmd2: its GAN loss, by which the student's pictures become like those it is given "
        "rather than the teacher's (the paper has 0.003 to 0.005); 0: none",
    )
    discriminator_weight: float = Field(
        default=0.01, gt=0, le=100, description="of gan_weight: of the loss of telling the two apart"
    )

    @model_validator(mode="after")
    def _possible(self) -> DistillSettings:
        most = self.guidance_sigma_max
        if most is not None and most <= self.guidance_sigma_min:
            raise ValueError(f"guidance_sigma_max {most:g} is not above guidance_sigma_min")
        if self.method == "lcm":
            others = {
                "steps": 4,
                "fake_updates": 5,
                "fake_lr": None,
                "gan_weight": 0.0,
                "discriminator_weight": 0.01,
            }
            if given := next((name for name, usual in others.items() if getattr(self, name) != usual), None):
                raise ValueError(f"{given} with method lcm, which has none; use method dmd2")
        elif self.target is not None or self.distance != "picture":
            given = (self.target and f"target {self.target}") or f"distance {self.distance}"
            raise ValueError(f"{given} with method dmd2, whose target is the teacher's score")
        elif self.steps > self.ddim_steps:
            raise ValueError(f"steps {self.steps} is more than ddim_steps {self.ddim_steps}")
        elif not self.gan_weight and self.discriminator_weight != 0.01:
            raise ValueError("discriminator_weight without gan_weight, the loss it belongs to")
        return self


class ObjectiveSettings(BaseModel):
    """What is predicted, from how much noise, and how timesteps are weighed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prediction: Literal["epsilon", "v", "sample", "flow"] | None = Field(
        default=None,
        description="what is predicted: the noise, the velocity of diffusion, the picture, or the velocity "
        "of rectified flow (noise less picture); null: what the model's scheduler says",
    )
    min_snr_gamma: float | None = Field(
        default=None,
        gt=0,
        description="min-SNR-gamma loss weights (Hang et al. 2023 use 5); null: equal weights",
    )
    soft_min_snr_gamma: float | None = Field(
        default=None,
        gt=0,
        description="the same without a corner (Crowson et al. 2024, k-diffusion): SNR gamma / (SNR + gamma) "
        "on the picture's error; 4 is k-diffusion's, whose sigma_data is 1 / sqrt(gamma); null: none",
    )
    p2_gamma: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="P2 loss weights (Choi et al. 2022): 1 / (p2_k + SNR)^gamma on the noise's error; 0.5 "
        "and 1 are usual; null: equal weights",
    )
    p2_k: float = Field(default=1.0, gt=0, le=1000, description="of p2_gamma: keeps weights finite at SNR 0")
    debiased_estimation: bool = Field(
        default=False,
        description="weigh the loss by 1 / sqrt(SNR), of v by 1 / (SNR + 1) (Yu et al. 2023)",
    )
    scale_v_pred_loss_like_noise_pred: bool = Field(
        default=False,
        description="of prediction v: times SNR / (SNR + 1), as if the noise's error were meant (kohya)",
    )
    unmasked_weight: float = Field(
        default=0.0, ge=0, le=1, description="weight of the loss where a picture's mask is black"
    )
    loss: LossSettings = Field(default=LossSettings(), description="the distance from the target")
    timesteps: TimestepSettings = Field(default=TimestepSettings(), description="which are trained")
    noise: NoiseSettings = Field(default=NoiseSettings(), description="the noise schedule")
    flow: FlowSettings = Field(default=FlowSettings(), description="of rectified flow: times and shift")
    dpo: PreferenceSettings = Field(default=PreferenceSettings(), description="of the task dpo")
    autoencoder: AutoencoderLossSettings = Field(
        default=AutoencoderLossSettings(), description="loss of the task autoencoder"
    )
    tiny_vae: TinyVaeSettings = Field(default=TinyVaeSettings(), description="of the task tiny-vae")
    extractor: ExtractorSettings = Field(
        default=ExtractorSettings(), description="loss and network of the task extractor"
    )
    distill: DistillSettings = Field(default=DistillSettings(), description="of the task distill")

    @model_validator(mode="after")
    def _possible(self) -> ObjectiveSettings:
        if self.prediction == "epsilon" and self.noise.zero_terminal_snr:
            raise ValueError(
                "prediction epsilon with noise.zero_terminal_snr: at the last timestep the input is pure "
                "noise, so epsilon teaches nothing there; use prediction v or sample"
            )
        if len(weighs := self.weighs) > 1:
            second, first = list(weighs)[:2]
            raise ValueError(f"{first} with {second}: both weigh timesteps; use one of them")
        if self.p2_k != 1 and self.p2_gamma is None:
            raise ValueError("p2_k without p2_gamma, of which it is; set p2_gamma")
        if self.scale_v_pred_loss_like_noise_pred and self.prediction not in (None, "v"):
            raise ValueError(f"scale_v_pred_loss_like_noise_pred with prediction {self.prediction}; use v")
        return self

    @property
    def weighs(self) -> dict[str, float | bool]:
        """What is given of the settings that weigh timesteps against each other, by name."""
        names = ("min_snr_gamma", "soft_min_snr_gamma", "p2_gamma", "debiased_estimation")
        return {name: value for name in names if (value := getattr(self, name))}
