"""`Refused`: a request that is not served, in a form that every API can give in its own shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from darkroom.errors import DarkroomError, InputError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    507: "unavailable_error",
}
OPERATORS = re.compile(r"(^|\s)--[a-z]|\bdarkroom [a-z]|\bpip install\b")
"""Options and commands."""
FOLDERS = re.compile(r"'(?:/|[A-Za-z]:\\)[^']*[/\\]([^'/\\]+)'")
"""What stands before the last name of a quoted path."""
RETRIED = (408, 409, 429, 500, 502, 503, 504, 507)
"""After these OpenAI's clients, and others like them, try again by themselves unless a header forbids it."""


class Refused(DarkroomError):
    """`status` is HTTP's; `code` one word for programs; `param` the field at fault; `message` for people.

    `retry_after_s` says when it is worth asking again, where waiting helps. Without it clients that ask again
    by themselves after some statuses get a header against it: it would only be drawn, or refused, once more.
    `logged` is the message without what a log must not hold: a prompt.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        logged: str | None = None,
    ) -> None:
        self.logged = message if logged is None else logged
        self.status, self.code, self.message = status, code, message
        self.param, self.retry_after_s = param, retry_after_s
        super().__init__(message)

    @property
    def kind(self) -> str:
        """The class of error, as OpenAI's error object has it."""
        return KINDS.get(self.status, "server_error")

    @property
    def headers(self) -> dict[str, str]:
        """What goes along with the answer."""
        found = {}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(max(1, -int(-self.retry_after_s // 1)))
        elif self.status in RETRIED:
            found["x-should-retry"] = "false"
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found


def say(error: DarkroomError) -> str:
    """An error in a client's words: what only who runs the server could type is left out, and where its
    files lie."""
    if not isinstance(error, InputError):
        return FOLDERS.sub(r"'\1'", str(error))
    allowed = f"allowed: {error.allowed}" if error.allowed else ""
    message = "; ".join(
        part for part in (error.given, allowed, error.mend) if part and not OPERATORS.search(part)
    )
    return FOLDERS.sub(r"'\1'", message)


MISTAKES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    "int_parsing_size": "must be a whole number of fewer digits",
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "finite_number": "must be a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": "must be text",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must be of the form {pattern}",
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be an object with fields"),
    "too_short": "must have at least {min_length} values",
    "too_long": "must have at most {max_length} values",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "missing": "missing",
    "extra_forbidden": "no such field",
}
"""What is said of a field by the kind of its mistake, in pydantic's terms."""


def said_of(mistake: Mapping[str, Any]) -> str:
    """One of a `ValidationError`'s mistakes in a few words; the value given is not repeated."""
    said = MISTAKES.get(mistake["type"])
    if said is None:
        return str(mistake["msg"]).removeprefix("Value error, ")
    return said.format(**mistake.get("ctx", {}))
