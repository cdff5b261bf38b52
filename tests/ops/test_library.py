"""The operators: schemas, fakes and mutation hold up to torch's own check, and no op breaks a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing

import astrai_triton
from astrai_triton.ops import decode, library, prefill, rotary
from astrai_triton.schedule import build_indptr, build_q_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = (
    "attn_decode",
    "attn_paged_decode",
    "attn_paged_prefill",
    "attn_prefill",
    "merge_states",
    "rotary_append_",
    "rotary_emb",
    "rotary_qk_",
)


def make_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def dense(q_len: int) -> tuple[torch.Tensor, ...]:
    return make_rows(2, q_len, 4, 16), make_rows(2, 5, 2, 16, seed=1), make_rows(2, 5, 2, 24, seed=2)


def paged_decode() -> tuple[torch.Tensor, ...]:
    table = make_ints(3, 0, 5, 6, 1, 2, -1, 4).view(2, 4)
    pools = make_rows(8, 2, 16, seed=1), make_rows(8, 2, 24, seed=2)
    return make_rows(2, 4, 16), *pools, table, make_ints(1, 0), make_ints(0, 2, 5)


def paged_prefill() -> tuple[torch.Tensor, ...]:
    table = make_ints(3, 0, 5, 6, 1, 2, -1, 4).view(2, 4)
    pools = make_rows(8, 2, 16, seed=1), make_rows(8, 2, 24, seed=2)
    q_lens = [2, 1]
    tiles = (make_ints(*numbers) for numbers in (build_indptr(q_lens), *build_q_tiles(q_lens)))
    return make_rows(3, 4, 16), *pools, table, make_ints(1, 0), make_ints(0, 2, 5), *tiles


def states() -> tuple[torch.Tensor, ...]:
    return make_rows(3, 2, 16), make_rows(3, 2, seed=1), make_rows(3, 2, 16, seed=2), make_rows(3, 2, seed=3)


def turned() -> tuple[torch.Tensor, ...]:
    return make_rows(3, 4, 16), make_rows(3, 6, 2, seed=1)


def appended() -> tuple[torch.Tensor, ...]:
    rows = make_rows(3, 4, 16), make_rows(3, 2, 16, seed=1), make_rows(3, 2, 24, seed=2)
    return *rows, make_rows(3, 6, 2), make_rows(8, 2, 16), make_rows(8, 2, 24), make_ints(4, -1, 2)


def scratch() -> dict[str, Any]:
    return {"o_part": make_rows(2, 4, 1, 24), "ml_part": make_rows(2, 4, 1, 2)}


def new_row() -> dict[str, Any]:
    return {"new_k": make_rows(2, 2, 16, seed=4), "new_v": make_rows(2, 2, 24, seed=5)}


CALLS: dict[str, tuple[str, Callable[[], tuple[torch.Tensor, ...]], Callable[[], dict[str, Any]]]] = {
    "decode": ("attn_decode", lambda: dense(1), dict),
    "decode, options": (
        "attn_decode",
        lambda: dense(1),
        lambda: {
            "mask": make_ints(1, 0, 1, 1, 1, 1, 1, 0, 1, 1).view(2, 5).bool(),
            "softmax_scale": 0.3,
            "window_size": (3, 0),
            "softcap": 5.0,
            "sinks": make_rows(4),
        },
    ),
    "prefill": ("attn_prefill", lambda: dense(3), lambda: {"is_causal": True}),
    "paged decode": ("attn_paged_decode", paged_decode, lambda: {"max_kv_len": 3}),
    "paged decode, scratch": ("attn_paged_decode", paged_decode, scratch),
    "paged decode, append": ("attn_paged_decode", paged_decode, new_row),
    "paged prefill": ("attn_paged_prefill", paged_prefill, lambda: {"is_causal": True}),
}
FORMS = ["", "lse", "out", "lse_out"]
# Every op, and every form of the one that also writes into the pool.
CASES = [(call, "") for call in CALLS] + [("paged decode, append", form) for form in FORMS[1:]]
CASES += [("prefill", "lse"), ("paged prefill", "lse_out")]


def add_form(form: str, arguments: tuple[torch.Tensor, ...], options: dict[str, Any]) -> dict[str, Any]:
    if "out" in form:
        out = make_rows(*arguments[0].shape[:-1], arguments[2].shape[-1])
        options = {**options, "out": out}
    return {**options, "return_lse": True} if "lse" in form else options


def flatten(result: Any) -> list[torch.Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else list(result)


def tensors_in(*holders: Any) -> list[torch.Tensor]:
    return [value for holder in holders for value in holder if isinstance(value, torch.Tensor)]


def assert_traced_alike(
    name: str, arguments: tuple[torch.Tensor, ...], options: dict[str, Any], backend: str
) -> None:
    """Compiled and plain: the same results, and the same bytes in every argument afterwards."""
    launch = getattr(library, name)

    def step(arguments: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Any:
        return launch(*arguments, **options)

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    plain_arguments = tuple(map(copy, arguments))
    plain_options = {key: copy(value) for key, value in options.items()}
    want = flatten(step(plain_arguments, plain_options))
    torch.compiler.reset()
    got = flatten(torch.compile(step, fullgraph=True, backend=backend)(arguments, options))
    kept = tensors_in(arguments, (value for key, value in options.items() if not key.endswith("_part")))
    expected = tensors_in(
        plain_arguments, (value for key, value in plain_options.items() if not key.endswith("_part"))
    )
    for have, should in zip([*got, *kept], [*want, *expected], strict=True):
        assert torch.equal(
            have.nan_to_num(7.0) if have.is_floating_point() else have,
            should.nan_to_num(7.0) if should.is_floating_point() else should,
        )


@pytest.mark.parametrize(("call", "form"), CASES)
def test_attention_compiles_without_a_graph_break(call: str, form: str) -> None:
    name, make_arguments, make_options = CALLS[call]
    arguments = make_arguments()
    assert_traced_alike(name, arguments, add_form(form, arguments, make_options()), "aot_eager")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("name", "make_arguments", "out_shape"),
    [
        ("merge_states", states, (3, 2, 16)),
        ("rotary_emb", turned, (3, 4, 16)),
        ("rotary_qk_", lambda: (make_rows(3, 4, 16), make_rows(3, 2, 16), make_rows(3, 6, 2)), None),
        ("rotary_append_", appended, None),
    ],
)
def test_the_other_ops_compile_without_a_graph_break(
    name: str,
    make_arguments: Callable[[], tuple[torch.Tensor, ...]],
    out_shape: tuple[int, ...] | None,
    backend: str,
) -> None:
    assert_traced_alike(name, make_arguments(), {}, backend)
    if out_shape is not None:
        assert_traced_alike(name, make_arguments(), {"out": make_rows(*out_shape)}, backend)


@pytest.mark.parametrize(("call", "form"), CASES)
def test_attention_operators_pass_the_operator_check(call: str, form: str) -> None:
    name, make_arguments, make_options = CALLS[call]
    arguments, options = make_arguments(), make_options()
    overload = "append_" * ("new_k" in options) + form
    options = add_form(form, arguments, options)
    options.pop("return_lse", None)
    operator = getattr(getattr(torch.ops.astrai, name), overload.strip("_") or "default")
    torch.library.opcheck(operator, arguments, options)


@pytest.mark.parametrize(
    ("operator", "arguments", "options"),
    [
        ("merge_states.default", states(), {}),
        ("merge_states.out", states(), {"out": make_rows(3, 2, 16)}),
        ("rotary_emb.default", turned(), {"pairing": "half"}),
        ("rotary_emb.out", turned(), {"out": make_rows(3, 4, 16)}),
        ("rotary_qk_.default", (make_rows(3, 4, 16), *turned()), {"pairing": "half"}),
        ("rotary_append_.default", appended(), {}),
    ],
)
def test_the_other_operators_pass_the_operator_check(
    operator: str, arguments: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> None:
    name, overload = operator.split(".")
    torch.library.opcheck(getattr(getattr(torch.ops.astrai, name), overload), arguments, options)


def test_a_compiled_step_sees_what_an_op_wrote_in_place() -> None:
    q, k, v, freqs_cis, k_buffer, v_buffer, slots = appended()

    def step(q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor) -> torch.Tensor:
        q = q * 2
        library.rotary_append_(q, k, v, freqs_cis, k_buffer, v_buffer, slots)
        return q.sum(-1) + k_buffer.sum() + v_buffer.sum()

    want = step(q, k_buffer.clone(), v_buffer.clone())
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k_buffer, v_buffer)
    torch.testing.assert_close(got, want)
    assert torch.equal(v_buffer[4], v[0])


def test_a_module_that_names_the_public_function_compiles() -> None:
    class Turn(torch.nn.Module):
        def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
            return astrai_triton.rotary_emb(x, freqs_cis, pairing="half") + 1

    x, table = turned()
    got = torch.compile(Turn(), fullgraph=True, backend="aot_eager")(x, table)
    assert torch.equal(got, rotary.rotary_emb(x, table, pairing="half") + 1)


def test_a_batch_of_another_size_does_not_trace_again() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(library.rotary_emb, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (3, 5, 9):
        x, table = make_rows(tokens, 4, 16), make_rows(tokens, 6, 2)
        assert torch.equal(step(x, table), rotary.rotary_emb(x, table))
    assert counter.frame_count == 1


def test_the_schemas_take_what_the_launchers_take() -> None:
    for name in NAMES:
        operator = getattr(torch.ops.astrai, name)
        known = {
            argument.name
            for overload in operator.overloads()
            for argument in getattr(operator, overload)._schema.arguments
        }
        parameters = set(inspect.signature(getattr(library, name)).parameters)
        assert known == parameters - {"return_lse"}


def test_called_from_python_the_functions_are_the_launchers() -> None:
    for name in NAMES:
        traceable = getattr(library, name)
        home = next(module for module in (decode, prefill, rotary) if hasattr(module, name))
        assert traceable.__wrapped__ is getattr(home, name)
        assert traceable.__doc__ == getattr(home, name).__doc__
