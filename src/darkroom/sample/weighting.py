"""Prompt weighting: a prompt's text taken apart into pieces, each with how much it counts.

Two syntaxes are known. A1111's: `(more)` and `((more))` times 1.1 each, `[less]` divided by 1.1,
`(this:1.3)`, `\\(` for a plain bracket, and `BREAK` for a new part of 75 tokens. compel's: `word++` times 1.1
each, `word--` times 0.9 each, `(some words)1.3`, `(some words)++`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from darkroom.errors import InputError

WEIGHTINGS = ("none", "a1111", "compel")
A1111_STEP = 1.1
COMPEL_UP, COMPEL_DOWN = 1.1, 0.9
MAX_WEIGHT, MAX_DEPTH = 100.0, 100


@dataclass(frozen=True)
class Piece:
    """A stretch of text and its weight; `ends_part` where a BREAK stands in its place."""

    text: str
    weight: float = 1.0
    ends_part: bool = False


def pieces(prompt: str, weighting: str) -> list[Piece]:
    """A prompt taken apart by a syntax of WEIGHTINGS; InputError for syntax that is not known here."""
    if weighting not in WEIGHTINGS:
        raise InputError(f"weighting '{weighting}'", allowed=", ".join(WEIGHTINGS))
    if weighting == "a1111":
        return a1111_pieces(prompt)
    return compel_pieces(prompt) if weighting == "compel" else [Piece(prompt)]


A1111_TOKEN = re.compile(r"\\[\\()\[\]]|\\|\(|\[|:\s*([+-]?(?:\d+\.?\d*|\.\d+))\s*\)|\)|\]|[^\\()\[\]:]+|:")
A1111_BREAK = re.compile(r"\bBREAK\b")
A1111_LORA = re.compile(r"<(?:lora|lyco|hypernet):[^>]*>")
A1111_SQUARE = re.compile(r"\[([^\[\]]*)\]")


def a1111_pieces(prompt: str) -> list[Piece]:
    """A1111's syntax. A bracket that is never closed counts to the end; one never opened is plain text."""
    _refuse_a1111(prompt)
    found: list[tuple[str, float]] = []
    round_starts: list[int] = []
    square_starts: list[int] = []

    def weigh(starts: list[int], factor: float) -> None:
        start = starts.pop()
        found[start:] = [(text, weight * factor) for text, weight in found[start:]]

    for match in A1111_TOKEN.finditer(prompt):
        token = match[0]
        if token == "(":
            round_starts.append(len(found))
        elif token == "[":
            square_starts.append(len(found))
        elif match[1] is not None and round_starts:
            weigh(round_starts, _weight(match[1]))
        elif token == ")" and round_starts:
            weigh(round_starts, A1111_STEP)
        elif token == "]" and square_starts:
            weigh(square_starts, 1 / A1111_STEP)
        else:
            found.append((token[1:] if len(token) == 2 and token[0] == "\\" else token, 1.0))
    for starts, factor in ((round_starts, A1111_STEP), (square_starts, 1 / A1111_STEP)):
        while starts:
            weigh(starts, factor)
    return _joined([piece for text, weight in found for piece in _parted(text, weight)])


def _refuse_a1111(prompt: str) -> None:
    plain = re.sub(r"\\.", "", prompt)
    if found := A1111_LORA.search(plain):
        raise InputError(f"'{found[0]}' in a prompt", mend="name adapters by --adapter, not in the prompt")
    for found in A1111_SQUARE.finditer(plain):
        inner = re.sub(r"\([^()]*\)", "", found[1])
        if "|" in inner or inner.count(":") > 1 or re.search(r":\s*[\d.]+$", inner.rstrip()):
            raise InputError(
                f"'{found[0][:60]}' in a prompt: prompts that change between steps are not known",
                mend="write \\[ for a plain bracket",
            )
    if re.search(r"\bAND\b", plain):
        raise InputError("AND in a prompt: prompts composed by AND are not known", mend="write 'and'")


def _parted(text: str, weight: float) -> list[Piece]:
    pieces: list[Piece] = []
    for i, stretch in enumerate(A1111_BREAK.split(text)):
        if i:
            pieces.append(Piece("", ends_part=True))
        pieces.append(Piece(stretch, weight))
    return pieces


