from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from astrai_server.openapi import describe_api
from chaos.generate import RequestGenerator

DOCUMENT = json.loads(json.dumps(describe_api(has_debug=True)))
GENERATOR = RequestGenerator(DOCUMENT)
PATHS = sorted(GENERATOR.bodies)


def validator(path: str) -> Any:
    return Draft202012Validator(GENERATOR.bodies[path] | {"components": DOCUMENT["components"]})


@pytest.mark.parametrize("path", PATHS)
def test_the_document_accepts_valid_bodies(path: str) -> None:
    for i in range(150):
        validator(path).validate(GENERATOR.make_valid(random.Random(i), path))


@pytest.mark.parametrize("path", PATHS)
def test_the_document_refuses_invalid_bodies(path: str) -> None:
    for i in range(600):
        body, place = GENERATOR.make_invalid(random.Random(i), path)
        assert not validator(path).is_valid(body), (place, body)


def test_invalid_bodies_are_wrong_in_many_places() -> None:
    path = "/v1/chat/completions"
    places = {GENERATOR.make_invalid(random.Random(i), path)[1] for i in range(400)}
    assert len(places) > 30
    assert any("messages/" in place for place in places)


@pytest.mark.parametrize("path", PATHS)
def test_equal_seeds_give_equal_bodies(path: str) -> None:
    for make in (GENERATOR.make_valid, GENERATOR.make_invalid, GENERATOR.make_damaged):
        assert make(random.Random(3), path) == make(random.Random(3), path)


def test_damaged_bodies_are_mostly_no_json() -> None:
    num_broken = 0
    for i in range(100):
        try:
            json.loads(GENERATOR.make_damaged(random.Random(i), PATHS[0]))
        except ValueError:
            num_broken += 1
    assert num_broken > 50
