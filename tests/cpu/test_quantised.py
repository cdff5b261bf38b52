"""Quantised weights: near to the model, on every instruction set, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from astrai_triton.cpu import CpuDecoder
from cpu_kernels import ALL_ISAS, needs_kernels
from random_models import VARIANTS, random_decoder, small_config

pytestmark = needs_kernels

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 90}
SEQUENCES = [[(7 * i + j) % 50 for j in range(length)] for i, length in enumerate((40, 3, 11))]


def run(session):
    """Logits of all rows: prefill of what is not decoded, then three mixed steps."""
    lengths = {i: len(tokens) for i, tokens in enumerate(session.sequences)}
    logits = [session.step({i: max(count - 3, 1) for i, count in lengths.items()})]
    while left := {i: 1 for i, count in lengths.items() if session.done[i] < count}:
        logits.append(session.step(left))
    return torch.cat(logits)


def rms_error(got, wanted):
    return float((got - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt())


# Uniform rounding of a group of 64 normal values at top = 2.5 sigma errs by top / 127 / sqrt(12) = 0.6 % of
# sigma in weights and activations alike; int4 weights of groups of 32 by 7 %. Some ten products in a row add
# up like a random walk, and these models amplify: their weights are 1.5 times what would keep a row's size.
@pytest.mark.parametrize(("quantize", "bound"), [("int8", 0.08), ("int4", 0.5)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_stay_near_those_of_the_model(dtype, variant, quantize, bound, open_session):
    decoder = random_decoder(small_config(**{**VARIANTS[variant], **WIDE}), dtype=dtype)
    wanted = run(open_session(decoder, SEQUENCES))
    error = rms_error(run(open_session(CpuDecoder(decoder, quantize=quantize), SEQUENCES)), wanted)
    assert error < bound


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_instruction_sets_agree(isa, quantize, open_session):
    decoder = random_decoder(small_config(**WIDE))
    plain, got = (
        run(open_session(CpuDecoder(decoder, quantize=quantize, isa=name), SEQUENCES))
        for name in ("plain", isa)
    )
    # Integer products are exact; an activation on the edge between two integers may still go either way.
    assert rms_error(got, plain) < 0.01


COMPANY = [[(11 * i + 3 * j) % 50 for j in range(2 + i)] for i in range(40)]


def model_of(dtype, quantize, isa):
    return CpuDecoder(random_decoder(small_config(**WIDE), dtype=dtype), quantize=quantize, isa=isa)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_a_decoding_row_has_the_same_bits_in_any_company(isa, quantize, dtype, open_session):
    model = model_of(dtype, quantize, isa)

    def decode(members, prefilled=()):
        session = open_session(model, COMPANY)
        for i, tokens in enumerate(COMPANY):
            if i not in prefilled:
                session.step({i: len(tokens) - 1}, [0])
        counts = {i: len(COMPANY[i]) if i in prefilled else 1 for i in members}
        ends = torch.tensor(list(counts.values())).cumsum(0) - 1
        logits = session.step(counts, ends.tolist())
        return logits[[i not in prefilled for i in members]]

    everyone = decode(range(40))
    for members in ([0], [39], range(16), range(3, 20)):
        assert torch.equal(decode(members), everyone[list(members)])
    # Beside prefills, before and behind them and alone between two.
    beside = [5, 30, 6, 7, 31, 8]
    assert torch.equal(decode(beside, prefilled=(30, 31)), everyone[[5, 6, 7, 8]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_a_prefill_has_the_same_bits_in_any_company(isa, quantize, dtype, open_session):
    model = model_of(dtype, quantize, isa)
    alone = open_session(model, COMPANY).step({30: len(COMPANY[30])})
    session = open_session(model, COMPANY)
    session.step({i: len(COMPANY[i]) - 1 for i in (5, 6)}, [0])
    beside = session.step({5: 1, 20: 22, 30: 32, 6: 1, 39: 41})
    assert torch.equal(beside[23:55], alone)


@pytest.mark.parametrize(("levels", "low"), [(16, -3.0), (15, -8.0), (9, 2.0)])
def test_int4_keeps_weights_that_had_four_bits_before(levels, low, open_session):
    decoder = random_decoder(small_config(**WIDE))
    generator = torch.Generator().manual_seed(4)
    for layer in decoder.layers:
        for weight in (
            layer.attn.qkv_weight,
            layer.attn.o_weight,
            layer.mlp.gate_up_weight,
            layer.mlp.down_weight,
        ):
            groups = torch.randint(0, levels, (weight.numel() // 32, 32), generator=generator)
            groups[:, 3], groups[:, 4] = 0, levels - 1
            scale = weight.std() / levels * torch.rand(len(groups), 1, generator=generator).add(0.5)
            weight.data.copy_(((groups + low) * scale.half()).reshape(weight.shape))
    wanted = run(open_session(decoder, SEQUENCES))
    error4, error8 = (
        rms_error(run(open_session(CpuDecoder(decoder, quantize=name), SEQUENCES)), wanted)
        for name in ("int4", "int8")
    )
    # What is left comes from the activations, which int8 rounds alike.
    assert error4 < 1.2 * error8


def test_quantised_weights_take_the_memory_they_should():
    decoder = random_decoder(small_config(hidden_size=512, intermediate_size=1024, vocab_size=2048))
    plain, int8, int4 = (CpuDecoder(decoder, quantize=name).num_bytes for name in ("none", "int8", "int4"))
    head = 2048 * 512
    linear = plain / 4 - head
    # What is not a matrix is float32.
    slack = 64 << 10
    assert int8 < (linear + head) * (8 + 16 / 64) / 8 + slack
    assert int4 < linear * (4 + 32 / 32) / 8 + head * (8 + 16 / 64) / 8 + slack
