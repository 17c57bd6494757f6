"""What a picture proves of itself: signed content credentials (C2PA), a watermark, and IPTC's metadata.

`Provenance` finishes pictures: it puts in the watermark and signs the file with the operator's certificate,
or with one that darkroom made for this machine. The manifest names the generator, the model and its hash, and
the settings as far as the operator lets it; the pictures that it was made from, and those that steered it
(of ControlNets and their kin), are its ingredients, with their own manifests. `verify_picture`
reads all of it back. Needs the extra `provenance` for credentials; the watermark and
the metadata need nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from darkroom import __version__
from darkroom.certificates import (
    OFFLINE,
    SIGNING,
    Certificate,
    installed,
    local_certificate,
    make_test_certificate,
)
from darkroom.errors import InputError, first_line
from darkroom.options import check_credentials
from darkroom.sample import watermark
from darkroom.sample.pictures import (
    PROMPTS,
    XMP,
    Picture,
    make_grid,
    parameters_in,
    png_text,
    save_grid,
)
from darkroom.sample.pictures import save_pictures as plain_save
from darkroom.sample.prompt_files import read_axes, sheet

LOG = logging.getLogger("darkroom.sample")
MARK_VARIABLE = "DARKROOM_MARK"
"""Environment variable with the watermark's key; anyone with the key can find the mark."""
TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
MADE_BY_MODEL = b"trainedAlgorithmicMedia"
SOURCE = "http://cv.iptc.org/newscodes/digitalsourcetype"


@dataclass(frozen=True)
class Origin:
    """What a picture's watermark says, and the files of the pictures that it was made from."""

    payload: int
    inputs: tuple[bytes, ...] = ()
    """The picture that was edited and its mask."""
    controls: tuple[bytes, ...] = ()
    """Pictures that steered it."""

    @classmethod
    def of(
        cls, parameters: dict[str, Any], inputs: Sequence[bytes] = (), controls: Sequence[bytes] = ()
    ) -> Origin:
        """The payload is a checksum of what the picture was made with."""
        text = json.dumps(parameters, sort_keys=True, default=str).encode()
        return cls(zlib.crc32(text), tuple(inputs), tuple(controls))


