"""The kernels against the Decoder they stand for, on every instruction set of this machine."""

from __future__ import annotations

import functools

import attrs
import pytest
import torch

from astrai_triton.backend import ATTN_BACKEND, attn_backend
from astrai_triton.cpu import CpuDecoder, why_not
from astrai_triton.cpu.isa import list_isas
from astrai_triton.errors import BackendError, UnsupportedCallError
from astrai_triton.model import Decoder, LayerConfig
from cpu_kernels import ALL_ISAS, needs_kernels
from random_models import ROPE, VARIANTS, random_decoder, relative_error, small_config

pytestmark = needs_kernels

SHAPES = {
    "tiny": {},
    "heads of 32 in groups of 3": {"head_dim": 32, "n_q_heads": 6, "hidden_size": 72, "vocab_size": 77},
    "heads of 64, one key head": {"head_dim": 64, "n_q_heads": 5, "n_kv_heads": 1, "intermediate_size": 100},
    "heads of 80": {"head_dim": 80, "n_q_heads": 2, "n_kv_heads": 2},
}
SEQUENCES = [[(7 * i + j) % 50 for j in range(length)] for i, length in enumerate((25, 4, 8, 22))]
CHUNKS = (9, 8, 1, 5, 1, 1)
"""Prefill and decode, alone and mixed, as sequences end at different steps."""


def run_chunks(session):
    """Logits of every row of the sequences, chunk by chunk."""
    logits = []
    for chunk in CHUNKS:
        left = {i: len(tokens) - session.done[i] for i, tokens in enumerate(session.sequences)}
        logits.append(session.step({i: min(chunk, count) for i, count in left.items() if count}))
    assert session.done == [len(tokens) for tokens in session.sequences]
    return torch.cat(logits)


def widened(decoder):
    """The same weights, bit by bit, in a float32 decoder."""
    wide = Decoder(decoder.config, dtype=torch.float32, device="cpu")
    wide.load_state_dict({name: value.float() for name, value in decoder.state_dict().items()})
    wide.embed_scale = decoder.embed_scale
    return wide


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_float32_logits_are_those_of_the_decoder(isa, variant, shape, open_session):
    pairing = "adjacent" if len(variant) % 2 else "half"
    decoder = random_decoder(small_config(**{**VARIANTS[variant], **SHAPES[shape]}, pairing=pairing))
    got = run_chunks(open_session(CpuDecoder(decoder, isa=isa), SEQUENCES))
    # Only the order of float32 sums differs.
    assert relative_error(got, run_chunks(open_session(decoder, SEQUENCES))) < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_bfloat16_logits_are_as_near_to_float32_as_those_of_the_decoder(isa, variant, shape, open_session):
    config = small_config(**{**VARIANTS[variant], **SHAPES[shape]})
    decoder = random_decoder(config, dtype=torch.bfloat16)
    exact = run_chunks(open_session(widened(decoder), SEQUENCES))
    torch_error = (run_chunks(open_session(decoder, SEQUENCES)) - exact).pow(2).mean().sqrt()
    error = (run_chunks(open_session(CpuDecoder(decoder, isa=isa), SEQUENCES)) - exact).pow(2).mean().sqrt()
    # Activations are rounded less often; the quarter is the noise of which way single roundings go.
    assert error < 1.25 * torch_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_long_contexts_windows_and_sinks_over_many_splits(isa, dtype, open_session):
    layers = (LayerConfig(rope=ROPE, window=150), LayerConfig(rope=ROPE))
    config = small_config(layers=layers, sinks=True, head_dim=32, attn_softcap=4.0, max_seq_len=512)
    decoder = random_decoder(config, dtype=dtype)
    sequences = [[(3 * j) % 50 for j in range(420)], [(5 * j) % 50 for j in range(131)]]
    got, exact, reference = (
        torch.cat([session.step(counts)[-2:] for counts in ({0: 300, 1: 129}, {0: 119, 1: 1}, {0: 1, 1: 1})])
        for session in (
            open_session(model, sequences)
            for model in (CpuDecoder(decoder, isa=isa), widened(decoder), decoder)
        )
    )
    if dtype == torch.float32:
        assert relative_error(got, exact) < 1e-5
    else:
        assert relative_error(got, exact) < 1.5 * relative_error(reference, exact)


