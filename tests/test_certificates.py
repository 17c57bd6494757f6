"""Certificates that cannot sign are refused where they are read, before a server or a picture is made."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from darkroom import certificates
from darkroom.certificates import Certificate
from darkroom.cli.application import app
from darkroom.errors import InputError
from needs import missing

DAY = datetime.timedelta(days=1)


@pytest.fixture(autouse=True)
def _needs_c2pa() -> None:
    if not certificates.installed():
        missing("no c2pa-python here: pip install '.[provenance]'")


def write(path: Path, **how: Any) -> Path:
    """A signer's certificate by an authority, and its key: `begin` and `end` in days from now, `usage`
    (digitalSignature, or another), `purposes` (names or numbers), `ca`, `key` (its own, other, none)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)
    authority, signer, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))

    def name(text: str) -> x509.Name:
        kinds = {NameOID.ORGANIZATION_NAME: "tests", NameOID.COMMON_NAME: text}
        return x509.Name([x509.NameAttribute(kind, one) for kind, one in kinds.items()])

    def builder(of: str, key: Any) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(name(of)).issuer_name(name("authority"))
        return made.public_key(key.public_key()).serial_number(x509.random_serial_number())

    bits = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
    usage = dict.fromkeys(
        (*bits, "digital_signature", "key_cert_sign", "encipher_only", "decipher_only"), False
    )
    usage[how.get("usage", "digital_signature")] = True
    by = authority.public_key()
    made = builder("signer", signer)
    made = made.not_valid_before(now + how.get("begin", -1) * DAY).not_valid_after(
        now + how.get("end", 9) * DAY
    )
    made = made.add_extension(x509.BasicConstraints(how.get("ca", False), None), critical=True)
    made = made.add_extension(x509.KeyUsage(**usage), critical=True)
    made = made.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by), critical=False)
    named = how.get("purposes", ["EMAIL_PROTECTION"])
    purposes = [getattr(ExtendedKeyUsageOID, one, None) or x509.ObjectIdentifier(one) for one in named]
    if purposes:
        made = made.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    above = builder("authority", authority).not_valid_before(now - 99 * DAY).not_valid_after(now + 99 * DAY)
    above = above.add_extension(x509.BasicConstraints(True, None), critical=True)
    pem = serialization.Encoding.PEM
    parts = [one.sign(authority, hashes.SHA256()).public_bytes(pem) for one in (made, above)]
    if (key := {"own": signer, "other": other}.get(how.get("key", "own"))) is not None:
        plain = serialization.NoEncryption()
        parts.append(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    path.write_bytes(b"".join(parts))
    return path


def test_a_certificate_that_can_sign_is_read(tmp_path):
    """The control of all that are refused below."""
    assert Certificate.read(write(tmp_path / "c.pem")).algorithm == "es256"
    certificates.make_test_certificate(tmp_path / "own.pem")
    assert Certificate.read(tmp_path / "own.pem").algorithm == "es256"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"begin": -9, "end": -2}, "the certificate expired on 20"),
    ({"begin": 1}, "the certificate is not valid before 20"),
    ({"key": "none"}, "no private key, or an encrypted one"),
    ({"key": "other"}, "the key is not that of the first certificate"),
    ({"usage": "key_encipherment"}, "key usage has no digitalSignature"),
    ({"purposes": []}, "no extended key usage"),
    ({"purposes": ["SERVER_AUTH"]}, "cannot sign pictures: Signature: the certificate is invalid"),
    ({"ca": True}, "an authority's"),
]


@pytest.mark.parametrize(("how", "why"), BAD)
def test_one_that_cannot_sign_is_refused_with_the_reason(tmp_path, how, why):
    path = write(tmp_path / "c.pem", **how)
    with pytest.raises(InputError, match=f"--sign '{path}'") as error:
        Certificate.read(path)
    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_serve_refuses_it_at_its_start_and_generate_before_it_draws(tmp_path):
    """In one line with exit code 2; an expired certificate had failed at the first picture."""
    path = write(tmp_path / "c.pem", begin=-9, end=-2)
    code = (
        "import sys; from darkroom.cli.application import main\n"
        f"try: main(['serve', 'tiny', '--provenance', '--sign', {str(path)!r}])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'fastapi' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert (ran.stdout.split(), ran.stderr.count("\n")) == (["2", "False", "False"], 1), ran.stderr
    assert f"--sign '{path}': the certificate expired on" in ran.stderr
    replicas = "'--engine', 'ray', '--jobs', 'postgresql+psycopg://nobody@nowhere.invalid/jobs'"
    for more, certificate, expected in (
        (replicas, path, f"--sign '{path}': the certificate expired on"),
        (f"{replicas}, '--host', '0.0.0.0'", write(tmp_path / "fits.pem"), "--host 0.0.0.0"),
    ):  # the second, of a certificate that fits, is the control: another mistake ends it
        there = code.replace("'--sign'", f"{more}, '--sign'").replace(str(path), str(certificate))
        there = there.replace("'fastapi' in", "'ray' in")
        ran = subprocess.run([sys.executable, "-c", there], capture_output=True, text=True, timeout=120)
        assert ran.stdout.split()[::2] == ["2", "False"], ran.stderr
        assert (ran.stderr.count("\n"), expected in ran.stderr) == (1, True), ran.stderr
    for name, refused in (("c.pem", True), ("good.pem", False)):
        write(tmp_path / "good.pem")
        words = ["a cat", "--size", "64", "--steps", "1", "--provenance", "--out", str(tmp_path / name[0])]
        ended = CliRunner().invoke(app, ["generate", "tiny", *words, "--sign", str(tmp_path / name)])
        assert isinstance(ended.exception, InputError) == refused, ended.output
        assert (tmp_path / name[0]).exists() != refused