class Provenance:
    """Marks and signs pictures. May be used by several threads."""

    def __init__(
        self, certificate: Certificate | None, *, say: str = "settings", mark_key: str | None = None
    ) -> None:
        check_credentials(say)
        self._certificate, self._say = certificate, say
        self._mark_key = mark_key or os.environ.get(MARK_VARIABLE, "darkroom")
        self._lock = threading.Lock()
        self._signer: Any = None
        self._logged_small = False

    @property
    def signs(self) -> bool:
        """Whether files get credentials."""
        return self._certificate is not None

    @classmethod
    def opened(cls, sign: Path | None, own: Path, *, say: str = "settings") -> Provenance:
        """With the certificate that the operator named, else this machine's own in the file `own`, which is
        made where it is not there. Without the package for credentials pictures are marked only.
        """
        if sign is not None:
            return cls(Certificate.read(sign), say=say)
        if not installed():
            return cls(None, say=say)
        try:
            if not own.exists():
                make_test_certificate(own, "darkroom on this machine")
            return cls(Certificate.read(own), say=say)
        except OSError:  # a home that is not to be written to
            return cls(None, say=say)

    def marked(self, image: Image.Image, origin: Origin) -> Image.Image:
        """The image with the watermark; as it was where it is too small for one, which the log says once."""
        if (line := watermark.too_small([image.size])) and not self._logged_small:
            self._logged_small = True
            LOG.info("%s", line)
        return watermark.embed(image, origin.payload, self._mark_key)

    def png(self, picture: Picture, origin: Origin, compress_level: int = 6) -> bytes:
        """The file of a picture whose image is marked already: metadata, parameters, credentials."""
        buffer = io.BytesIO()
        picture.image.save(buffer, "PNG", pnginfo=png_text(picture), compress_level=compress_level)
        return self.signed(buffer.getvalue(), "PNG", picture.parameters, origin.inputs, origin.controls)

    def signed(
        self,
        content: bytes,
        kind: str,
        parameters: dict[str, Any],
        inputs: Sequence[bytes] = (),
        controls: Sequence[bytes] = (),
    ) -> bytes:
        """A file with credentials: made by a model, from these inputs if any, steered by these controls."""
        actions: list[dict[str, Any]] = []
        if inputs:
            actions.append({"action": "c2pa.opened", "parameters": {"ingredientIds": ["input-0"]}})
            kind_of = f"{SOURCE}/compositeWithTrainedAlgorithmicMedia"
            actions.append({"action": "c2pa.edited", "digitalSourceType": kind_of})
        else:
            kind_of = f"{SOURCE}/trainedAlgorithmicMedia"
            actions.append({"action": "c2pa.created", "digitalSourceType": kind_of})
        if controls:
            ids = [f"control-{i}" for i in range(len(controls))]
            actions[-1]["parameters"] = {"ingredientIds": ids}
        for action in actions:
            action["softwareAgent"] = {"name": _agent(parameters)}
        generation = {"label": "org.darkroom.generation", "data": self._disclosed(parameters)}
        return self._sign(content, kind, actions, [generation], inputs, controls)

    def composed(
        self, content: bytes, kind: str, parameters: Sequence[dict[str, Any]], files: Iterable[bytes]
    ) -> bytes:
        """The credentials of a sheet of pictures that a model made: their `files`, read one by one, are its
        ingredients, and it says the settings that all of them have.
        """
        ids = [f"picture-{i}" for i in range(len(parameters))]
        actions: list[dict[str, Any]] = [
            {"action": "c2pa.created", "digitalSourceType": f"{SOURCE}/compositeSynthetic"},
            {"action": "c2pa.placed", "parameters": {"ingredientIds": ids}},
        ]
        first = parameters[0]
        same = {k: v for k, v in first.items() if all(k in one and one[k] == v for one in parameters)}
        for action in actions:
            action["softwareAgent"] = {"name": _agent(same)}
        generation = {"label": "org.darkroom.generation", "data": self._disclosed(same)}
        return self._sign(content, kind, actions, [generation], [], [], files)

    def converted(self, content: bytes, kind: str, original: bytes) -> bytes:
        """The credentials of a file that is another one in a new format: that one is its ingredient."""
        opened = {"action": "c2pa.opened", "parameters": {"ingredientIds": ["input-0"]}}
        actions: list[dict[str, Any]] = [opened, {"action": "c2pa.transcoded"}]
        return self._sign(content, kind, actions, [], [original])

    def upscaled(self, image: Image.Image, original: bytes, network: str | None = None) -> bytes:
        """The PNG of a picture that was made from another one's pixels alone, which is its ingredient.

        `network` is what did it, where one did. A mark and IPTC's metadata that the other one had are kept.
        """
        with Image.open(io.BytesIO(original), formats=tuple(TYPES)) as opened:
            info = PngInfo()
            if MADE_BY_MODEL in _metadata(opened):
                info.add_itxt("XML:com.adobe.xmp", XMP)
            found = None if opened.size == image.size else watermark.find(opened, self._mark_key)
        if found is not None:
            payload = zlib.crc32(original) if found.payload is None else found.payload
            image = watermark.embed(image, payload, self._mark_key)
        buffer = io.BytesIO()
        image.save(buffer, "PNG", pnginfo=info, compress_level=1)
        actions: list[dict[str, Any]] = [
            {"action": "c2pa.opened", "parameters": {"ingredientIds": ["input-0"]}},
            {"action": "c2pa.resized"},
        ]
        if network is not None:
            actions[-1]["digitalSourceType"] = f"{SOURCE}/algorithmicallyEnhanced"
            actions[-1]["softwareAgent"] = {"name": f"{network} (darkroom {__version__})"}
        return self._sign(buffer.getvalue(), "PNG", actions, [], [original])

    def _disclosed(self, parameters: dict[str, Any]) -> dict[str, Any]:
        if self._say == "model":
            parameters = {k: v for k, v in parameters.items() if k in ("model", "model_sha256", "version")}
        if self._say != "all":
            parameters = {k: v for k, v in parameters.items() if k not in PROMPTS}
        content: dict[str, Any] = json.loads(json.dumps(parameters, default=str))
        return content

    def _sign(
        self,
        content: bytes,
        kind: str,
        actions: list[dict[str, Any]],
        more: list[dict[str, Any]],
        inputs: Sequence[bytes],
        controls: Sequence[bytes] = (),
        parts: Iterable[bytes] = (),
    ) -> bytes:
        if self._certificate is None:
            return content
        import c2pa

        manifest = {
            "claim_generator_info": [{"name": "darkroom", "version": __version__}],
            "format": TYPES[kind],
            "assertions": [{"label": "c2pa.actions.v2", "data": {"actions": actions}}, *more],
        }
        with self._lock:
            signer = self._signer = self._signer or self._open_signer()
            context = c2pa.Context(c2pa.Settings.from_json(json.dumps(SIGNING)))
            builder = c2pa.Builder.from_json(json.dumps(manifest), context)
            titled = [(f"input {i}", given) for i, given in enumerate(inputs)]
            titled += [(f"control {i}", given) for i, given in enumerate(controls)]
            placed = ((f"picture {i}", given) for i, given in enumerate(parts))
            for title, given in chain(titled, placed):
                name = title.replace(" ", "-")
                relations = {"input 0": "parentOf", "picture": "componentOf"}
                relation = relations.get(title) or relations.get(title.split()[0], "inputTo")
                ingredient = {"title": title, "relationship": relation, "label": name, "instance_id": name}
                try:
                    builder.add_ingredient(ingredient, TYPES[_kind_of(given)], io.BytesIO(given))
                except c2pa.C2paError as error:  # credentials that are broken: named without them
                    LOG.debug("the credentials of %s cannot be read: %s", title, first_line(error))
                    builder.add_ingredient(ingredient, TYPES["PNG"], io.BytesIO(_pixels_alone(given)))
            out = io.BytesIO()
            builder.sign(signer, TYPES[kind], io.BytesIO(content), out)
        return out.getvalue()

    def _open_signer(self) -> Any:
        assert self._certificate is not None
        return self._certificate.signer()


