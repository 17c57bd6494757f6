"""Credentials: signed by whom, from what, saying what; and what `darkroom verify` finds in a picture."""

from __future__ import annotations

import json
import socket
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from test_watermark import jpeg, photo
from typer.testing import CliRunner

from darkroom import certificates
from darkroom.cli.application import app
from darkroom.errors import InputError
from darkroom.sample import provenance
from darkroom.sample.pictures import Picture
from darkroom.sample.provenance import Certificate, Origin, Provenance, verify_picture
from needs import missing
from test_certificates import write

PARAMETERS = {"prompt": "a cat", "negative": "", "seed": 3, "steps": 4, "solver": "ddim", "guidance": 7.5}
PARAMETERS |= {"width": 256, "height": 256, "model": "small", "model_sha256": "ab" * 32, "version": "1"}


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch) -> None:
    if not provenance.installed():
        missing("no c2pa-python here: pip install '.[provenance]'")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def certificate(tmp_path) -> Path:
    path = tmp_path / "certificate.pem"
    provenance.make_test_certificate(path, "Studio Alice")
    return path


def picture(side: int = 256) -> Picture:
    return Picture(photo(side), dict(PARAMETERS), torch.zeros(4, 8, 8))


def saved(marks: Provenance | None, folder: Path, inputs: list[bytes] | None = None) -> Path:
    return provenance.save_pictures([picture()], folder, marks, inputs or [])[0]


def test_a_picture_says_who_signed_what_and_by_which_model(certificate, tmp_path):
    file = saved(Provenance.opened(certificate, tmp_path / "own.pem"), tmp_path / "out")
    proof = verify_picture(file, trust=certificate)
    assert (proof.ok, proof.credentials, proof.signer) == (True, "trusted", "Studio Alice")
    assert proof.says["model_sha256"] == "ab" * 32
    assert proof.says["seed"] == 3
    assert "prompt" not in proof.says, "prompts are signed only where that is wanted"
    assert (
        proof.chain == ["created by small (darkroom 1), signed by Studio Alice"]
        or "created by small" in proof.chain[0]
    )
    assert proof.watermark == f"{Origin.of(PARAMETERS).payload:08x}"
    assert proof.declared
    assert proof.parameters == PARAMETERS
    assert verify_picture(file).credentials == "valid", "by a signer that this machine does not know"
    assert not (tmp_path / "own.pem").exists()


@pytest.mark.parametrize(
    ("say", "keys"), [("model", {"model", "model_sha256", "version"}), ("all", set(PARAMETERS))]
)
def test_the_operator_decides_what_credentials_say(certificate, tmp_path, say, keys):
    file = saved(Provenance.opened(certificate, tmp_path / "own.pem", say=say), tmp_path / "out")
    assert set(verify_picture(file).says) == keys


def test_a_changed_pixel_is_told(certificate, tmp_path):
    file = saved(Provenance.opened(certificate, tmp_path / "own.pem"), tmp_path / "out")
    content = bytearray(file.read_bytes())
    at = content.find(b"IDAT") + 1000
    content[at] ^= 1
    file.write_bytes(bytes(content))
    try:
        proof = verify_picture(file)
    except InputError:
        return  # the stream itself broke
    assert proof.credentials == "invalid"
    assert any("dataHash" in problem for problem in proof.problems)


def test_the_chain_goes_back_to_the_input_and_its_own_signer(certificate, tmp_path):
    provenance.make_test_certificate(tmp_path / "bob.pem", "Studio Bob")
    first = saved(Provenance.opened(tmp_path / "bob.pem", tmp_path / "own.pem"), tmp_path / "in")
    inputs = [first.read_bytes(), b"".join([plain_png(tmp_path)])]
    file = saved(Provenance.opened(certificate, tmp_path / "own.pem"), tmp_path / "out", inputs)
    proof = verify_picture(file)
    assert proof.ok
    assert [step.rpartition("signed by ")[2] for step in proof.chain if "signed by" in step] == [
        "Studio Alice",
        "Studio Bob (valid)",
    ]
    assert "from input 1 without credentials" in proof.chain
    assert "edited" in proof.chain[0]


