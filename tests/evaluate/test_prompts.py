"""Prompts are read from every kind of file, and the paper's are the paper's."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from darkroom.errors import InputError
from darkroom.evaluate import Prompts, read_prompts


@pytest.mark.parametrize(("kind", "heading"), [("object", "Object"), ("live", "Live Subject")])
def test_the_dreambooth_prompts_are_the_published_ones(shared_data, kind, heading):
    text = (shared_data / "dreambooth" / "prompts_and_classes.txt").read_text()
    part = re.search(rf"^{heading} Prompts\n(.*?)^\]", text, re.M | re.S)[1]
    published = re.findall(r"^'(.*)'\.format", part, re.M)
    found = read_prompts(f"dreambooth:{kind}", class_word="dog", token="qxz")
    assert list(found.texts) == [prompt.format("qxz", "dog") for prompt in published]
    assert list(found.plain) == [" ".join(prompt.format("", "dog").split()) for prompt in published]
    assert len(found) == 25
    assert read_prompts(f"dreambooth:{kind}", class_word="dog").texts[0] == "a sks dog in the jungle"


def test_every_kind_of_file_gives_the_same_prompts(tmp_path):
    wanted = ("a red circle", "a blue, square")
    files = {
        "a.txt": "a red circle\n\n  a blue,  square \n",
        "b.jsonl": '{"prompt": "a red circle", "x": 1}\n"a blue, square"\n',
        "c.csv": 'caption,x\na red circle,1\n"a blue, square",2\n',
        "d.tsv": "id\tcaption\n1\ta red circle\n2\ta blue, square\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert read_prompts(tmp_path / name).texts == wanted, name
    pq.write_table(pa.table({"text": list(wanted), "n": [1, 2]}), tmp_path / "e.parquet")
    assert read_prompts(tmp_path / "e.parquet").texts == wanted
    assert read_prompts(tmp_path / "e.parquet", most=1).texts == wanted[:1]
    assert read_prompts(tmp_path / "c.csv", column="x").texts == ("1", "2")


def test_coco_captions_are_read(shared_data):
    found = read_prompts(shared_data / "coco2014_prompts" / "captions_source.tsv", most=2)
    assert found.texts[0] == "A city at night with people walking around."


def test_the_token_is_left_out_as_a_word_alone():
    found = Prompts.of("x", ["a sks dog", "asks sks, sks-dog"], "sks")
    assert found.plain == ("a dog", "asks , -dog")
    assert Prompts.of("x", ["a sks dog"]).plain == ("a sks dog",)


def test_what_is_no_prompts_is_refused(tmp_path):
    with pytest.raises(InputError, match="--class-word"):
        read_prompts("dreambooth:live")
    with pytest.raises(InputError, match="dreambooth:live or dreambooth:object"):
        read_prompts("dreambooth:cats", class_word="cat")
    with pytest.raises(InputError, match="no prompts at"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(InputError, match="at least one"):
        read_prompts(tmp_path / "empty.txt")
    (tmp_path / "odd.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no prompt column"):
        read_prompts(tmp_path / "odd.csv")
    with pytest.raises(InputError, match="no prompt column 'c'"):
        read_prompts(tmp_path / "odd.csv", column="c")
    (tmp_path / "torn.jsonl").write_text('{"prompt": ')
    with pytest.raises(InputError, match=r"torn.jsonl:1 is no JSON"):
        read_prompts(tmp_path / "torn.jsonl")
    (tmp_path / "no.parquet").write_text("hello")
    with pytest.raises(InputError, match="no Parquet"):
        read_prompts(tmp_path / "no.parquet")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(InputError, match="allowed: .txt"):
        read_prompts(tmp_path / "picture.png")