def save_pictures(
    pictures: Sequence[Picture],
    out: Path,
    provenance: Provenance | None,
    inputs: Sequence[bytes] = (),
    controls: Sequence[bytes] = (),
    *,
    kind: str = "png",
    grid: bool = True,
    axes: Sequence[str] | None = None,
) -> list[Path]:
    """`pictures.save_pictures` with watermark and credentials, where `provenance` is given; with `axes` the
    grid is the sheet that these are of, a PNG. A grid's cells have their pictures' marks.
    """

    def sign(content: bytes, manifest: dict[str, Any]) -> bytes:
        assert provenance is not None
        return provenance.signed(content, kind.upper(), manifest, inputs, controls)

    def sign_grid(content: bytes) -> bytes:
        assert provenance is not None
        files = (path.read_bytes() for path in paths)
        return provenance.composed(content, grid_kind.upper(), [one.parameters for one in pictures], files)

    if provenance is not None:
        pictures = [
            replace(picture, image=provenance.marked(picture.image, Origin.of(picture.parameters)))
            for picture in pictures
        ]
    signs = provenance is not None
    paths = plain_save(pictures, out, kind=kind, grid=False, sign=sign if signs else None)
    images = [picture.image for picture in pictures]
    if axes:
        image, grid_kind = sheet(images, read_axes(axes)), "png"
    elif grid and len(pictures) > 1:
        image, grid_kind = make_grid(images), kind
    else:
        return paths
    return [*paths, save_grid(image, out, kind=grid_kind, sign=sign_grid if signs else None)]


def _agent(parameters: Mapping[str, Any]) -> str:
    return f"{parameters.get('model', 'a model')} (darkroom {__version__})"


def as_ingredient(file: Path) -> bytes:
    """A picture's file as credentials can name it; in a format that they do not know, as PNG."""
    content = file.read_bytes()
    try:
        _kind_of(content)
    except UnidentifiedImageError:
        return _pixels_alone(content)
    return content


def _pixels_alone(content: bytes) -> bytes:
    """A picture as PNG, without what else its file holds."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(content)) as image:
        image.convert("RGB").save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _kind_of(content: bytes) -> str:
    with Image.open(io.BytesIO(content), formats=tuple(TYPES)) as image:
        return str(image.format)


def save_with_metadata(image: Image.Image, kind: str, quality: int) -> bytes:
    """A JPEG or WebP that says by IPTC's metadata that a model made it."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, kind, quality=quality, xmp=XMP.encode())
    return buffer.getvalue()


# ---- reading back