def with_other_pixels(file: Path) -> bytes:
    """The credentials of a file on another picture's pixels: what a forger has."""
    parts = png_parts(file.read_bytes())
    pixels = [part for part in png_parts(plain_png(file.parent)) if part[0] == b"IDAT"]
    first = next(i for i, (kind, _) in enumerate(parts) if kind == b"IDAT")
    rest = [part for part in parts if part[0] != b"IDAT"]
    return png_of([*rest[:first], *pixels, *rest[first:]])


def png_parts(content: bytes) -> list[tuple[bytes, bytes]]:
    parts, at = [], 8
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "big")
        parts.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + size]))
        at += 12 + size
    return parts


def png_of(parts: list[tuple[bytes, bytes]]) -> bytes:
    whole = [
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(whole)


def test_an_input_whose_credentials_do_not_fit_is_not_made_genuine_by_using_it(certificate, tmp_path):
    """A forger puts Bob's credentials on a picture of his own, and has it drawn over: the chain had said
    'created ..., signed by Studio Bob' and nothing else."""
    provenance.make_test_certificate(tmp_path / "bob.pem", "Studio Bob")
    first = saved(Provenance.opened(tmp_path / "bob.pem", tmp_path / "own.pem"), tmp_path / "in")
    marks = Provenance.opened(certificate, tmp_path / "own.pem")
    genuine = verify_picture(saved(marks, tmp_path / "out", [first.read_bytes()]), trust=certificate)
    assert genuine.ok
    assert genuine.chain[-1].endswith("signed by Studio Bob (valid)")
    file = saved(marks, tmp_path / "forged", [with_other_pixels(first)])
    proof = verify_picture(file, trust=certificate)
    assert proof.credentials == "trusted", "Alice's own signature fits"
    assert proof.chain[-1].endswith("signed by Studio Bob (invalid: assertion.dataHash.mismatch)")
    assert proof.problems == ["credentials of input 0: assertion.dataHash.mismatch"]
    jpg = marks.converted(
        provenance.save_with_metadata(photo(256), "JPEG", 90), "JPEG", with_other_pixels(first)
    )
    (tmp_path / "a.jpg").write_bytes(jpg)
    assert verify_picture(tmp_path / "a.jpg").says == {}, "nor are the forged settings called signed"


def test_of_an_input_s_signer_it_is_said_whether_it_is_trusted_here(certificate, tmp_path):
    """Anybody can call himself The Times in a certificate of his own making."""
    provenance.make_test_certificate(tmp_path / "times.pem", "The Times")
    first = saved(Provenance.opened(tmp_path / "times.pem", tmp_path / "own.pem"), tmp_path / "in")
    file = saved(Provenance.opened(certificate, tmp_path / "own.pem"), tmp_path / "out", [first.read_bytes()])
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + (tmp_path / "times.pem").read_bytes())
    assert verify_picture(file, trust=certificate).chain[-1].endswith("signed by The Times (valid)")
    assert verify_picture(file, trust=both).chain[-1].endswith("signed by The Times (trusted)")


