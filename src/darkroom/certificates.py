"""Certificates that pictures are signed with: read, checked before anything is drawn, and made for tests and
for this machine. Needs the extra `provenance`; imports no torch.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from darkroom.errors import InputError, first_line, install_extra
from darkroom.hardware.system import atomic_replace

EXTRA = "provenance"
TEST_NAME = "darkroom test signer"
YEARS = 10
_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
"""One black pixel, to try a certificate out on."""
OFFLINE = {"remote_manifest_fetch": False, "ocsp_fetch": False}
"""A picture may name an address where its credentials are: anybody's, so it is not asked."""
SIGNING = {
    "builder": {"thumbnail": {"enabled": False}},
    "verify": {"verify_after_sign": False, **OFFLINE},
}
"""No thumbnails: the picture itself is there. What was just signed is not checked again."""


def installed() -> bool:
    """Whether credentials can be made and read."""
    return find_spec("c2pa") is not None and find_spec("cryptography") is not None


def how_to_sign() -> str:
    """What has pictures signed here, where `installed` is False."""
    if sys.platform == "win32":
        return "there is no c2pa-python for Windows: use Linux in WSL 2"
    return install_extra(EXTRA)


def _need_c2pa() -> None:
    if not installed():
        raise InputError("c2pa-python is not installed", mend=how_to_sign())


@dataclass(frozen=True)
class Certificate:
    """Certificates (the signer's first, then who vouches for it) and the signer's private key, as PEM."""

    chain: bytes
    key: bytes
    algorithm: str
    """As C2PA names it."""

    @classmethod
    def read(cls, path: Path) -> Certificate:
        """InputError for a file that does not hold certificates and the first one's key."""
        _need_c2pa()
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        allowed = "a PEM file with the certificate, those that vouch for it, and its private key"
        try:
            content = path.read_bytes()
            certificates = x509.load_pem_x509_certificates(content)
            private: Any = serialization.load_pem_private_key(_key_part(content), None)
        except OSError as error:
            raise InputError(f"--sign '{path}' cannot be read: {error.strerror}", allowed=allowed) from error
        except (ValueError, TypeError) as error:
            raise InputError(f"--sign '{path}': {error}", allowed=allowed) from error
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        publics = [
            public.public_bytes(serialization.Encoding.DER, form)
            for public in (certificates[0].public_key(), private.public_key())
        ]
        if publics[0] != publics[1]:
            raise InputError(
                f"--sign '{path}': the key is not that of the first certificate", allowed=allowed
            )
        if why := _unfit(certificates[0]):
            raise InputError(f"--sign '{path}': {why}", allowed="a certificate that may sign, valid now")
        pem = serialization.Encoding.PEM
        chain = b"".join(one.public_bytes(pem) for one in certificates)
        key = private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        made = cls(chain, key, _algorithm(private, path))
        made._try_out(path)
        return made

    def signer(self) -> Any:
        """What signs by it. InputError where it cannot."""
        import c2pa

        try:
            return c2pa.Signer.from_info(c2pa.C2paSignerInfo(self.algorithm, self.chain, self.key, None))
        except c2pa.C2paError as error:
            raise InputError(f"the certificate cannot sign: {first_line(error)}") from error

    def _try_out(self, path: Path) -> None:
        """InputError unless C2PA's library signs with it: it knows more of them than `_unfit` does."""
        import c2pa

        actions = {"actions": [{"action": "c2pa.created"}]}
        manifest = {"format": "image/png", "assertions": [{"label": "c2pa.actions.v2", "data": actions}]}
        try:
            context = c2pa.Context(c2pa.Settings.from_json(json.dumps(SIGNING)))
            builder = c2pa.Builder.from_json(json.dumps(manifest), context)
            builder.sign(self.signer(), "image/png", io.BytesIO(_PNG), io.BytesIO())
        except (c2pa.C2paError, InputError) as error:
            raise InputError(
                f"--sign '{path}' cannot sign pictures: {first_line(error)}",
                allowed="key usage digitalSignature, and an extended key usage such as emailProtection",
            ) from error


def _unfit(certificate: Any) -> str:
    """Why a certificate cannot sign now, where plain words can say it; else nothing."""
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    if certificate.not_valid_after_utc < now:
        return f"the certificate expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
    if certificate.not_valid_before_utc > now:
        return f"the certificate is not valid before {certificate.not_valid_before_utc:%Y-%m-%d}"
    try:
        extensions = certificate.extensions
    except ValueError as error:
        return f"the certificate's extensions cannot be read: {first_line(error)}"
    by_kind = {type(one.value): one.value for one in extensions}
    if (basic := by_kind.get(x509.BasicConstraints)) is not None and basic.ca:
        return "the first certificate is an authority's, which signs certificates and no pictures"
    if (usage := by_kind.get(x509.KeyUsage)) is None or not usage.digital_signature:
        return "the certificate's key usage has no digitalSignature"
    if x509.ExtendedKeyUsage not in by_kind:
        return "the certificate has no extended key usage"
    return ""


def _key_part(content: bytes) -> bytes:
    """The private key among the certificates of a file."""
    for kind in (b"PRIVATE KEY", b"EC PRIVATE KEY", b"RSA PRIVATE KEY"):
        begin, end = b"-----BEGIN %s-----" % kind, b"-----END %s-----" % kind
        if begin in content and end in content:
            return content[content.index(begin) : content.index(end) + len(end)] + b"\n"
    raise ValueError("no private key, or an encrypted one")


def _algorithm(key: Any, path: Path) -> str:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    if isinstance(key, ed25519.Ed25519PrivateKey):
        return "ed25519"
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size >= 2048:
        return "ps256"
    curves = {"secp256r1": "es256", "secp384r1": "es384", "secp521r1": "es512"}
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in curves:
        return curves[key.curve.name]
    allowed = "EC of P-256, P-384 or P-521, Ed25519, or RSA of 2048 bits and more"
    raise InputError(f"--sign '{path}': a key of another kind", allowed=allowed)


def make_test_certificate(path: Path, name: str = TEST_NAME) -> None:
    """Write a certificate of an authority of its own, good for tests: nobody else trusts it."""
    _need_c2pa()
    content = _made(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    atomic_replace(part, path)


def _made(name: str) -> bytes:
    """An authority, and a signer that it vouches for: C2PA takes no certificate that vouches for itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)
    authority, signer = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def named(common: str) -> x509.Name:
        names = {NameOID.ORGANIZATION_NAME: "darkroom, for tests", NameOID.COMMON_NAME: common}
        return x509.Name([x509.NameAttribute(oid, text) for oid, text in names.items()])

    def made(subject: str, key: ec.EllipticCurvePrivateKey, *, vouches: bool) -> x509.Certificate:
        """A certificate of a key for `subject`, signed by the authority's."""
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
        )
        more = {"encipher_only": False, "decipher_only": False}
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named(f"{name}: authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
            .add_extension(x509.BasicConstraints(vouches, 0 if vouches else None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=not vouches, key_cert_sign=vouches, crl_sign=vouches, **usage, **more
                ),
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
            )
        )
        if not vouches:
            purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION])
            builder = builder.add_extension(purpose, critical=False)
        return builder.sign(authority, hashes.SHA256())

    pem = serialization.Encoding.PEM
    key = signer.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    certificates = made(name, signer, vouches=False), made(f"{name}: authority", authority, vouches=True)
    return b"".join([*(one.public_bytes(pem) for one in certificates), key])


def local_certificate() -> Path:
    """Where this machine's own certificate is, for pictures of `generate`."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "darkroom" / "certificate.pem"
