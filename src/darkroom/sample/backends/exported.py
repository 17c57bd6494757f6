"""What ONNX Runtime and OpenVINO share: modules exported into a cache, called with float32 tensors.

An `ExportEngine` knows how a shell becomes files and how files become a `Run`. Conditions and latents go in
as float32 and come out so, whatever is computed in between.

The cache has a folder for each export, named by all that it depends on. An export is written to a temporary
name and renamed, so what lies under its name is complete. Two processes that want the same export do not both
make it: the second waits for the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from darkroom.errors import DarkroomError, InputError, MissingExtra, is_disk_full
from darkroom.hardware.meters import PeakMemory
from darkroom.hardware.system import atomic_replace, cache_folder, lock_file, remove_tree
from darkroom.models.adapters.bank import ROWS
from darkroom.models.folder import identity
from darkroom.sample.backends import int8
from darkroom.sample.backends.backend import Backend, Decode
from darkroom.sample.backends.shells import (
    Shell,
    decoder_shell,
    look_alike,
    text_layers,
    text_shell,
    unet_shell,
)
from darkroom.sample.denoise import Unet, unet_call
from darkroom.sample.pictures import decode

if TYPE_CHECKING:
    from darkroom.models.model import Model

ABOUT = "export.json"
LIMIT = "DARKROOM_CACHE_GB"
LIMIT_GB = 40.0
FORM = 1
"""How exports are made; a change in this code that makes other files out of the same weights adds one."""


@dataclass(frozen=True)
class CacheKey:
    """What an export depends on."""

    engine: str
    part: str
    identity: str
    """SHA-256 of the weights."""
    config: str
    """What the module was built from: weights alone do not say how many heads there are."""
    precision: str
    shape: str
    """What is fixed in it and what is open."""
    versions: tuple[tuple[str, str], ...]
    form: int = FORM

    @property
    def name(self) -> str:
        """The folder's name: readable first, unique as a whole."""
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"{self.engine}-{self.part}-{self.precision}-{self.identity[:8]}-{digest}"


def _exports_folder() -> Path:
    """Where exports are kept: `backends` in the folder of all that can be made again."""
    return cache_folder() / "backends"


def exported(key: CacheKey, make: Callable[[Path], None]) -> Path:
    """The folder of an export; `make(folder)` fills it first where it is not there yet. Then those used
    longest ago go, until all of them fit into $DARKROOM_CACHE_GB (40) or this one is alone.

    Raises InputError where the cache cannot be written, DarkroomError where an export fails.
    """
    base, limit_bytes = _exports_folder(), _limit_bytes()
    place = base / key.name
    if _is_whole(place, key):
        with contextlib.suppress(OSError):  # a cache that may only be read
            os.utime(place)
        return place
    try:
        base.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(base / f".{key.name}.lock"):
            if not _is_whole(place, key):
                _make(place, key, make)
                _evict(base, place, limit_bytes)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise InputError(
            f"the cache of exports '{base}' cannot be written: {error.strerror}", mend="set DARKROOM_CACHE"
        ) from error
    return place


def _limit_bytes() -> float:
    text = os.environ.get(LIMIT, str(LIMIT_GB))
    try:
        limit_gb = float(text)
    except ValueError:
        limit_gb = -1.0
    if not limit_gb > 0:
        raise InputError(f"{LIMIT}='{text}'", allowed="gigabytes above 0")
    return limit_gb * 1e9


def _evict(base: Path, keep: Path, limit_bytes: float) -> None:
    """Delete exports used longest ago until the rest fits. Whoever has one open goes on with it."""
    found = {about.parent: about.parent.stat().st_mtime for about in base.glob(f"[!.]*/{ABOUT}")}
    sizes = {place: sum(file.stat().st_size for file in place.iterdir()) for place in found}
    for place in sorted(found, key=lambda place: found[place]):
        if sum(sizes.values()) <= limit_bytes:
            return
        if place != keep:
            remove_tree(place)
            sizes.pop(place)