def test_the_chain_names_every_input_that_has_credentials(certificate, tmp_path):
    """Only the first one's had been shown."""
    marks = Provenance.opened(certificate, tmp_path / "own.pem")
    given = []
    for name in ("Studio Bob", "Studio Carol"):
        provenance.make_test_certificate(tmp_path / f"{name}.pem", name)
        own = Provenance.opened(tmp_path / f"{name}.pem", tmp_path / "own.pem")
        given.append(saved(own, tmp_path / name).read_bytes())
    [file] = provenance.save_pictures([picture()], tmp_path / "out", marks, given[:1], given[1:])
    chain = verify_picture(file).chain
    assert chain[1].startswith("created")
    assert "Studio Bob" in chain[1]
    assert chain[2].startswith("control 0: created")
    assert "Studio Carol" in chain[2]


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_picture_with_broken_credentials_can_be_drawn_over(certificate, tmp_path, part):
    """Signing had ended in an error: a server's answer was 500, and the drawn picture was lost."""
    marks = Provenance.opened(certificate, tmp_path / "own.pem")
    first = saved(marks, tmp_path / "in").read_bytes()
    broken = png_of(
        [
            (kind, data[: int(len(data) * part)] if kind == b"caBX" else data)
            for kind, data in png_parts(first)
        ]
    )
    (tmp_path / "broken.png").write_bytes(broken)
    assert verify_picture(tmp_path / "broken.png").credentials == "invalid"
    proof = verify_picture(saved(marks, tmp_path / "out", [broken]))
    assert (proof.ok, proof.credentials) == (True, "valid")
    assert proof.chain[1:] == ["from input 0 without credentials"]


ELSEWHERE = (
    '<?xpacket begin="" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about="" '
    'xmlns:dcterms="http://purl.org/dc/terms/" dcterms:provenance="http://127.0.0.1:PORT/m.c2pa"/>'
    '</rdf:RDF></x:xmpmeta><?xpacket end="w"?>'
)


