"""Signatures of model folders, adapters and recipes, by a key that needs no network (OpenSSF Model Signing).

The signature lies next to what it signs: `model.sig` in a folder, `NAME.sig` for a file. It is a Sigstore
bundle over the SHA-256 of every file, which other tools for OpenSSF's format verify too. Needs the extra
`signing`.
"""

from __future__ import annotations

import ast
import hashlib
import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from darkroom.errors import InputError, MissingExtra
from darkroom.hardware.system import remove_file

EXTRA = "signing"
IN_FOLDER = "model.sig"


@dataclass
class SignatureCheck:
    """Whether what was signed is as it was: one line each for what is wrong."""

    path: str
    signature: str
    key_sha256: str
    """Of the public key in DER: by whose signature it was checked."""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with `ok`."""
        return {"ok": self.ok, **vars(self)}

    def lines(self) -> list[str]:
        """For a reader."""
        verdict = "as it was signed" if self.ok else "not as it was signed"
        lines = [f"{self.path}: {verdict}, by the key {self.key_sha256[:16]}"]
        return [*lines, *(f"  WRONG  {problem}" for problem in self.problems)]


def signature_of(path: Path) -> Path:
    """Where the signature of a folder or a file is."""
    return path / IN_FOLDER if path.is_dir() else path.with_name(f"{path.name}.sig")


def public_path(private: Path) -> Path:
    """Where the public half of a key is written."""
    return private.with_name(f"{private.stem}.pub.pem")


def make_key(path: Path) -> None:
    """Write a private key (P-256), readable by its owner alone, and the public key next to it."""
    _need()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(private)
    public_path(path).write_bytes(public)


def sign(path: Path, key: Path) -> Path:
    """Sign a folder or a file with a private key's PEM file; gives the signature's path."""
    check_private_key(key)
    from model_signing import hashing, signing

    made = signature_of(path)
    hashed = hashing.Config().set_ignored_paths(paths=[made.absolute()], ignore_git_paths=True)
    config = signing.Config().set_hashing_config(hashed).use_elliptic_key_signer(private_key=key)
    remove_file(made)
    config.sign(path.absolute(), made)
    return made


def verify_signature(path: Path, key: Path | None) -> SignatureCheck:
    """Whether a folder or a file is as it was signed, by the owner of a public key.

    InputError where there is no signature or no key to check it with.
    """
    made = signature_of(path)
    if not made.is_file():
        raise InputError(
            f"'{path}' is not signed: there is no '{made.name}'",
            mend=f"darkroom export {path} --to ... --sign KEY.pem",
        )
    if key is None:
        raise InputError(f"'{path}': whose signature?", mend="--trust FILE, the signer's public key (PEM)")
    _need()
    from cryptography.exceptions import InvalidSignature
    from model_signing import hashing, verifying

    check = SignatureCheck(str(path), str(made), _read_key(key, private=False, option="--trust"))
    hashed = hashing.Config().set_ignored_paths(paths=[made.absolute()], ignore_git_paths=True)
    config = verifying.Config().set_hashing_config(hashed).use_elliptic_key_verifier(public_key=key)
    try:
        config.verify(path.absolute(), made)
    except InvalidSignature:
        check.problems = ["the signature is not by this key, or was changed"]
    except (LookupError, TypeError, RecursionError) as error:  # of the library's reader
        check.problems = [f"'{made.name}' is no signature that can be read: {type(error).__name__}"]
    except ValueError as error:
        check.problems = _in_lines(str(error))
    return check


def _in_lines(message: str) -> list[str]:
    """What the library says of a folder that does not match, a line each, without the bytes of the hashes."""
    _, mismatch, found = message.partition("Signature mismatch: [")
    if mismatch:
        return [one.partition(": Expected ")[0] for one in ast.literal_eval(f"[{found}")]
    return [line.strip() for line in message.splitlines() if line.strip()] or ["no match"]


def check_private_key(path: Path) -> None:
    """InputError where models cannot be signed here, or not with this file."""
    _need()
    _read_key(path, private=True, option="--sign")


def _read_key(path: Path, *, private: bool, option: str) -> str:
    """The SHA-256 of a key file's public half. InputError where it is no such key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    allowed = f"a PEM file of {'an unencrypted private' if private else 'a public'} EC key"
    try:
        content = path.read_bytes()
        key: Any = (
            serialization.load_pem_private_key(content, None).public_key()
            if private
            else serialization.load_pem_public_key(content)
        )
    except OSError as error:
        raise InputError(f"{option} '{path}' cannot be read: {error.strerror}", allowed=allowed) from error
    except (ValueError, TypeError) as error:
        raise InputError(f"{option} '{path}' is no such key", allowed=allowed) from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError(f"{option} '{path}': a key of another kind", allowed=allowed)
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def installed() -> bool:
    """Whether models can be signed and their signatures checked."""
    return find_spec("model_signing") is not None


def _need() -> None:
    if not installed():
        raise MissingExtra("model-signing", EXTRA)