def _is_whole(place: Path, key: CacheKey) -> bool:
    try:
        record = json.loads((place / ABOUT).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(record, dict) or record.get("key") != _plain(key):
        return False
    sizes = record.get("bytes", {})
    return bool(sizes) and all(
        (place / name).is_file() and (place / name).stat().st_size == size for name, size in sizes.items()
    )


def _plain(key: CacheKey) -> object:
    return json.loads(json.dumps(asdict(key)))


def _make(place: Path, key: CacheKey, make: Callable[[Path], None]) -> None:
    for left in place.parent.glob(f".{key.name}-*"):  # of exports that were killed; the lock is ours
        remove_tree(left)
    temporary = Path(tempfile.mkdtemp(prefix=f".{key.name}-", dir=place.parent))
    try:
        make(temporary)
        sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
        about = {"key": asdict(key), "bytes": sizes}
        (temporary / ABOUT).write_text(json.dumps(about, indent=2) + "\n", "utf-8")
        temporary.chmod(0o755)
        if place.exists():  # not whole, or another key's
            remove_tree(place, must=True)
        atomic_replace(temporary, place)
    except BaseException as error:
        remove_tree(temporary)
        if is_disk_full(error):
            raise DarkroomError(
                f"no space left in '{place.parent}' for the export of the {key.part}"
            ) from error
        raise


@contextlib.contextmanager
def _one_at_a_time(file: Path) -> Iterator[None]:
    """Hold a lock that the operating system lets go of when its holder dies."""
    with open(file, "a", encoding="utf-8") as held:
        lock_file(held, wait=True)
        yield


Run = Callable[[dict[str, torch.Tensor]], torch.Tensor]
"""Inputs by name, float32 and contiguous, to the one output; it is the caller's own."""


class ExportEngine(ABC):
    """Something that runs exported modules."""

    name: str
    extra: str
    packages: tuple[str, ...]
    """What must be installed; the first is the engine itself."""
    quantises = False
    """Whether `quantise` makes 8 bits of an export."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        """What modules are exported in."""
        self.precision = str(dtype).removeprefix("torch.")
        self.notes: list[str] = []

    @abstractmethod
    def export(self, shell: Shell, folder: Path) -> None:
        """Write the shell's module into an empty folder."""

    @abstractmethod
    def load(self, folder: Path, shell: Shell) -> Run:
        """Make a folder's module ready."""

    def quantise(
        self, folder: Path, target: Path, samples: Sequence[dict[str, torch.Tensor]], kept: Sequence[str]
    ) -> None:
        """Write the 8-bit form of a folder's module into an empty folder; `kept` layers stay in float."""
        raise InputError(f"int8 with backend {self.name}", allowed="backend openvino, or torch")

    def versions(self) -> tuple[tuple[str, str], ...]:
        """Of what an export depends on; MissingExtra where a package is not there."""
        found = []
        for package in ("torch", "diffusers", *self.packages):
            try:
                found.append((package, importlib.metadata.version(package)))
            except importlib.metadata.PackageNotFoundError as error:
                raise MissingExtra(package, self.extra) from error
        return tuple(found)


BESIDE_THE_UNET = frozenset({"bf16", "fp16", "fused_attention", "guidance_interval", "tiny_vae"})
"""Optimisations that an exported U-Net can have: attention is fused in the engines anyway."""


def open_exported(
    model: Model,
    engine_of: type[ExportEngine],
    optimise: Sequence[str] | str,
    notice: Callable[[str], None],
) -> Backend:
    """A model's U-Net and VAE decoder in an engine, exported first where the cache has them not yet.

    The VAE's encoder stays with torch, and so do the text encoders (under 1 % of the work of a picture in 20
    steps) but where all is in 8 bits.
    """
    from darkroom.sample import optimisations

    # What `auto` would take is the engine's own business.
    choices = optimisations.parse(optimise)
    int8_prompts = next((choice.argument for choice in choices if choice.name == "int8"), None)
    in_8_bits = int8_prompts is not None and engine_of.quantises
    left_out = {optimisations.AUTO, *(["int8"] if in_8_bits else [])}
    named = [str(choice) for choice in choices if choice.name not in left_out]
    applied = optimisations.optimise(model, named)
    weight = next(applied.model.unet.parameters())  # type: ignore[union-attr]
    engine = engine_of(weight.device, weight.dtype)
    for choice in applied.choices:
        if choice.name not in BESIDE_THE_UNET:
            raise InputError(
                f"optimise '{choice}' with backend {engine.name}",
                allowed=", ".join(sorted(BESIDE_THE_UNET)),
                mend="use backend torch for the others",
            )
    model = applied.model
    _refuse_bank(model.unet, engine.name)
    times_s: dict[str, float] = {}

    def opened_unet() -> Run:
        return _opened(engine, model.unet, unet_shell, notice, times_s)

    vae = applied.tiny_vae or model.vae
    run_decoder = _opened(engine, vae, decoder_shell, notice, times_s)
    if int8_prompts is not None and in_8_bits:
        quantiser = _Quantiser(engine, model, opened_unet, int8.Calibration.of(int8_prompts), notice, times_s)
        run_unet = quantiser.unet()
        run_decoder = quantiser.decoder(vae, run_decoder)
        model = replace(model, text_encoders=quantiser.text_encoders())
    else:
        run_unet = opened_unet()
    return Backend(
        engine.name,
        _unet_of(run_unet),
        decode=_decode_of(vae, run_decoder),
        encode=applied.encode,
        device=engine.device,
        dtype=torch.float32,
        precision="int8" if in_8_bits else engine.precision,
        notes=[*engine.notes, *applied.notes],
        times_s=times_s,
        model=model,
        optimised=tuple(name for name in applied.names if name != "fused_attention"),
        guidance_interval=applied.guidance_interval,
    )


def _decode_of(vae: Any, run: Run) -> Decode:
    return lambda latents_BCHW: decode(
        vae, latents_BCHW, decoder=lambda some: run({"latents": some.contiguous()})
    )


def _refuse_bank(unet: Any, backend: str) -> None:
    """InputError where an adapter bank sits in the U-Net: exported, it would be frozen as it is now."""
    if getattr(unet, ROWS, None) is not None:
        raise InputError(
            f"adapters with backend {backend}", mend="merge them into the model, or use backend torch"
        )


def _opened(
    engine: ExportEngine,
    module: Any,
    shell_of: Callable[[Any], Shell],
    notice: Callable[[str], None],
    times_s: dict[str, float],
) -> Run:
    shell = shell_of(module)
    key = _key(engine, shell, module)

    def make(folder: Path) -> None:
        start = time.perf_counter()
        notice(f"{_part_name(shell.part)} is exported for {engine.name}, once: {_size(shell, engine)}")
        engine.export(shell_of(_in_precision(module, engine.dtype)), folder)
        times_s[f"export {shell.part}"] = time.perf_counter() - start

    folder = exported(key, make)
    start = time.perf_counter()
    run = engine.load(folder, shell)
    times_s[f"load {shell.part}"] = time.perf_counter() - start
    return run


def _key(engine: ExportEngine, shell: Shell, module: Any) -> CacheKey:
    return CacheKey(
        engine.name,
        shell.part,
        identity(module),
        _config_digest(module),
        f"{str(engine.dtype).removeprefix('torch.')}-{engine.device.type}",
        shell.shape,
        engine.versions(),
    )


class _Quantiser:
    """A model's exported parts in 8 bits, calibrated with the float32 U-Net and compared with float32.

    Calibration's pictures are drawn once, and only where a part is not in the cache yet.
    """

    def __init__(
        self,
        engine: ExportEngine,
        model: Model,
        open_unet: Callable[[], Run],
        calibration: int8.Calibration,
        notice: Callable[[str], None],
        times_s: dict[str, float],
    ) -> None:
        self._engine, self._model, self._notice, self._times_s = engine, model, notice, times_s
        self._calibration = calibration
        self._pictures = int8.CalibrationPictures(
            model, lambda: _unet_of(open_unet()), self._calibration, notice
        )
        self._text = identity(*model.text_encoders)[:16]

    def unet(self) -> Run:
        """The U-Net; DarkroomError where 8 bits break its pictures."""
        module: Any = self._model.unet
        shell = unet_shell(module)

        def compare(small: Run) -> dict[str, Any]:
            found = int8.quality(self._model, self._pictures, _unet_of(small))
            int8.refuse_broken(found)
            return found

        run, about = self._part(
            shell,
            module,
            self._text,
            lambda: self._pictures.inputs,
            lambda one: _called(unet_call(module), one),
            compare,
        )
        self._notice(int8.summary(about["quality"], about["float_layers"]))
        return run

    def decoder(self, vae: Any, plain: Run) -> Run:
        """A VAE's decoder, or the tiny one in its place; `plain` where 8 bits would harm its pictures."""
        shell = decoder_shell(vae)

        def compare(small: Run) -> dict[str, Any]:
            (unseen,) = int8.decoder_inputs(vae, [self._pictures.unseen[-1]])
            return int8.decoder_quality(small(dict(unseen)), plain(dict(unseen)))

        run, about = self._part(
            shell,
            vae,
            identity(self._model.unet, *self._model.text_encoders)[:16],  # type: ignore[arg-type]
            lambda: int8.decoder_inputs(vae, self._pictures.latents),
            lambda one: shell.module(one["latents"]),
            compare,
        )
        return plain if self._stays(shell.part, about, int8.harms(about["quality"]), "psnr_db") else run

    def text_encoders(self) -> list[Any]:
        """Look-alikes of the text encoders; those that 8 bits would change too much as they are."""
        return [self._text_encoder(i) for i in range(len(self._model.text_encoders))]

    def _text_encoder(self, number: int) -> Any:
        encoder: Any = self._model.text_encoders[number]
        if not text_layers(encoder):
            return encoder
        shell = text_shell("text_encoder" if not number else f"text_encoder_{number + 1}", encoder)

        def compare(small: Run) -> dict[str, Any]:
            (unseen,) = int8.embedded_prompts(self._model, number, [int8.UNSEEN_PROMPT])
            return int8.text_quality(small(dict(unseen)), shell.module(unseen["embedded"]))

        run, about = self._part(
            shell,
            encoder,
            hashlib.sha256("\n".join(int8.TEXTS).encode()).hexdigest()[:8],
            lambda: int8.embedded_prompts(self._model, number, [*int8.TEXTS, *self._calibration.prompts]),
            lambda one: shell.module(one["embedded"]),
            compare,
        )
        harmed = int8.harms_text(about["quality"])
        return encoder if self._stays(shell.part, about, harmed, "db") else int8.with_layers(encoder, run)

    def _stays(self, part: str, about: dict[str, Any], harmed: bool, measure: str) -> bool:
        """Whether a part stays in float, logged either way."""
        kept, found = len(about["float_layers"]), about["quality"][measure]
        what = "stays in float" if harmed else f"in 8 bits, {kept} layers in float"
        self._notice(f"int8: {_part_name(part)} {what} ({found:.1f} dB against float32)")
        return harmed

    def _part(
        self,
        shell: Shell,
        module: Any,
        drawn_by: str,
        samples_of: Callable[[], Sequence[int8.Inputs]],
        call: Callable[[int8.Inputs], Any],
        compare: Callable[[Run], dict[str, Any]],
    ) -> tuple[Run, dict[str, Any]]:
        """An exported part in 8 bits, from the cache or made now, and the report of its quality."""
        engine, part = self._engine, shell.part
        whole = _key(engine, shell, module)
        bits = "int8" if int8.adds_exactly() else "int8half"
        precision = f"{bits}-{self._calibration.digest}-{drawn_by}"
        versions = (*whole.versions, _version("nncf"))
        key = replace(whole, precision=precision, versions=versions, form=_int8_form(whole.form))

        def make(folder: Path) -> None:
            """Quantise the exported part into a folder and write its report next to the files."""
            start = time.perf_counter()
            patience = ": this takes minutes for a large one" if part == "unet" else ""
            self._notice(f"{_part_name(part)} is quantised to 8 bits, once{patience}")
            samples = samples_of()
            self._notice(f"int8: measuring each layer of {_part_name(part)}")
            kept = int8.sensitive_layers(shell.module, samples[:: max(1, len(samples) // 4)], call)
            self._notice(f"int8: quantising {_part_name(part)}")
            peak = PeakMemory("cpu")
            plain = exported(whole, lambda folder: engine.export(shell, folder))
            engine.quantise(plain, folder, samples, kept)
            seconds = time.perf_counter() - start
            self._times_s[f"quantise {part}"] = seconds
            self._notice(
                f"int8: {_part_name(part)} took {seconds:.0f} s, {peak.bytes() / 1e9:.1f} GB resident at most"
            )
            int8.write_report(folder, compare(engine.load(folder, shell)), kept, self._calibration)

        folder = exported(key, make)
        start = time.perf_counter()
        run = engine.load(folder, shell)
        self._times_s[f"load int8 {part}"] = time.perf_counter() - start
        return run, int8.read_report(folder)


def _int8_form(form: int) -> int:
    """How 8-bit exports are made; a change in `int8` that makes other files adds one."""
    return 100 * form + 2


def _called(unet: Unet, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    rest = {name: value for name, value in inputs.items() if name not in ("x", "t", "text")}
    return unet(inputs["x"], inputs["t"], inputs["text"], rest)


def _version(package: str) -> tuple[str, str]:
    try:
        return package, importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtra(package, "openvino") from error


def _part_name(part: str) -> str:
    names = {"unet": "the U-Net", "vae_decoder": "the VAE's decoder", "text_encoder": "the text encoder"}
    return names.get(part, "the second text encoder")


def _size(shell: Shell, engine: ExportEngine) -> str:
    count = sum(p.numel() for p in shell.module.parameters())
    size = count * engine.dtype.itemsize
    patience = "; this takes minutes" if count > 100_000_000 else ""
    size_text = f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"
    return f"{count / 1e6:.3g} M parameters, {size_text}{patience}"


def _in_precision(module: Any, dtype: torch.dtype) -> Any:
    """The module with diffusers' own attention in a precision, the given one left as it is."""
    same = look_alike(module)
    if hasattr(same, "set_default_attn_processor"):
        same.set_default_attn_processor()
    if next(module.parameters()).dtype == dtype:
        return same
    cast = {name: value.to(dtype) for name, value in same.state_dict().items()}
    same.load_state_dict(cast, assign=True)
    return same


def _config_digest(module: Any) -> str:
    settings = module.config.to_dict() if hasattr(module.config, "to_dict") else module.config
    config = {name: value for name, value in settings.items() if not name.startswith("_")}
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _unet_of(run: Run) -> Unet:
    def call(
        x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, added: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        given = {"x": x, "t": t, "text": text, **added}
        return run({name: value.detach().float().contiguous() for name, value in given.items()})

    return call
