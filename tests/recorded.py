"""Records what the ops launch, without running it, and what Triton would compile for it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

from astrai_triton.ops import decode, prefill_call, rotary, split
from astrai_triton.ops.launch import Variant, launch_options

KERNELS = {
    split: ("attend_decode_kernel", "merge_splits_kernel"),
    decode: ("merge_states_kernel",),
    prefill_call: ("attend_prefill_kernel", "merge_prefill_kernel"),
    rotary: ("rotate_qk_kernel", "append_rotated_kernel"),
}


@attrs.frozen(eq=False)
class Launch:
    """One launch of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    """Every argument of the kernel, by name."""
    options: Mapping[str, Any]
    """What the launch says to the compiler."""

    @property
    def constexprs(self) -> dict[str, Any]:
        """The compile-time arguments."""
        return {name: value for name, value in self.arguments.items() if name.isupper()}


@attrs.frozen
class Compilation:
    """What a launch makes Triton compile."""

    signature: Mapping[str, str]
    """Argument -> Triton type."""
    specialized: frozenset[str]
    """Arguments whose value or address is known to the compiler."""
    key: str
    """Of Triton's cache of compiled kernels."""


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """A list that every launch of an op is added to from now on; nothing is run any more."""
    launches: list[Launch] = []
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, _Recorder(getattr(module, name), launches))
    return launches


def fix_variant(variant: Variant) -> tuple[Any, ...]:
    """What tells one variant from another: the kernel, what it fixes, and how it is launched."""
    constexprs = {name: value for name, value in variant.constexprs.items() if name.isupper()}
    return _fix(variant.kernel, constexprs, launch_options(variant.config))


def fix_launch(launch: Launch) -> tuple[Any, ...]:
    """As ``fix_variant``, of a launch."""
    return _fix(launch.kernel, launch.constexprs, launch.options)


def find_compilation(launch: Launch) -> Compilation:
    """What Triton's own launcher finds in the arguments, on sm_90."""
    function, binder = _binder(launch.kernel)
    _, specialization, options = binder(**launch.arguments, **launch.options)
    names = [param.name for param in function.params]
    kinds = dict(zip(names, specialization, strict=True))
    return Compilation(
        signature={name: kind[0] for name, kind in kinds.items()},
        specialized=frozenset(name for name, (kind, value) in kinds.items() if kind != "constexpr" and value),
        key=compute_cache_key({}, specialization, options),
    )


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], /, *args: Any, **kwargs: Any) -> None:
        names = self._kernel.arg_names
        given = dict(zip(names, args, strict=False)) | kwargs
        arguments = {name: given.pop(name) for name in names}
        self._launches.append(Launch(self._kernel, grid, arguments, given))


def _fix(kernel: Any, constexprs: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    fixed = sorted((name, str(value)) for name, value in constexprs.items())
    return kernel.fn.__name__, tuple(fixed), tuple(sorted(options.items()))


@functools.cache
def _binder(kernel: Any) -> tuple[Any, Any]:
    """The compiled function, also where the kernel was decorated for the interpreter, and its launcher."""
    function = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return function, create_function_from_signature(function.signature, function.params, backend)