@functools.cache
def decoder_of(dtype, head_dim=32):
    config = small_config(
        head_dim=head_dim, n_q_heads=6, hidden_size=96, intermediate_size=160, max_seq_len=512
    )
    return random_decoder(config, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_a_decoding_row_has_the_same_bits_in_any_company(isa, dtype, open_session):
    model = CpuDecoder(decoder_of(dtype), isa=isa)
    sequences = [[(11 * i + 3 * j) % 50 for j in range(5 + 7 * (i % 30))] for i in range(64)]

    def decode(members, extra=()):
        """The last logits of each member, decoded together, with further rows of other requests before."""
        session = open_session(model, sequences)
        for i, tokens in enumerate(sequences):
            session.step({i: len(tokens) - (4 if i in extra else 1)}, [0])
        rows = list(range(4 * len(extra), 4 * len(extra) + len(members)))
        return session.step({**dict.fromkeys(extra, 4), **dict.fromkeys(members, 1)}, rows)

    everyone = decode(range(64))
    for members in ([0], [29], [3, 63], range(7), range(16), range(17), range(5, 38)):
        assert torch.equal(decode(members), everyone[list(members)])
    assert torch.equal(decode(range(3, 20), extra=(0, 40)), everyone[3:20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(dtype, open_session):
    models = [CpuDecoder(decoder_of(dtype), threads=threads) for threads in (1, 2, 3)]
    sequences = [[(3 * j) % 50 for j in range(300)], [1, 2, 3], [4] * 140]
    counts = ({0: 100, 1: 2, 2: 139}, {0: 199, 1: 1, 2: 1}, {0: 1})
    one, *others = (
        [session.step(c) for c in counts] for session in (open_session(m, sequences) for m in models)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_a_slot_is_not_written_and_masked_keys_are_not_seen(dtype, open_session):
    decoder = decoder_of(dtype)
    logits = []
    for model in (CpuDecoder(decoder), decoder):
        session = open_session(model, [list(range(12))])
        session.step({0: 8})
        ids, positions, cache = session.bind({0: 4})
        slots = cache.req_to_token[cache.req_pool_indices[0]]
        unwritten = int(slots[9])
        cache.out_cache_loc[1] = -1
        slots[[2, 9]] = -1
        logits.append(model(ids, positions, cache, torch.tensor([3])))
        assert session.pool.storage.k_buffer[:, unwritten].isnan().all()
        slots[:] = -1
        cache.out_cache_loc[:] = -1
        # Another object: plans are kept for the one they were made of.
        logits.append(model(ids, positions, attrs.evolve(cache), torch.tensor([3])))
    assert torch.isfinite(torch.cat(logits)).all()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert relative_error(logits[0], logits[2]) < tolerance
    assert relative_error(logits[1], logits[3]) < tolerance


def test_padding_rows_without_keys_disturb_nobody(open_session):
    model = CpuDecoder(decoder_of(torch.bfloat16))
    session = open_session(model, [[5, 6, 7], [8, 9]])
    session.step({0: 2, 1: 1})
    ids, positions, cache = session.bind({0: 1, 1: 1})
    wanted = model(ids, positions, cache)
    cache.seq_lens[1] = 0
    cache.out_cache_loc[1] = -1
    got = model(ids, positions, cache)
    assert torch.isfinite(got).all()
    assert torch.equal(got[0], wanted[0])


def test_only_the_slots_of_the_step_are_written(open_session):
    session = open_session(CpuDecoder(decoder_of(torch.float32)), [[1, 2, 3, 4, 5, 6]])
    _, _, cache = session.bind({0: 5})
    session.step({0: 5})
    written = torch.zeros(session.pool.storage.size, dtype=torch.bool)
    written[cache.out_cache_loc.long()] = True
    for buffer in (session.pool.storage.k_buffer, session.pool.storage.v_buffer):
        assert torch.isfinite(buffer[:, written]).all()
        assert buffer[:, ~written].isnan().all()


def test_no_logits_and_some_logits(open_session):
    session = open_session(CpuDecoder(decoder_of(torch.float32)), [[1, 2, 3, 4], [5]])
    ids, positions, cache = session.bind({0: 4, 1: 1})
    every = session.model(ids, positions, cache)
    assert session.model(ids, positions, cache, torch.tensor([], dtype=torch.int64)).shape == (0, 50)
    assert torch.equal(session.model(ids, positions, cache, torch.tensor([4, 0, 4])), every[[4, 0, 4]])


def test_a_decoder_whose_weights_were_released_holds_none(open_session):
    config = small_config()
    kept, released = random_decoder(config), random_decoder(config)
    models = CpuDecoder(kept), CpuDecoder(released, release=True)
    assert sum(parameter.numel() for parameter in released.parameters()) == 0
    first, second = (run_chunks(open_session(model, SEQUENCES)) for model in models)
    assert torch.equal(first, second)


def test_phases_are_timed_where_somebody_asks(open_session):
    session = open_session(CpuDecoder(decoder_of(torch.float32)), [[1, 2, 3]])
    session.model.phase_seconds = [0.0] * 9
    session.step({0: 3})
    assert all(seconds > 0.0 for seconds in session.model.phase_seconds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a["ids"].fill_(50), "token_ids: wanted 0 to 49, got 50 in row 0"),
        (lambda a: a["ids"].fill_(-1), "token_ids: wanted 0 to 49, got -1"),
        (lambda a: a["positions"].fill_(512), "positions: wanted 0 to 511, got 512"),
        (lambda a: a["positions"].fill_(-1), "positions: wanted 0 to 511, got -1"),
        (lambda a: a["rows"].fill_(3), "logits_rows: wanted 0 to 2, got 3"),
        (lambda a: a["cache"].out_cache_loc.fill_(12), "out_cache_loc: wanted below 12 slots, got 12"),
        (lambda a: a["cache"].req_to_token.fill_(12), "req_to_token: wanted below 12 slots, got 12"),
        (lambda a: a["cache"].req_pool_indices.fill_(1), "req_pool_indices: wanted 0 to 0, got 1"),
        (lambda a: a["cache"].seq_lens.fill_(2), "seq_lens: wanted 3 .* got 2"),
        (lambda a: a["cache"].seq_lens.fill_(4), "seq_lens: wanted 3 .* to 3, .* got 4"),
        (lambda a: a["cache"].qo_indptr.fill_(1), "qo_indptr: wanted 0 to 3 rows, got 1 to 1"),
        (lambda a: a.update(ids=a["ids"].int()), "token_ids: wanted .*int64"),
        (lambda a: a.update(positions=a["positions"][:2]), r"positions: wanted \[3\]"),
        (lambda a: a.update(ids=torch.zeros(6, dtype=torch.int64)[::2]), "token_ids: .* contiguous"),
        (
            lambda a: a.update(cache=attrs.evolve(a["cache"], k_buffer=a["cache"].k_buffer.bfloat16())),
            "k_buffer: wanted .*float32",
        ),
        (
            lambda a: a.update(cache=attrs.evolve(a["cache"], v_buffer=a["cache"].v_buffer[:, ::2])),
            "v_buffer: wanted",
        ),
        (
            lambda a: a.update(cache=attrs.evolve(a["cache"], req_to_token=a["cache"].req_to_token.long())),
            "req_to_token: wanted .*int32",
        ),
    ],
)
def test_a_step_that_does_not_fit_is_refused_before_anything_is_written(change, message, open_session):
    session = open_session(CpuDecoder(decoder_of(torch.float32)), [[1, 2, 3]])
    ids, positions, cache = session.bind({0: 3})
    call = {"ids": ids, "positions": positions, "cache": cache, "rows": torch.tensor([2])}
    change(call)
    with pytest.raises(ValueError, match=message):
        session.model(call["ids"], call["positions"], call["cache"], call["rows"])
    assert session.pool.storage.k_buffer.isnan().all()


def test_an_attention_backend_that_was_chosen_is_not_ignored(open_session):
    session = open_session(CpuDecoder(decoder_of(torch.float32)), [[1, 2, 3]])
    with (
        attn_backend(ATTN_BACKEND.TORCH_NATIVE),
        pytest.raises(UnsupportedCallError, match="attention of their own"),
    ):
        session.step({0: 3})


def test_what_is_not_covered_is_named():
    assert "float16" in why_not(random_decoder(small_config(), dtype=torch.float16))
    assert "512" in why_not(random_decoder(small_config(head_dim=520)))
    assert "96" in why_not(random_decoder(small_config(n_q_heads=97, n_kv_heads=1)))
    assert why_not(random_decoder(small_config(), dtype=torch.bfloat16)) is None
    with pytest.raises(BackendError, match=r"float16.*use the Decoder"):
        CpuDecoder(random_decoder(small_config(), dtype=torch.float16))
    with pytest.raises(ValueError, match="quantize: wanted none"):
        why_not(random_decoder(small_config()), quantize="int3")
    with pytest.raises(ValueError, match="threads: wanted >= 1, got 0"):
        CpuDecoder(random_decoder(small_config()), threads=0)


def test_each_instruction_set_needs_those_below_it():
    assert list_isas(frozenset()) == ["plain"]
    assert list_isas(frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})) == ["plain"]
    assert list_isas(frozenset({"avx2", "fma", "f16c"})) == ["avx2", "plain"]