@dataclass
class PictureProof:
    """What a picture's file proves. `credentials`: none, trusted, valid (by a signer that this machine does
    not know), invalid, elsewhere (the file names an address for them, which is not asked), or unread (the
    package for them is not installed)."""

    file: str
    credentials: str = "none"
    signer: str | None = None
    generator: str | None = None
    chain: list[str] = field(default_factory=list)
    """What was done to it and who signed that, the latest first."""
    says: dict[str, Any] = field(default_factory=dict)
    """The signed settings."""
    watermark: str | None = None
    """Eight hexadecimal digits; `there` where the mark is too faint to be read; None where none was found."""
    watermark_score: float | None = None
    marked_size: bool = True
    """Whether it is large enough for a watermark to be found."""
    declared: bool = False
    """Whether unsigned metadata (IPTC) says that a model made it."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Unsigned: from the file's text."""
    sha256: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing contradicts what the file says; a file that says nothing is ok."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with `ok`."""
        return {"ok": self.ok, **vars(self)}

    def lines(self) -> list[str]:
        """For a reader. What the file says of itself neither begins a line nor steers a terminal."""
        return [
            "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line) for line in self._lines()
        ]

    def _lines(self) -> list[str]:
        who = f", signed by {self.signer}" if self.signer else ""
        none = "none found" if self.marked_size else "the picture is too small to carry one"
        mark = {None: none, "there": "found, too faint to be read"}.get(self.watermark)
        if mark is None:
            mark = f"{self.watermark} (score {self.watermark_score:.1f})"
        lines = [self.file, f"  sha256       {self.sha256}", f"  credentials  {self.credentials}{who}"]
        lines += [f"  chain        {step}" for step in self.chain]
        lines += [f"  signed       {name}: {value}" for name, value in self.says.items()]
        lines += [
            f"  watermark    {mark}",
            f"  metadata     {'made by a model' if self.declared else 'none'}",
        ]
        lines += [f"  parameters   {name}: {value}" for name, value in self.parameters.items()]
        return [*lines, *(f"  WRONG        {problem}" for problem in self.problems)]


def verify_picture(path: Path, *, trust: Path | None = None, mark_key: str | None = None) -> PictureProof:
    """What a picture's file proves of itself. InputError for what is no PNG, JPEG or WebP.

    `trust` is a PEM file of authorities; this machine's own certificate is trusted as well.
    """
    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content), formats=tuple(TYPES)) as image:
            kind = str(image.format)
            image.load()
    except OSError as error:
        reason = error.strerror or "no picture that can be read"
        raise InputError(f"'{path}': {reason}", allowed="PNG, JPEG or WebP") from error
    except (Image.DecompressionBombError, ValueError, SyntaxError) as error:
        raise InputError(f"'{path}' is no picture that can be read: {error}") from error
    proof = PictureProof(str(path), sha256=hashlib.sha256(content).hexdigest())
    proof.declared = MADE_BY_MODEL in _metadata(image)
    proof.parameters = parameters_in(image) or {}
    proof.marked_size = min(image.size) >= watermark.LEAST_SIDE * watermark.SCALES[0]
    found = watermark.find(image, mark_key or os.environ.get(MARK_VARIABLE, "darkroom"))
    if found is not None:
        proof.watermark = "there" if found.payload is None else f"{found.payload:08x}"
        proof.watermark_score = found.score
    if installed():
        _read_credentials(proof, content, kind, trust)
    else:
        proof.credentials = "unread"
    return proof


def _metadata(image: Image.Image) -> bytes:
    found = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp") or b""
    return found if isinstance(found, bytes) else str(found).encode()


def _read_credentials(proof: PictureProof, content: bytes, kind: str, trust: Path | None) -> None:
    import c2pa

    settings: dict[str, Any] = {"verify": {"verify_trust": True, **OFFLINE}}
    settings["trust"] = {"trust_config": "\n".join(MAY_SIGN)}
    if anchors := _anchors(trust):
        settings["trust"]["user_anchors"] = anchors
    context = c2pa.Context(c2pa.Settings.from_json(json.dumps(settings)))
    try:
        reader = c2pa.Reader.try_create(TYPES[kind], io.BytesIO(content), None, context)
    except c2pa.C2paError as error:
        if str(error).startswith("Remote"):  # it has no class of its own
            proof.credentials = "elsewhere"
            return
        proof.credentials = "invalid"
        proof.problems.append(f"credentials that cannot be read: {first_line(error)}")
        return
    if reader is None:
        return
    manifest_store = json.loads(reader.json())
    codes = [one["code"] for one in manifest_store.get("validation_status", [])]
    wrong = [code for code in codes if code != UNTRUSTED]
    proof.credentials = "invalid" if wrong else "valid" if codes else "trusted"
    proof.problems += [f"credentials: {code}" for code in wrong]
    active = manifest_store["manifests"].get(manifest_store.get("active_manifest"), {})
    proof.signer = _signer_of(active)
    proof.generator = ", ".join(
        f"{one.get('name')} {one.get('version', '')}".strip()
        for one in active.get("claim_generator_info", [])
    )
    _read_chain(proof, manifest_store)


MAY_SIGN = (
    "1.3.6.1.5.5.7.3.4",  # id-kp-emailProtection
    "1.3.6.1.5.5.7.3.36",  # id-kp-documentSigning
    "1.3.6.1.4.1.62558.2.1",  # c2pa-kp-claimSigning
    "1.3.6.1.4.1.311.76.59.1.9",  # Microsoft's, for C2PA
)
"""Extended key usages of signers. C2PA's library signs for all of these, and without a list reads only the
first."""
UNTRUSTED = "signingCredential.untrusted"


