"""Prompts are read from every kind of file, and the paper's are the paper's."""

from __future__ import annotations

import json
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from darkroom.errors import InputError
from darkroom.evaluate.pictures import FolderPictures, Prompts, prompts_of_pictures, read_prompts


@pytest.mark.parametrize(
    ("kind", "last"), [("object", "a cube shaped qxz dog"), ("live", "a cube shaped qxz dog")]
)
def test_the_dreambooth_prompts_are_read_from_the_papers_own_list(shared_data, kind, last):
    where = f"dreambooth:{kind}={shared_data / 'dreambooth' / 'prompts_and_classes.txt'}"
    found = read_prompts(where, class_word="dog", token="qxz")
    assert len(set(found.texts)) == 25
    assert found.texts[0] == "a qxz dog in the jungle"
    assert found.plain[0] == "a dog in the jungle"
    assert found.texts[-1] == last
    assert any("wearing a red hat" in text for text in found.texts) == (kind == "live")
    assert read_prompts(where, class_word="dog").texts[0] == "a sks dog in the jungle"


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
    (tmp_path / "index.csv").write_text(",prompt\n0,a red circle\n1,a blue square\n")  # as pandas writes
    assert read_prompts(tmp_path / "index.csv").texts == ("a red circle", "a blue square")


def test_coco_captions_are_read(shared_data):
    found = read_prompts(shared_data / "coco2014_prompts" / "captions_source.tsv", most=2)
    assert found.texts[0] == "A city at night with people walking around."


def test_the_token_is_left_out_as_a_word_alone():
    found = Prompts.of("x", ["a sks dog", "asks sks, sks-dog"], "sks")
    assert found.plain == ("a dog", "asks , -dog")
    assert Prompts.of("x", ["a sks dog"]).plain == ("a sks dog",)


def test_what_is_no_prompts_is_refused(tmp_path):
    (tmp_path / "list.txt").write_text(
        "Object Prompts\n\n[\n'a {0} {1}'.format(unique_token, class_token)\n]\n"
    )
    listed = f"dreambooth:object={tmp_path / 'list.txt'}"
    with pytest.raises(InputError, match="--class-word"):
        read_prompts(listed)
    with pytest.raises(InputError, match="dreambooth:live=FILE or dreambooth:object=FILE"):
        read_prompts("dreambooth:cats", class_word="cat")
    with pytest.raises(
        InputError, match=r"no prompts at 'none.txt'; FILE is dataset/prompts_and_classes.txt"
    ):
        read_prompts("dreambooth:live=none.txt", class_word="cat")
    with pytest.raises(InputError, match="has no 'Live Subject Prompts'"):
        read_prompts(listed.replace("object", "live"), class_word="cat")
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


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"metadata.jsonl": b'{"file_name": "a.png", "label": 3}'},
            "no caption column found in metadata.jsonl",
        ),
        ({"metadata.csv": b"file_name;text\na.png;a dog\n"}, "no image column found in metadata.csv"),
        ({"a.txt": b"a\0b"}, "a.png: a.txt: no whole UTF-16-LE"),
        ({}, "1 of 1 pictures do not say their prompt, such as 'a.png'"),
    ],
)
def test_captions_beside_pictures_are_refused_in_terms_of_this_verb(tmp_path, files, said):
    """`evaluate` has no --caption-column; a text that cannot be read is there, but was called missing."""
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        prompts_of_pictures(FolderPictures.of(tmp_path))
    assert said in str(caught.value)
    assert "--" not in str(caught.value)


def test_prompts_end_at_the_ends_of_lines_alone(tmp_path):
    """str.splitlines() ends them at U+2028, a form feed and others too."""
    text = "one\u2028still one\ntwo\x0cstill two\r\nthree\n"
    (tmp_path / "a.txt").write_text(text, newline="")
    lines = [json.dumps({"prompt": one}, ensure_ascii=False) for one in ("one\u2028still one", "two")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read_prompts(tmp_path / "a.txt").texts == ("one still one", "two still two", "three")
    assert read_prompts(tmp_path / "a.jsonl").texts == ("one still one", "two")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"prompt": "a"}\n{"prompt": ["a", "b"]}',
            r"row 2: \['a', 'b'\]; allowed: a prompt as text",
        ),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1 is no JSON: maximum recursion"),
        ("a.csv", "prompt,n\none,1,2\n", "a.csv:2 has another number of cells"),
        ("a.csv", "prompt,n\none\n", "a.csv:2 has another number of cells"),
        ("a.csv", "prompt\n" + "x" * 200_000, "a.csv:2 is no CSV: field larger"),
        ("a.csv", 'prompt,n\n"one,1\ntwo,2\n', "is no CSV: unexpected end of data"),
        ("a.csv", 'prompt,n\n"a "red" hat",1\n', "a.csv:2 is no CSV: ',' expected after '\"'"),
    ],
    ids=["list", "deep", "more", "fewer", "large", "open quote", "quote inside"],
)
def test_what_is_no_table_of_prompts_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read_prompts(tmp_path / name)


def test_an_empty_cell_is_no_prompt_and_text_in_parquet_must_be_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": NaN}\n{"prompt": "one"}\n')
    assert read_prompts(tmp_path / "a.jsonl").texts == ("one",)
    offsets = pa.py_buffer(struct.pack("<2i", 0, 4))
    latin = pa.StringArray.from_buffers(1, offsets, pa.py_buffer(b"caf\xe9"))
    pq.write_table(pa.table({"prompt": latin}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="holds text that is no UTF-8"):
        read_prompts(tmp_path / "a.parquet")
