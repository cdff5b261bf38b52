"""Structured output: which tokens may come next so that an answer obeys a grammar.

Importing this package does not import the grammar engine; ``astrai_triton.grammar.compiler`` does.
"""

from astrai_triton.grammar.spec import Grammar, embed_schema

__all__ = ["Grammar", "embed_schema"]