def _read_chain(proof: PictureProof, manifest_store: dict[str, Any]) -> None:
    """What was done to the picture, and to those that it was made from, where their files had credentials.

    Whether an ingredient's own credentials fitted its file was noted when it was used; whether its signer is
    trusted is a matter of who reads.
    """
    manifests = manifest_store["manifests"]
    results = manifest_store.get("validation_results") or {}
    deltas = {one["ingredientAssertionURI"]: one for one in results.get("ingredientDeltas") or []}
    # A manifest, what it is to the picture, how its credentials stand, and whether it tells of the picture.
    ahead = [(str(manifest_store.get("active_manifest")), "", "", True)]
    seen: set[str] = set()
    while ahead:
        label, title, standing, tells = ahead.pop(0)
        if label not in manifests or label in seen:
            continue
        seen.add(label)
        manifest = manifests[label]
        begin, end = f"{title}: " if title else "", f" ({standing})" if standing else ""
        signed = f"signed by {_signer_of(manifest)}{end}"
        proof.chain.append(f"{begin}{', '.join(_actions(manifest))}, {signed}")
        if tells and not proof.says:
            proof.says = _assertion(manifest, "org.darkroom.generation")
        further = []
        for one in manifest.get("ingredients", []):
            named = str(one.get("title", "a picture"))
            if "active_manifest" not in one:
                proof.chain.append(f"from {named} without credentials")
                continue
            address = f"self#jumbf=/c2pa/{label}/c2pa.assertions/{one.get('label')}"
            wrong, trusted = _standing(one, deltas.get(address, {}))
            proof.problems += [f"credentials of {named}: {code}" for code in wrong]
            now = f"invalid: {', '.join(wrong)}" if wrong else "trusted" if trusted else "valid"
            parent = one.get("relationship") == "parentOf"
            further.append(
                (one["active_manifest"], "" if parent else named, now, tells and parent and not wrong)
            )
        ahead[:0] = further


def _standing(ingredient: dict[str, Any], delta: dict[str, Any]) -> tuple[list[str], bool]:
    """What is wrong with an ingredient's credentials, and whether their signer is trusted."""
    noted = (ingredient.get("validation_results") or {}).get("activeManifest") or {}
    now = delta.get("validationDeltas") or {}
    codes = [one["code"] for found in (noted, now) for one in found.get("failure", [])]
    codes += [one["code"] for one in ingredient.get("validation_status") or []]
    known = any(one["code"] == "signingCredential.trusted" for one in now.get("success", []))
    return list(dict.fromkeys(code for code in codes if code != UNTRUSTED)), known or UNTRUSTED not in codes


def _anchors(trust: Path | None) -> str:
    """The authorities that this machine trusts: those of the file, and that of its own certificate."""
    parts = []
    for path, needed in ((trust, True), (local_certificate(), False)):
        try:
            text = path.read_text(encoding="ascii") if path is not None else ""
        except (OSError, UnicodeDecodeError) as error:
            if needed:
                raise InputError(f"--trust '{path}' cannot be read") from error
            continue
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        blocks = [part.partition(end)[0] for part in text.split(begin)[1:]]
        if needed and path is not None and not blocks:
            raise InputError(f"--trust '{path}'", allowed="a PEM file of certificates")
        parts += [f"{begin}{block}{end}\n" for block in (blocks if needed else blocks[-1:])]
    return "".join(parts)


def _signer_of(manifest: dict[str, Any]) -> str:
    info = manifest.get("signature_info", {})
    return str(info.get("common_name") or info.get("issuer") or "somebody")


def _assertion(manifest: dict[str, Any], label: str) -> dict[str, Any]:
    found = [one["data"] for one in manifest.get("assertions", []) if one["label"] == label]
    return dict(found[0]) if found and isinstance(found[0], dict) else {}


def _actions(manifest: dict[str, Any]) -> list[str]:
    lists = [one["data"] for one in manifest.get("assertions", []) if one["label"].startswith("c2pa.actions")]
    all_actions = [action for data in lists if isinstance(data, dict) for action in data.get("actions", [])]
    actions = [action for action in all_actions if isinstance(action, dict)]
    return [
        str(action.get("action", "")).removeprefix("c2pa.")
        + (f" by {agent['name']}" if isinstance(agent := action.get("softwareAgent"), dict) else "")
        for action in actions
    ]
