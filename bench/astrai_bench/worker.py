"""A process that compiles kernels: one JSON request per line on stdin, one JSON answer per line on stdout.

Requests, each with a ``capability``, 90 for sm_90: ``{"list": null}`` for the names of its variants,
``{"examine": name}`` for a report, ``{"plan": case}`` for the launches of an ``astrai_bench.cases.Case``.
Started by ``astrai_bench.compilation`` with the modules that list the variants as arguments, since a kernel
is compiled or interpreted according to the environment it was imported in.

A process lists for every architecture and compiles for one. Triton 3.6 keeps how it converts fp8 in static
tables that the first kernel fills: what follows for another architecture has that one's conversions, so that
sm_80 gets instructions it does not have, or sm_90 gets slow ones and the report shows a kernel nobody runs.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

import attrs

from astrai_bench.cases import Case
from astrai_bench.errors import BenchError
from astrai_bench.static import Listed, examine_variant, list_variants


def main(families: tuple[str, ...]) -> None:
    """Answer until stdin ends."""
    # Compilers print; what they print must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    compiled_for: int | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "list" not in request:
                compiled_for = _pin(compiled_for, request["capability"])
            answer = _answer(request, families)
        except BenchError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _pin(compiled_for: int | None, capability: int) -> int:
    """The one architecture of this process."""
    if compiled_for not in (None, capability):
        raise BenchError(
            f"capability: wanted {compiled_for}, which this process compiled for before, got {capability}; "
            "start another process"
        )
    return capability


def _answer(request: dict[str, Any], families: tuple[str, ...]) -> dict[str, Any]:
    from astrai_triton.ops.launch import ARCHES

    capability = request["capability"]
    arch, variants = ARCHES[capability], _variants(capability, families)
    if "list" in request:
        return {"names": list(variants)}
    if "plan" in request:
        from astrai_bench.plan import plan_case

        launches = plan_case(read_case(request["plan"]), arch, list(variants.values()))
        return {"launches": [attrs.asdict(launch) for launch in launches]}
    return attrs.asdict(examine_variant(variants[request["examine"]], arch))


@functools.cache
def _variants(capability: int, families: tuple[str, ...]) -> dict[str, Listed]:
    from astrai_triton.ops.launch import ARCHES

    return {listed.variant.name: listed for listed in list_variants(ARCHES[capability], families)}


def read_case(fields: dict[str, Any]) -> Case:
    """A case from its JSON form."""
    return Case(**{**fields, "q_lens": tuple(fields["q_lens"]), "kv_lens": tuple(fields["kv_lens"])})


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
