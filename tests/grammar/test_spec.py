from __future__ import annotations

import json
import subprocess
import sys

import pytest

import astrai_triton.grammar
from astrai_triton.errors import GrammarError
from astrai_triton.grammar.spec import EMBED_MARK, Grammar, embed_schema


def test_equal_grammars_are_one_key() -> None:
    first, second = Grammar.json_schema({"type": "integer"}), Grammar.json_schema({"type": "integer"})
    assert first == second
    assert len({first, second, Grammar.json_object(), Grammar.regex("a"), Grammar.lark("a")}) == 4


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert Grammar.json_schema(schema).source == json.dumps(schema, separators=(",", ":"))


def test_what_is_not_json_is_no_schema() -> None:
    with pytest.raises(TypeError):
        Grammar.json_schema({"const": {1, 2}})
    with pytest.raises(ValueError, match="JSON compliant"):
        Grammar.json_schema({"minimum": float("nan")})


def test_a_schema_that_nests_without_end_is_no_schema() -> None:
    schema: dict[str, object] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nests too deeply"):
        Grammar.json_schema(schema)


def test_another_kind_of_grammar_is_refused() -> None:
    with pytest.raises(ValueError, match="gbnf"):
        Grammar("gbnf", "root ::= x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="source"):
        Grammar("regex", b"x")  # type: ignore[arg-type]


def test_the_package_comes_without_the_grammar_engine() -> None:
    code = "import sys, astrai_triton.grammar; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert astrai_triton.grammar.__all__ == ["Grammar", "embed_schema"]


def test_an_embedded_schema_is_checked() -> None:
    with pytest.raises(GrammarError, match="uniqueItems"):
        embed_schema({"type": "array", "uniqueItems": True})
    assert embed_schema({"type": "string"}).startswith(EMBED_MARK)
    assert json.loads(embed_schema(True)).keys() == {"x-guidance"}