def test_addresses_that_a_picture_names_for_its_credentials_are_not_asked(certificate, tmp_path):
    """c2pa does, unless it is told: who uploads a picture had made the server send requests, and wait."""
    asked: list[str] = []

    def answer(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            if not connection.recv(4096):
                return
            asked.append("asked")
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        xmp = ELSEWHERE.replace("PORT", str(listener.getsockname()[1]))
        photo(256).save(tmp_path / "a.jpg", xmp=xmp.encode())
        proof = verify_picture(tmp_path / "a.jpg")
        marks = Provenance.opened(certificate, tmp_path / "own.pem")
        made = verify_picture(saved(marks, tmp_path / "out", [(tmp_path / "a.jpg").read_bytes()]))
        socket.create_connection(listener.getsockname()).close()
    assert asked == []
    assert (proof.ok, proof.credentials) == (True, "elsewhere")
    assert made.chain[1:] == ["from input 0 without credentials"]


def test_pictures_that_steered_it_are_ingredients_and_no_origin(certificate, tmp_path):
    """Made by a model still; with a picture to start from, that one is what was edited."""
    provenance.make_test_certificate(tmp_path / "bob.pem", "Studio Bob")
    control = saved(Provenance.opened(tmp_path / "bob.pem", tmp_path / "own.pem"), tmp_path / "in")
    marks = Provenance.opened(certificate, tmp_path / "own.pem")
    controls = [control.read_bytes(), plain_png(tmp_path)]
    for inputs, begun in (([], "created"), ([plain_png(tmp_path)], "opened")):
        [file] = provenance.save_pictures([picture()], tmp_path / begun, marks, inputs, controls)
        proof = verify_picture(file, trust=certificate)
        assert proof.ok, proof.problems
        assert proof.credentials == "trusted"
        assert begun in proof.chain[0]
        assert "from control 1 without credentials" in proof.chain
        assert "Studio Bob" in proof.chain[-1], "the control's own maker is told"
        assert ("from input 0 without credentials" in proof.chain) == bool(inputs)
    plain = verify_picture(saved(marks, tmp_path / "plain"), trust=certificate)
    assert not any("control" in step for step in plain.chain)


@pytest.mark.parametrize(("kind", "axes"), [("png", None), ("jpeg", None), ("png", ["seed=3,4"])])
def test_a_grid_is_signed_with_its_pictures_as_ingredients(certificate, tmp_path, kind, axes):
    """Labelled sheets had no credentials, and a grid named no model and no picture."""
    pictures = [Picture(photo(256, i), {**PARAMETERS, "seed": 3 + i}, torch.zeros(4, 8, 8)) for i in (0, 1)]
    marks = Provenance.opened(certificate, tmp_path / "own.pem")
    made = provenance.save_pictures(pictures, tmp_path / "out", marks, kind=kind, axes=axes)
    *cells, grid = made
    assert grid.stem == "grid-00000"
    proof = verify_picture(grid, trust=certificate)
    assert (proof.ok, proof.credentials, proof.signer) == (True, "trusted", "Studio Alice"), proof.problems
    assert proof.declared
    assert proof.says["model_sha256"] == "ab" * 32
    assert "seed" not in proof.says, "it is not the same in all pictures"
    assert "created by small" in proof.chain[0]
    assert "placed" in proof.chain[0]
    assert [step.partition(":")[0] for step in proof.chain[1:]] == ["picture 0", "picture 1"]
    assert all("signed by Studio Alice (trusted)" in step for step in proof.chain[1:])
    marked = {verify_picture(cell).watermark for cell in cells}
    assert proof.watermark in {*marked, "there"}, "its pictures are marked"
    changed = bytearray(grid.read_bytes())
    changed[-200 if kind == "jpeg" else changed.rfind(b"IDAT") + 50] ^= 1
    grid.write_bytes(bytes(changed))
    with suppress(InputError):  # the stream itself broke
        assert verify_picture(grid, trust=certificate).credentials == "invalid", "the control"
    for plain in provenance.save_pictures(pictures, tmp_path / "plain", None, kind=kind, axes=axes):
        assert verify_picture(plain).credentials == "none", "the control: unsigned"


def test_generate_signs_its_sheets_unless_it_signs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("DARKROOM_PROVENANCE", "1")
    command = ["generate", "tiny", "a cat", "--size", "256", "--grid", "steps=1,2", "--json", "--out"]
    for more, credentials in (([], "trusted"), (["--no-provenance"], "none")):
        done = CliRunner().invoke(app, [*command, str(tmp_path / credentials), *more])
        assert done.exit_code == 0, done.output
        proof = verify_picture(Path(json.loads(done.stdout)["pictures"][-1]))
        assert Path(proof.file).name == "grid-00000.png"
        assert (proof.ok, proof.credentials) == (True, credentials)


def test_a_grid_s_credentials_say_no_more_than_its_pictures(certificate, tmp_path):
    pictures = [Picture(photo(256, i), dict(PARAMETERS), torch.zeros(4, 8, 8)) for i in (0, 1)]
    for say, keys in (("model", {"model", "model_sha256", "version"}), ("all", set(PARAMETERS))):
        marks = Provenance.opened(certificate, tmp_path / "own.pem", say=say)
        *_, grid = provenance.save_pictures(pictures, tmp_path / say, marks)
        assert set(verify_picture(grid).says) == keys


def test_a_picture_in_another_format_is_named_as_png(certificate, tmp_path):
    photo(64).save(tmp_path / "a.bmp")
    given = provenance.as_ingredient(tmp_path / "a.bmp")
    assert given.startswith(b"\x89PNG")
    marks = Provenance.opened(certificate, tmp_path / "own.pem")
    [file] = provenance.save_pictures([picture()], tmp_path / "out", marks, [], [given])
    assert "from control 0 without credentials" in verify_picture(file).chain


def plain_png(folder: Path) -> bytes:
    photo(256, 1).save(folder / "plain.png")
    return (folder / "plain.png").read_bytes()


def test_a_jpeg_of_a_signed_picture_is_signed_and_names_it(certificate, tmp_path):
    marks = Provenance.opened(certificate, tmp_path / "own.pem")
    png = marks.png(picture(), Origin(7))
    content = marks.converted(provenance.save_with_metadata(photo(256), "JPEG", 90), "JPEG", png)
    (tmp_path / "a.jpg").write_bytes(content)
    proof = verify_picture(tmp_path / "a.jpg")
    assert proof.credentials == "valid"
    assert "transcoded" in proof.chain[0]
    assert "created" in proof.chain[1]
    assert proof.says["seed"] == 3
    assert proof.declared


def test_a_stranger_s_picture_says_nothing_and_is_not_wrong(tmp_path):
    plain_png(tmp_path)
    proof = verify_picture(tmp_path / "plain.png")
    assert (proof.ok, proof.credentials, proof.watermark, proof.declared) == (True, "none", None, False)


def test_what_a_file_says_of_itself_forges_no_line_and_steers_no_terminal(tmp_path):
    """Its parameters are anybody's: they had been printed as they are."""
    forged = {"prompt": "a\n  credentials  trusted, signed by The Times", "negative": "\x1b[2J\u202e"}
    made = Picture(photo(256), PARAMETERS | forged, torch.zeros(4, 8, 8))
    proof = verify_picture(provenance.save_pictures([made], tmp_path / "out", None)[0])
    lines = proof.lines()
    assert proof.parameters["prompt"] == forged["prompt"]
    assert [line for line in lines if line.startswith("  credentials")] == ["  credentials  none"]
    assert r"  parameters   prompt: a\n  credentials  trusted, signed by The Times" in lines
    assert r"  parameters   negative: \x1b[2J\u202e" in lines
    assert all(line.isprintable() for line in lines)


def test_of_pictures_too_small_for_a_mark_log_and_verify_say_so(certificate, tmp_path, caplog):
    marks = Provenance.opened(certificate, tmp_path / "own.pem")
    with caplog.at_level("INFO", "darkroom.sample"):
        for _ in range(2):
            marks.marked(photo(64), Origin(7)).save(tmp_path / "a.png")
    [record] = caplog.records
    assert record.getMessage() == "no watermark in pictures of 64x64: it needs 256 pixels a side"
    said = "\n".join(verify_picture(tmp_path / "a.png").lines())
    assert "watermark    the picture is too small to carry one" in said
    photo(256).save(tmp_path / "b.png")
    assert "watermark    none found" in "\n".join(verify_picture(tmp_path / "b.png").lines())


def test_a_stripped_and_recoded_picture_still_has_its_mark(certificate, tmp_path):
    marks = Provenance.opened(certificate, tmp_path / "own.pem")
    jpeg(marks.marked(photo(512), Origin(0xABCDEF01)), 60).save(tmp_path / "a.jpg", quality=60)
    proof = verify_picture(tmp_path / "a.jpg")
    assert (proof.credentials, proof.watermark) == ("none", "abcdef01")


@pytest.mark.parametrize("purpose", provenance.MAY_SIGN)
def test_a_certificate_for_documents_or_for_c2pa_may_sign(purpose, tmp_path):
    """One for documents, which C2PA allows, could sign; its pictures were then called invalid."""
    certificate = write(tmp_path / "c.pem", purposes=[purpose])
    file = saved(Provenance.opened(certificate, tmp_path / "own.pem"), tmp_path / "out")
    proof = verify_picture(file, trust=certificate)
    assert (proof.ok, proof.credentials, proof.problems) == (True, "trusted", [])
    stranger = verify_picture(file)
    assert (stranger.ok, stranger.credentials) == (True, "valid")


def test_a_certificate_for_something_else_may_not(tmp_path, monkeypatch):
    """The control: a signer who is let sign for a purpose of his own; one of a server is not even let."""
    own = "1.3.6.1.4.1.99999.1"
    certificate = write(tmp_path / "c.pem", purposes=[own])
    signing = {**certificates.SIGNING, "trust": {"trust_config": own}}
    for module in (certificates, provenance):
        monkeypatch.setattr(module, "SIGNING", signing)
    file = saved(Provenance.opened(certificate, tmp_path / "own.pem"), tmp_path / "out")
    proof = verify_picture(file, trust=certificate)
    assert (proof.ok, proof.credentials) == (False, "invalid")
    assert proof.problems == ["credentials: signingCredential.invalid"]
    with pytest.raises(InputError, match="cannot sign pictures"):
        Certificate.read(write(tmp_path / "server.pem", purposes=["SERVER_AUTH"]))


def test_this_machine_makes_itself_a_certificate_and_trusts_it(tmp_path):
    own = provenance.local_certificate()
    file = saved(Provenance.opened(None, own), tmp_path / "out")
    assert own.is_file()
    assert own.stat().st_mode & 0o077 == 0
    assert verify_picture(file).credentials == "trusted"
    once = own.read_bytes()
    Provenance.opened(None, own)
    assert own.read_bytes() == once, "it is made once"


def test_files_that_cannot_sign_are_refused(tmp_path, certificate):
    provenance.make_test_certificate(tmp_path / "bob.pem", "Studio Bob")
    text, other = certificate.read_text(), (tmp_path / "bob.pem").read_text()
    split = "-----BEGIN PRIVATE KEY-----"
    cases = {
        "nothing": "",
        "no key": text.partition(split)[0],
        "another's key": text.partition(split)[0] + split + other.partition(split)[2],
    }
    for name, content in cases.items():
        (tmp_path / "bad.pem").write_text(content)
        with pytest.raises(InputError, match="--sign"):
            Certificate.read(tmp_path / "bad.pem")
        assert name


def test_generate_signs_marks_and_verify_tells_by_the_command_line(tmp_path, certificate):
    run, out = CliRunner(), tmp_path / "out"
    told = ["generate", "tiny", "a cat", "--steps", "1", "--size", "256", "--solver", "euler"]
    made = run.invoke(
        app, [*told, "--out", str(out), "--sign", str(certificate)], env={"DARKROOM_PROVENANCE": "1"}
    )
    assert made.exit_code == 0, made.output
    [file] = out.glob("0*.png")
    seen = run.invoke(app, ["verify", str(file), "--json", "--trust", str(certificate)])
    found = json.loads(seen.stdout)
    assert (found["credentials"], found["signer"]) == ("trusted", "Studio Alice")
    assert found["parameters"]["prompt"] == "a cat"
    plain = tmp_path / "plain"
    assert run.invoke(app, [*told, "--out", str(plain), "--no-provenance"]).exit_code == 0
    [file] = plain.glob("0*.png")
    assert json.loads(run.invoke(app, ["verify", str(file), "--json"]).stdout)["credentials"] == "none"
    refused = run.invoke(app, [*told, "--no-provenance", "--sign", str(certificate)])
    assert isinstance(refused.exception, InputError)


def test_a_picture_too_small_for_a_mark_is_told_by_the_command_line(tmp_path):
    told = ["generate", "tiny", "a cat", "--steps", "1", "--solver", "euler"]
    note = "note: no watermark in pictures of 32x32: it needs 256 pixels a side"
    small, large = (
        CliRunner().invoke(
            app, [*told, "--size", size, "--out", str(tmp_path / size)], env={"DARKROOM_PROVENANCE": "1"}
        )
        for size in ("32", "256")
    )
    assert (small.exit_code, note in small.stderr.splitlines()) == (0, True)
    assert (large.exit_code, note in large.stderr.splitlines()) == (0, False)


def test_a_test_certificate_is_made_once_by_the_command_line(tmp_path):
    run, path = CliRunner(), tmp_path / "c.pem"
    assert run.invoke(app, ["keys", "make-test-certificate", "--out", str(path)]).exit_code == 0
    assert Certificate.read(path).algorithm == "es256"
    again = run.invoke(app, ["keys", "make-test-certificate", "--out", str(path)])
    assert isinstance(again.exception, InputError)


def test_pictures_of_other_formats_are_refused(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.bmp")
    with pytest.raises(InputError, match="PNG, JPEG or WebP"):
        verify_picture(tmp_path / "a.bmp")


def test_without_a_signer_it_is_said_what_brings_one_on_this_system(certificate, monkeypatch):
    """On Windows no extra does: there is no wheel."""
    monkeypatch.setattr(certificates, "installed", lambda: False)
    for system, mend in (("linux", r"pip install '\.\[provenance\]'"), ("win32", "WSL 2")):
        monkeypatch.setattr(certificates, "sys", SimpleNamespace(platform=system))
        with pytest.raises(InputError, match=f"c2pa-python is not installed.*{mend}"):
            Certificate.read(certificate)
