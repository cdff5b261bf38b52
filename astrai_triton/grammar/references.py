"""What a ``$ref`` points at inside of its document."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from astrai_triton.errors import GrammarError


class References:
    """Resolves ``#``, JSON pointers and anchors; other documents are not fetched.

    Args:
        root: the document.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        base = root.get("$id") if isinstance(root, dict) else None
        self._base = base.rstrip("#") if isinstance(base, str) else ""

    def resolve(self, reference: str, where: str) -> tuple[str, Any]:
        """The place of the target as a JSON pointer, and the target.

        Args:
            reference: value of ``$ref``.
            where: place of the ``$ref``, for errors.

        Raises:
            GrammarError: it leads out of the document or to nothing.
        """
        local = reference.removeprefix(self._base) if self._base else reference
        if local and not local.startswith("#"):
            raise GrammarError(
                f"{where}: $ref {reference[:200]!r} leads to another document; put the schema under $defs"
            )
        fragment = unquote(local[1:])
        if fragment and not fragment.startswith("/"):
            return self._find_anchor(fragment, reference, where)
        target: Any = self._root
        for part in fragment.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(name) if isinstance(target, list) and name.isdecimal() else name]
            except (KeyError, IndexError, TypeError) as error:
                raise GrammarError(f"{where}: $ref {reference[:200]!r} points at nothing") from error
        return fragment, target

    def _find_anchor(self, name: str, reference: str, where: str) -> tuple[str, Any]:
        found: list[tuple[str, Any]] = []
        pending: list[tuple[str, Any]] = [("", self._root)]
        while pending:
            pointer, node = pending.pop()
            if isinstance(node, dict):
                if node.get("$anchor") == name:
                    found.append((pointer, node))
                pending += [
                    (f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}", item)
                    for key, item in node.items()
                    if key not in ("const", "enum", "default", "examples", "example")
                ]
            elif isinstance(node, list):
                pending += [(f"{pointer}/{index}", item) for index, item in enumerate(node)]
        if len(found) != 1:
            count = "no place" if not found else f"{len(found)} places"
            raise GrammarError(f"{where}: $ref {reference[:200]!r} matches the $anchor of {count}")
        return found[0]
