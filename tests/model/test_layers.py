from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from astrai_triton.model.layers import RmsNorm, project


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 17, 129])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("row_major", [False, True])
def test_a_projection_is_x_times_the_transposed_weight(dtype, rows, with_bias, row_major):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 40, generator=generator).to(dtype)
    weight = torch.randn(24, 40, generator=generator).to(dtype)
    bias = torch.randn(24, generator=generator).to(dtype) if with_bias else None
    wanted = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    # 40 float32 roundings of partial sums below 30, then one rounding to the dtype.
    tolerance = max(torch.finfo(dtype).eps, 40 * torch.finfo(torch.float32).eps)
    got = project(x, weight, bias, row_major=row_major)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def test_a_projection_takes_columns_as_well_as_rows():
    x, weight = torch.randn(6, 40).bfloat16(), torch.randn(24, 40).bfloat16()
    torch.testing.assert_close(project(x.T.contiguous().T, weight, None), project(x, weight, None))


def test_a_norm_computes_in_float32_and_rounds_once():
    norm = RmsNorm(16, 1e-3, dtype=torch.bfloat16, device=torch.device("cpu"))
    norm.weight.copy_(torch.linspace(0.5, 2.0, 16))
    x = torch.randn(5, 16)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), wanted.bfloat16())


def test_float32_projections_use_the_plain_linear_layer():
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    assert torch.equal(project(x, weight, None), F.linear(x, weight))
