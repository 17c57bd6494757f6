"""Small pieces of HTML. Every text that comes from a file is escaped here."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape as escape
from pathlib import Path
from typing import Any

from darkroom.data.images import PictureError, open_picture
from darkroom.errors import InputError

_MOST_BYTES = 400_000  # a picture larger than this is embedded as WebP


def section(title: str, *parts: str) -> str:
    """A titled section; nothing where it has no content."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def cards(values: Iterable[tuple[str, str, str]], first: Iterable[tuple[str, str, str]] = ()) -> str:
    """The figures that matter: label, value, and a word beneath; those of `first` are set off."""
    inside = "".join(_card("card mark", *value) for value in first)
    inside += "".join(_card("card", *value) for value in values)
    return f'<div class="cards">{inside}</div>' if inside else ""


def _card(kind: str, label: str, value: str, foot: str) -> str:
    words = f'<div class="foot">{escape(foot)}</div>' if foot else ""
    inside = f'<div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>{words}'
    return f'<div class="{kind}">{inside}</div>'


def plot(title: str, caption: str, svg: str, after: str = "") -> str:
    """A plot with its title above and, under it, one line that says how to read it."""
    head = f"<h3>{escape(title)}</h3><figcaption>{escape(caption)}</figcaption>"
    return f'<figure class="plot">{head}{svg}{after}</figure>'


def grid(items: Iterable[str], kind: str = "plots") -> str:
    """Plots, boxes or frames side by side as the width allows."""
    inside = "\n".join(item for item in items if item)
    return f'<div class="{kind}">\n{inside}\n</div>' if inside else ""


def frame(path: Path, caption: str, *, first: bool = False) -> str:
    """A picture, embedded."""
    source, (width, height) = embed(path)
    small = ' class="small"' if max(width, height) <= 400 else ""  # shown enlarged, pixel by pixel
    place = "frame first" if first else "frame"
    widest = f' style="max-width: {min(860, round(600 * width / height))}px"' if first else ""
    size = f'width="{width}" height="{height}" loading="lazy" alt="{escape(caption)}"'
    words = f"<figcaption>{escape(caption)}</figcaption>"
    return f'<figure class="{place}"><img{small}{widest} src="{source}" {size}>{words}</figure>'


def embed(path: Path) -> tuple[str, tuple[int, int]]:
    """A picture file as a data URL and its size; large ones are compressed."""
    data = path.read_bytes()
    try:
        image = open_picture(data)
    except PictureError as error:
        raise InputError(f"'{path}' is no picture that can be read: {error}") from error
    kind = (image.format or "png").lower()
    if len(data) > _MOST_BYTES or kind not in ("png", "jpeg", "webp", "gif"):
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "WEBP", quality=88, method=4)
        data, kind = buffer.getvalue(), "webp"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}", image.size


def pairs(rows: Mapping[str, str], title: str = "") -> str:
    """A two-column table in a box."""
    if not rows:
        return ""
    inside = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows.items()
    )
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<div class="box">{heading}<div class="scroll"><table class="pairs">{inside}</table></div></div>'


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], numbers: frozenset[int] = frozenset()) -> str:
    """A table that scrolls sideways where it is too wide; `numbers` are the columns set to the right."""
    head = "".join(f"<th{_side(i, numbers)}>{escape(text)}</th>" for i, text in enumerate(header))
    body = "".join(
        "<tr>"
        + "".join(f"<td{_side(i, numbers)}>{_cell(value)}</td>" for i, value in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="box scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


class Marked(str):
    """A cell that differs from its neighbours and is set off."""

    __slots__ = ()


def legend(names: Sequence[str], kind: str = "legend") -> str:
    """Names with the colours that stand for them in every plot."""
    inside = "".join(
        f'<li><span class="dot" style="background: var(--s{i % 6})"></span>{escape(name)}</li>'
        for i, name in enumerate(names)
    )
    return f'<ul class="{kind}">{inside}</ul>'


def page(title: str, subtitle: str, body: str, footer: str) -> str:
    """The whole file."""
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<div class="name">darkroom</div>
<h1>{escape(title)}</h1>
<div class="sub">{escape(subtitle)}</div>
</header>
{body}
<footer>{escape(footer)}</footer>
</main>
</body>
</html>
"""


def _side(i: int, numbers: frozenset[int]) -> str:
    return ' class="n"' if i in numbers else ""


def _cell(value: Any) -> str:
    if isinstance(value, Marked):
        return f'<span style="color: var(--accent); font-weight: 600">{escape(value)}</span>'
    return escape(str(value))
