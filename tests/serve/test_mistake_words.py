"""A field that is not as it must be is named in one line, in words that know nothing of what checks it."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from darkroom.serve.api.native import JobRequest
from darkroom.serve.api.shared import of_validation


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": "many"}, "steps: must be a whole number"),
        ({"steps": 2.5}, "steps: must be a whole number"),
        ({"steps": 0}, "steps: must be at least 1"),
        ({"guidance": "strong"}, "guidance: must be a number"),
        ({"prompt": 7}, "prompt: must be text"),
        ({"prompt": None}, "prompt: must be text"),
        ({"karras": "yes"}, "karras: must be true or false"),
        ({"adapters": "style"}, "adapters: must be a list"),
        ({"adapters": ["style"]}, "adapters.0: must be an object with fields"),
        ({"adapters": [{}]}, "adapters.0.name: missing"),
        ({"colour": "red"}, "colour: no such field"),
        ({"priority": "first"}, "priority: must be 'low', 'normal' or 'high'"),
    ],
)
def test_a_mistake_is_named_in_our_words(fields, message):
    with pytest.raises(ValidationError) as caught:
        JobRequest.model_validate_json(json.dumps({"prompt": "a", **fields}))
    assert of_validation(caught.value.errors()).message == message


@pytest.mark.parametrize("name", sorted(JobRequest.model_fields))
def test_no_field_is_refused_in_the_checkers_words(name):
    for wrong in (None, "?", -1, 1e300, True, [0], {"a": 1}, "x" * 200_000):
        try:
            JobRequest.model_validate_json(json.dumps({"prompt": "a", name: wrong}))
        except ValidationError as error:
            message = of_validation(error.errors()).message
            assert "Input" not in message
            assert "valid " not in message
            assert message.startswith(name)
            assert "\n" not in message
