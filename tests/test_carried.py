from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from carried import carry, carry_all

# A CPU is as good a place to be carried to as any: the copies are other memory there, too.
CPU = torch.device("cpu")


def test_a_view_arrives_with_its_strides_and_its_surroundings() -> None:
    whole = torch.arange(24.0).view(4, 6)
    view = whole[1:, 1::2].T
    seen: list[torch.Tensor] = []
    carry(seen.append, CPU)(view)
    (there,) = seen
    assert (there.shape, there.stride(), there.storage_offset()) == (
        view.shape,
        view.stride(),
        view.storage_offset(),
    )
    assert there.equal(view)
    assert there.data_ptr() != view.data_ptr()
    assert not there.requires_grad
    assert there.untyped_storage().nbytes() == whole.untyped_storage().nbytes()


def test_a_tensor_with_gradient_arrives_as_one() -> None:
    assert carry(lambda x: x.requires_grad, CPU)(torch.ones(2, requires_grad=True))


def test_views_of_one_memory_still_share_it() -> None:
    memory = torch.zeros(10)

    def write(a: torch.Tensor, *, b: torch.Tensor) -> torch.Tensor:
        a[5] = 3.0
        return b * 2

    assert carry(write, CPU)(memory, b=memory[4:7]).tolist() == [0.0, 6.0, 0.0]


def test_what_was_written_comes_back_even_after_an_error() -> None:
    target, offset = torch.zeros(2, 3), torch.ones(8)[5:]

    def write(a: torch.Tensor, b: torch.Tensor) -> None:
        a[:, 1] = 7.0
        b[0] = 9.0
        raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        carry(write, CPU)(target, offset)
    assert target.tolist() == [[0.0, 7.0, 0.0]] * 2
    assert offset.tolist() == [9.0, 1.0, 1.0]


def test_a_result_that_is_an_argument_is_that_argument() -> None:
    out, other = torch.zeros(2), torch.ones(2)
    first, (second, nothing) = carry(lambda a, b: (a, (a + b, None)), CPU)(out, other)
    assert first is out
    assert second.tolist() == [1.0, 1.0]
    assert nothing is None


def test_empty_tensors_and_other_values_travel_too() -> None:
    empty = torch.empty(0, 3, dtype=torch.float16)
    got = carry(lambda a, b, c: (tuple(a.shape), a.dtype, b, c.device.type), CPU)(
        empty, "x", torch.empty(2, device="meta")
    )
    assert got == ((0, 3), torch.float16, "x", "meta")


def test_a_function_is_replaced_wherever_the_package_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    package, module, other = ModuleType("pack"), ModuleType("pack.inner"), ModuleType("packet")
    for holder in (package, module, other):
        holder.double = double  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, holder.__name__, holder)
    carry_all(package, ["double"], CPU)
    assert package.double is module.double is not double
    assert other.double is double
    assert package.double(torch.ones(1)).tolist() == [2.0]
