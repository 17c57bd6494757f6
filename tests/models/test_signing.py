"""A signed folder or file is as it was, or what is not is named."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from darkroom.cli.application import app
from darkroom.errors import InputError, RecipeError
from darkroom.models import signing
from needs import missing


@pytest.fixture
def keys(tmp_path) -> tuple[Path, Path]:
    """A private key's file and its public half's."""
    if not signing.installed():
        missing("no model-signing here: pip install '.[signing]'")
    path = tmp_path / "signer.pem"
    signing.make_key(path)
    return path, signing.public_path(path)


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    (folder / "unet" / "weights.safetensors").write_bytes(bytes(range(256)) * 40)
    return folder


def test_a_folder_is_as_it_was_signed_until_a_file_changes_comes_or_goes(keys, model):
    private, public = keys
    assert private.stat().st_mode & 0o077 == 0
    signing.sign(model, private)
    assert signing.verify_signature(model, public).ok
    weights = model / "unet" / "weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"x")
    changed = signing.verify_signature(model, public)
    assert not changed.ok
    assert "weights.safetensors" in " ".join(changed.problems)
    weights.write_bytes(whole)
    assert signing.verify_signature(model, public).ok
    (model / "more.bin").write_bytes(b"x")
    assert "more.bin" in " ".join(signing.verify_signature(model, public).problems)
    (model / "more.bin").unlink()
    weights.unlink()
    assert "weights.safetensors" in " ".join(signing.verify_signature(model, public).problems)


def test_a_folder_is_named_from_where_one_stands(keys, model, monkeypatch):
    monkeypatch.chdir(model.parent)
    signing.sign(Path(model.name), keys[0])
    assert signing.verify_signature(Path(model.name), keys[1]).ok
    (model / "more.bin").write_bytes(b"x")
    assert "more.bin" in " ".join(signing.verify_signature(Path(model.name), keys[1]).problems)


def test_another_s_key_does_not_verify(keys, model, tmp_path):
    signing.make_key(tmp_path / "other.pem")
    signing.sign(model, keys[0])
    assert not signing.verify_signature(model, tmp_path / "other.pub.pem").ok


def _changed(bundle: dict) -> None:
    content = base64.b64decode(bundle["dsseEnvelope"]["payload"]).replace(b"sha256", b"sha512")
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(content).decode()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_changed, "not by this key, or was changed"),
        (lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(sig="AAAA"), "not by this key"),
        (lambda bundle: bundle["dsseEnvelope"].update(signatures=[]), "no signature that can be read"),
        (lambda bundle: bundle.clear(), "no signature that can be read"),
        ("[" * 100_000, "no signature that can be read"),
        ("[]", "no signature that can be read"),
    ],
)
def test_a_changed_signature_is_a_finding_and_no_traceback(keys, model, change, why):
    private, public = keys
    file = signing.sign(model, private)
    bundle = json.loads(file.read_text())
    if callable(change):
        change(bundle)
    file.write_text(change if isinstance(change, str) else json.dumps(bundle))
    [problem] = signing.verify_signature(model, public).problems
    assert why in problem


def test_an_adapter_s_file_is_signed_beside_it_and_verify_tells(keys, tmp_path):
    private, public = keys
    file = tmp_path / "style.safetensors"
    file.write_bytes(b"weights")
    assert signing.sign(file, private) == tmp_path / "style.safetensors.sig"
    run = CliRunner()
    told = ["verify", str(file), "--trust", str(public), "--json"]
    ran = run.invoke(app, told)
    assert (ran.exit_code, json.loads(ran.stdout)["ok"]) == (0, True)
    file.write_bytes(b"weighty")
    ran = run.invoke(app, told)
    assert (ran.exit_code, json.loads(ran.stdout)["ok"]) == (1, False)


def test_what_is_not_signed_or_no_key_is_refused(keys, model):
    private, public = keys
    with pytest.raises(InputError, match="not signed"):
        signing.verify_signature(model, public)
    signing.sign(model, private)
    with pytest.raises(InputError, match="--trust"):
        signing.verify_signature(model, None)
    with pytest.raises(InputError, match="--trust"):
        signing.verify_signature(model, private)
    with pytest.raises(InputError, match="--sign"):
        signing.sign(model, public)


def test_export_signs_what_it_writes(keys, tmp_path):
    private, public = keys
    run, folder = CliRunner(), tmp_path / "exported"
    ran = run.invoke(app, ["export", "tiny", "--to", str(folder), "--sign", str(private)])
    assert ran.exit_code == 0, ran.output
    assert signing.verify_signature(folder, public).ok
    assert run.invoke(app, ["verify", str(folder), "--trust", str(public)]).exit_code == 0


def test_a_recipe_is_signed_and_verified(keys, tmp_path):
    """Nothing had signed one, though `verify` asked for it."""
    private, public = keys
    run, copy = CliRunner(), tmp_path / "récipe.yaml"
    ran = run.invoke(app, ["export", "recipes:laptop", "--to", str(copy), "--sign", str(private), "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout) == {"recipe": str(copy), "signature": f"{copy}.sig"}
    told = ["verify", str(copy), "--trust", str(public)]
    assert run.invoke(app, told).exit_code == 0
    copy.write_bytes(copy.read_bytes() + b"# more")
    ran = run.invoke(app, told)
    assert ran.exit_code == 1
    assert "Hash mismatch" in ran.stdout
    for more in (["--to", str(copy)], ["--to", str(tmp_path / "a.txt")], ["--to", "a.yaml", "--kohya"]):
        assert isinstance(run.invoke(app, ["export", "recipes:laptop", *more]).exception, InputError)
    (tmp_path / "bad.yaml").write_text("colour: red")
    ran = run.invoke(app, ["export", str(tmp_path / "bad.yaml"), "--to", str(tmp_path / "b.yaml")])
    assert isinstance(ran.exception, RecipeError)
    assert not (tmp_path / "b.yaml").exists()


def test_a_key_that_cannot_sign_is_told_before_anything_is_written(keys, tmp_path):
    folder = tmp_path / "exported"
    ran = CliRunner().invoke(app, ["export", "tiny", "--to", str(folder), "--sign", str(keys[1])])
    assert isinstance(ran.exception, InputError)
    assert not folder.exists()


def test_what_does_not_match_is_a_line_a_file(keys, model):
    """Hashes had stood there as Python writes bytes, all in one line."""
    signing.sign(model, keys[0])
    (model / "unet" / "weights.safetensors").write_bytes(b"x")
    (model / "model_index.json").unlink()
    (model / "möre.bin").write_bytes(b"x")
    assert signing.verify_signature(model, keys[1]).problems == [
        "Extra files found in model 'model': möre.bin",
        "Missing files in model 'model': model_index.json",
        "Hash mismatch for 'unet/weights.safetensors'",
    ]