COMPEL_FACTOR = re.compile(r"\++|-+(?!\w)|\d+(?:\.\d+)?|\.\d+")
COMPEL_RUN = re.compile(r"(?P<between>[\s,;:!?\"]+)|(?:\\.|[^\\()\s,;:!?\"])+|\\")
COMPEL_SIGNED = re.compile(r"(?s)(.*[^+])(\++)|(.*[^-])(-+)")
COMPEL_CALL = re.compile(r"\.\s*(and|blend|swap)\s*\(")


def compel_pieces(prompt: str) -> list[Piece]:
    """compel's syntax. Blends, conjunctions and swaps are refused, and so is a bracket out of place."""
    if found := COMPEL_CALL.search(prompt):
        raise InputError(
            f".{found[1]}() in a prompt", allowed="++, --, (words)1.2", mend="only weights are known"
        )
    pieces, end = _compel_group(prompt, 0, 1.0, 0)
    if end < len(prompt):
        raise InputError(
            _bracket(prompt, "closes a bracket that was not opened"), mend="write \\) for a plain one"
        )
    return _joined(pieces)


def _compel_group(prompt: str, at: int, weight: float, depth: int) -> tuple[list[Piece], int]:
    """The pieces from `at` to the bracket that closes this group (or the prompt's end), and where that is."""
    if depth > MAX_DEPTH:
        raise InputError(f"brackets {depth} deep in a prompt", allowed=f"up to {MAX_DEPTH}")
    pieces: list[Piece] = []
    while at < len(prompt) and prompt[at] != ")":
        if prompt[at] == "(":
            inner, end = _compel_group(prompt, at + 1, 1.0, depth + 1)
            if end >= len(prompt):
                raise InputError(_bracket(prompt, "leaves a bracket open"), mend="write \\( for a plain one")
            factor, at = _compel_factor(prompt, end + 1)
            pieces += [Piece(one.text, one.weight * factor * weight) for one in inner]
        else:
            run = COMPEL_RUN.match(prompt, at)
            assert run is not None
            pieces += [Piece(run[0], weight)] if run["between"] else _compel_word(run[0], weight)
            at = run.end()
    return pieces, at


def _compel_word(word: str, weight: float) -> list[Piece]:
    """A word without its signs, weighted by them, and the full stops behind it."""
    signed = COMPEL_SIGNED.fullmatch(word.rstrip("."))
    if signed is None or (signed[1] or signed[3]).endswith("\\"):
        return [Piece(_unescaped(word), weight)]
    bare, signs = (signed[1], signed[2]) if signed[1] else (signed[3], signed[4])
    stops = word[len(bare) + len(signs) :]
    return [Piece(_unescaped(bare), weight * _signs(signs)), Piece(stops, weight)]


def _compel_factor(prompt: str, at: int) -> tuple[float, int]:
    """The weight written right behind a closing bracket, and where it ends."""
    found = COMPEL_FACTOR.match(prompt, at)
    if found is None:
        return 1.0, at
    return (_signs(found[0]) if found[0][0] in "+-" else _weight(found[0])), found.end()


def _signs(signs: str) -> float:
    step = COMPEL_UP if signs[0] == "+" else COMPEL_DOWN
    return _weight(step ** min(len(signs), 1000))


def _bracket(prompt: str, what: str) -> str:
    return f"the prompt '{prompt[:40]}' {what}"


def _unescaped(text: str) -> str:
    return re.sub(r"\\([\\()\"+\-])", r"\1", text)


def _weight(value: str | float) -> float:
    weight = float(value)
    if not abs(weight) <= MAX_WEIGHT:
        raise InputError(f"a prompt's weight of {value}", allowed=f"-{MAX_WEIGHT:g} to {MAX_WEIGHT:g}")
    return weight


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of the same weight as one piece, so that words are not torn for the tokenizer."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if not piece.text and not piece.ends_part:
            continue
        if last and not last.ends_part and not piece.ends_part and last.weight == piece.weight:
            joined[-1] = Piece(last.text + piece.text, last.weight)
        else:
            joined.append(piece)
    return joined or [Piece("")]
