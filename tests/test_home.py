"""The tests' own home: nobody's settings and caches are touched, and a test that does is found."""

from __future__ import annotations

import os
from pathlib import Path

import home


def test_the_tests_have_a_home_of_their_own():
    assert str(Path.home()) == os.environ[home.VARIABLE]
    assert Path.home() != home._real or home._real == Path(os.environ[home.VARIABLE])  # in a worker of xdist


def test_what_a_test_leaves_in_the_users_home_is_named(tmp_path, monkeypatch):
    (tmp_path / ".cache" / "darkroom").mkdir(parents=True)
    (tmp_path / ".netrc").write_text("machine a")
    monkeypatch.setattr(home, "_real", tmp_path)
    monkeypatch.setattr(home, "_before", home._listed())
    assert home.written() == []
    (tmp_path / ".config").mkdir()  # by another program of the user's
    assert home.written() == []
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    (tmp_path / ".netrc").write_text("machine b")
    found = home.written()
    assert "~/.ray/auth_token" in found
    assert any(name.startswith("~/.netrc") for name in found)
    assert len(found) == 3  # the folder, the token, the changed file
