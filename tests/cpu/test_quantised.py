"""Quantised weights: near to the model, on every instruction set, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from astrai_triton.cpu import ISAS, CpuDecoder, why_not_build
from random_models import VARIANTS, random_decoder, small_config

pytestmark = pytest.mark.skipif(why_not_build() is not None, reason=str(why_not_build()))

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 90}
SEQUENCES = [[(7 * i + j) % 50 for j in range(length)] for i, length in enumerate((40, 3, 11))]


def available(isa):
    reason = why_not_build(isa)
    return pytest.param(isa, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))


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
# sigma in weights and activations alike, 20 times that with 4 bits; some ten products in a row add up like a
# random walk, and these models amplify: their weights are 1.5 times what would keep a row's size.
@pytest.mark.parametrize(("quantize", "bound"), [("int8", 0.08), ("int4", 0.6)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_stay_near_those_of_the_model(dtype, variant, quantize, bound, open_session):
    decoder = random_decoder(small_config(**{**VARIANTS[variant], **WIDE}), dtype=dtype)
    wanted = run(open_session(decoder, SEQUENCES))
    error = rms_error(run(open_session(CpuDecoder(decoder, quantize=quantize), SEQUENCES)), wanted)
    assert error < bound


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("isa", [available(isa) for isa in ISAS])
def test_instruction_sets_agree(isa, quantize, open_session):
    decoder = random_decoder(small_config(**WIDE))
    plain, got = (
        run(open_session(CpuDecoder(decoder, quantize=quantize, isa=name), SEQUENCES))
        for name in ("plain", isa)
    )
    # Integer products are exact; an activation on the edge between two integers may still go either way.
    assert rms_error(got, plain) < 0.01


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("isa", [available(isa) for isa in ISAS])
def test_a_decoding_row_has_the_same_bits_in_any_company(isa, quantize, open_session):
    model = CpuDecoder(random_decoder(small_config(**WIDE)), quantize=quantize, isa=isa)
    sequences = [[(11 * i + 3 * j) % 50 for j in range(2 + i)] for i in range(40)]

    def decode(members):
        session = open_session(model, sequences)
        for i, tokens in enumerate(sequences):
            session.step({i: len(tokens) - 1}, [0])
        return session.step(dict.fromkeys(members, 1))

    everyone = decode(range(40))
    for members in ([0], [39], range(16), range(3, 20)):
        assert torch.equal(decode(members), everyone[list(members)])


def test_quantised_weights_take_the_memory_they_should():
    decoder = random_decoder(small_config(hidden_size=512, intermediate_size=1024, vocab_size=2048))
    plain, int8, int4 = (CpuDecoder(decoder, quantize=name).num_bytes for name in ("none", "int8", "int4"))
    # Huge pages are taken whole.
    slack = 4 << 20
    assert int8 < plain * (8 + 16 / 64) / 32 + slack
    assert int4 < plain * (4 + 16 / 64) / 32 + slack
