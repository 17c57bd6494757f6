"""What a model may be called, known without torch."""

from __future__ import annotations

import pytest

from darkroom.errors import ModelError
from darkroom.models.families import FAMILIES
from darkroom.models.reference import FAMILY_NAMES, PUBLISHED, check_reference, is_hub_id


def test_the_names_are_those_of_the_families():
    assert tuple(FAMILIES) == FAMILY_NAMES
    assert set(PUBLISHED.values()) <= set(FAMILY_NAMES)


def test_what_is_no_models_name_is_refused_with_what_would_be(tmp_path):
    (tmp_path / "there.safetensors").write_bytes(b"")
    for fine in ("sd15", str(tmp_path), "owner/name", str(tmp_path / "there.safetensors")):
        check_reference(fine)
    for wrong, word in (
        ("nowhere", "or one of sd15"),
        ("nowhere/", "no model at"),
        ("./nowhere", "no model at"),
        ("a/b/c", "no model at"),
        (str(tmp_path / "none.safetensors"), "no file"),
        ("old.ckpt", "pickle"),
    ):
        with pytest.raises(ModelError, match=word):
            check_reference(wrong)
    assert not is_hub_id("/")
    assert not is_hub_id("")
