from __future__ import annotations

import pytest
import torch

from astrai_triton.cache import PagePool
from astrai_triton.errors import WeightsMismatchError
from astrai_triton.model import Decoder, LayerConfig, RopeConfig, choose_dtype, permute_pairing
from random_models import (
    VARIANTS,
    dense_logits,
    random_decoder,
    random_weights,
    relative_error,
    small_config,
)

PROMPTS = [list(range(3, 25)), [7], [11, 3, 40, 2, 9], list(range(30, 49))]
"""Longer than every window, one token, shorter and longer than a page."""


def token_tensor(tokens):
    return torch.tensor(tokens, dtype=torch.int64)


def make_pool(config, dtype=torch.float32, **changes):
    sizes = {"max_batch_size": 4, "max_seq_len": 64, "max_step_tokens": 256, "page_size": 4, "n_tokens": 128}
    return PagePool(
        n_layers=config.n_layers,
        n_q_heads=config.n_q_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        **{**sizes, **changes},
    )


def run_step(decoder, pool, leases, sequences, starts, ends, rows=None):
    """One packed forward over ``sequences[i][starts[i]:ends[i]]``."""
    for lease, end in zip(leases, ends, strict=True):
        pool.extend(lease, end)
    spans = list(zip(sequences, starts, ends, strict=True))
    kv_cache = pool.bind_tasks(leases, [end - start for _, start, end in spans], ends)
    token_ids = token_tensor([token for tokens, start, end in spans for token in tokens[start:end]])
    positions = token_tensor([position for _, start, end in spans for position in range(start, end)])
    return decoder(token_ids, positions, kv_cache, rows)


@pytest.mark.parametrize("name", VARIANTS)
def test_chunked_prefill_and_decode_through_the_cache_equal_the_dense_forward(name):
    config = small_config(**VARIANTS[name])
    decoder = random_decoder(config)
    pool = make_pool(config)
    sequences = [[*prompt, 5, 6, 7] for prompt in PROMPTS]
    leases = [pool.open(prompt) for prompt in PROMPTS]
    wanted = [dense_logits(decoder, token_tensor(tokens)) for tokens in sequences]
    done = [0] * len(sequences)
    for chunk in (9, 8, 1, 5, 1, 1):
        ends = [min(start + chunk, len(tokens)) for start, tokens in zip(done, sequences, strict=True)]
        active = [idx for idx, end in enumerate(ends) if end > done[idx]]
        columns = [[values[idx] for idx in active] for values in (leases, sequences, done, ends)]
        logits = run_step(decoder, pool, *columns)
        expected = torch.cat([wanted[idx][done[idx] : ends[idx]] for idx in active])
        # Only the order of float32 sums differs.
        assert relative_error(logits, expected) < 1e-5
        done = ends
    assert done == [len(tokens) for tokens in sequences]


@pytest.mark.parametrize("name", ["plain", "gemma"])
def test_a_cached_prefix_gives_the_same_logits(name):
    config = small_config(**VARIANTS[name])
    decoder, prompt = random_decoder(config), PROMPTS[0]
    pool = make_pool(config)
    lease = pool.open(prompt)
    cold = run_step(decoder, pool, [lease], [prompt], [0], [len(prompt)])
    pool.record(lease, prompt)
    pool.close(lease)
    lease = pool.open(prompt)
    warm = run_step(decoder, pool, [lease], [prompt], [lease.cached_len], [len(prompt)])
    assert lease.cached_len == 20
    assert relative_error(warm, cold[lease.cached_len :]) < 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_both_pairings_give_equal_logits(name):
    config, other = (small_config(**VARIANTS[name], pairing=pairing) for pairing in ("half", "adjacent"))
    heads = {"attn.q": config.n_q_heads, "attn.k": config.n_kv_heads, "attn.q_norm": 1, "attn.k_norm": 1}

    def permute(weights):
        for tensor_name, tensor in weights.items():
            n_heads = heads.get(tensor_name.rpartition(".")[0].partition(".")[2].partition(".")[2])
            if n_heads is not None:
                rotary_dim = config.layers[0].rope.rotary_dim
                weights[tensor_name] = permute_pairing(
                    tensor, n_heads, config.head_dim, rotary_dim, "half", "adjacent"
                )

    token_ids = token_tensor(PROMPTS[0])
    adjacent = dense_logits(random_decoder(other, change=permute), token_ids)
    assert relative_error(adjacent, dense_logits(random_decoder(config), token_ids)) < 1e-5


def test_logits_rows_selects_rows():
    decoder = random_decoder(small_config())
    pool = make_pool(decoder.config)
    lease, prompt = pool.open(PROMPTS[0]), PROMPTS[0]
    every = run_step(decoder, pool, [lease], [prompt], [0], [22])
    rows = token_tensor([21, 0])
    some = run_step(decoder, pool, [lease], [prompt], [0], [22], rows)
    torch.testing.assert_close(some, every[rows])


def test_no_logits_rows_give_no_logits():
    decoder = random_decoder(small_config())
    pool = make_pool(decoder.config)
    lease = pool.open(PROMPTS[0])
    assert run_step(decoder, pool, [lease], [PROMPTS[0]], [0], [5], token_tensor([])).shape == (0, 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_contiguous_float32_without_gradient(dtype):
    decoder = random_decoder(small_config(), dtype=dtype)
    logits = decoder(torch.ones(2, 3, dtype=torch.int64), torch.arange(3).expand(2, 3))
    assert logits.shape == (2, 3, 50)
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert not logits.requires_grad


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_stays_close_to_float32(name):
    config = small_config(**VARIANTS[name])
    token_ids = token_tensor(PROMPTS[0])
    exact = dense_logits(random_decoder(config), token_ids)
    rounded = dense_logits(random_decoder(config, dtype=torch.bfloat16), token_ids)
    # Some ten roundings of 2^-9 in a row; a wrong layer is off by about 1.
    assert relative_error(rounded, exact) < 0.05


def test_a_bfloat16_row_has_the_same_bits_alone_and_in_a_batch():
    if not torch.cpu.get_capabilities().get("amx_bf16", False):
        pytest.skip("needs a CPU with AMX, where one-row and many-row products are known to agree")
    config = small_config(hidden_size=64, intermediate_size=96, head_dim=32, n_q_heads=4)
    decoder = random_decoder(config, dtype=torch.bfloat16)
    pool = make_pool(config, torch.bfloat16)
    leases = [pool.open(prompt) for prompt in PROMPTS]
    ends = [len(prompt) for prompt in PROMPTS]
    for lease, prompt, end in zip(leases, PROMPTS, ends, strict=True):
        run_step(decoder, pool, [lease], [prompt], [0], [end])
    starts = [end - 1 for end in ends]
    together = run_step(decoder, pool, leases, PROMPTS, starts, ends)
    for row, (lease, prompt, end) in enumerate(zip(leases, PROMPTS, ends, strict=True)):
        alone = run_step(decoder, pool, [lease], [prompt], [end - 1], [end])
        assert torch.equal(alone[0], together[row])


def test_a_sink_takes_weight_from_every_key():
    config = small_config(**VARIANTS["sinks"])

    def with_sinks(value):
        def change(weights):
            for name in weights:
                if name.endswith("sinks"):
                    weights[name] = torch.full_like(weights[name], value)

        return change

    def without_attention(weights):
        for name in weights:
            if ".attn.o." in name:
                weights[name] = torch.zeros_like(weights[name])

    token_ids = token_tensor(PROMPTS[0])
    without_sinks = random_decoder(
        small_config(layers=config.layers),
        change=lambda weights: weights.update(
            {name: tensor for name, tensor in random_weights(config).items() if not name.endswith("sinks")}
        ),
    )
    empty_sinks = random_decoder(config, change=with_sinks(-100.0))
    full_sinks = random_decoder(config, change=with_sinks(100.0))
    deaf = random_decoder(config, change=without_attention)
    torch.testing.assert_close(dense_logits(empty_sinks, token_ids), dense_logits(without_sinks, token_ids))
    torch.testing.assert_close(dense_logits(full_sinks, token_ids), dense_logits(deaf, token_ids))


def test_the_embedding_scale_is_rounded_to_the_dtype_of_the_model():
    config = small_config(embed_scale=24**0.5)
    assert random_decoder(config, dtype=torch.bfloat16).embed_scale == float(torch.tensor(24**0.5).bfloat16())
    assert random_decoder(config).embed_scale == pytest.approx(24**0.5, rel=1e-7)


def test_layers_of_one_rope_share_one_table():
    assert len(random_decoder(small_config()).rotary) == 1
    assert len(random_decoder(small_config(**VARIANTS["gemma"])).rotary) == 2


def test_tied_embeddings_share_one_tensor():
    decoder = random_decoder(small_config(tie_embeddings=True))
    assert decoder.lm_head is decoder.embed


def test_casting_the_decoder_leaves_the_rope_table_in_float32():
    decoder = random_decoder(small_config()).to(torch.bfloat16)
    assert decoder.dtype == torch.bfloat16
    assert decoder.rotary[0].freqs_cis.dtype == torch.float32


def test_a_decoder_limited_to_fewer_positions_refuses_the_next():
    decoder = Decoder(small_config(), dtype=torch.float32, device="cpu", max_seq_len=4)
    decoder.load_weights(random_weights(small_config()).items())
    assert decoder(torch.ones(1, 4, dtype=torch.int64), torch.arange(4)[None]).shape == (1, 4, 50)
    with pytest.raises(ValueError, match="max_seq_len"):
        decoder(torch.ones(1, 5, dtype=torch.int64), torch.arange(5)[None])


@pytest.mark.parametrize(
    ("token_shape", "position_shape"),
    [((4,), (4,)), ((1, 4), (4,)), ((1, 4), (1, 3)), ((1, 1, 4), (1, 1, 4))],
)
def test_rows_that_are_not_a_batch_are_refused_without_a_cache(token_shape, position_shape):
    decoder = random_decoder(small_config())
    with pytest.raises(ValueError, match=r"token_ids, positions: wanted the same shape \[B, L\]"):
        decoder(torch.ones(token_shape, dtype=torch.int64), torch.zeros(position_shape, dtype=torch.int64))


def test_logits_rows_are_refused_without_a_cache():
    decoder = random_decoder(small_config())
    with pytest.raises(ValueError, match="logits_rows"):
        decoder(torch.ones(1, 4, dtype=torch.int64), torch.arange(4)[None], None, token_tensor([3]))


def test_a_batch_is_refused_with_a_cache():
    decoder = random_decoder(small_config())
    pool = make_pool(decoder.config)
    lease = pool.open([1, 2])
    pool.extend(lease, 2)
    kv_cache = pool.bind_tasks([lease], [2], [2])
    with pytest.raises(ValueError, match=r"wanted the same shape \[T\]"):
        decoder(torch.ones(1, 2, dtype=torch.int64), torch.arange(2)[None], kv_cache)


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_are_cast_to_the_dtype_of_the_model_and_norms_to_float32(name):
    config = small_config(**VARIANTS[name])
    weights = {key: tensor.double() for key, tensor in random_weights(config).items()}
    decoder = Decoder(config, dtype=torch.bfloat16, device="cpu")
    decoder.load_weights(weights.items())
    for key, slot in decoder.slots().items():
        exact = "norm." in key or key.endswith("sinks")
        assert slot.view.dtype == (torch.float32 if exact else torch.bfloat16)
        assert torch.equal(slot.view, weights[key].to(slot.view.dtype).expand_as(slot.view))


def test_loading_reads_one_tensor_at_a_time_and_reports_each():
    config = small_config()
    weights = random_weights(config)
    reports = []

    def stream():
        for number, item in enumerate(weights.items()):
            assert len(reports) == number
            yield item

    Decoder(config, dtype=torch.float32, device="cpu").load_weights(
        stream(), progress=lambda done, total: reports.append((done, total))
    )
    assert reports == [(done, len(weights)) for done in range(1, len(weights) + 1)]


def load_error(weights, config=None):
    decoder = Decoder(config or small_config(), dtype=torch.float32, device="cpu")
    with pytest.raises(WeightsMismatchError) as caught:
        decoder.load_weights(weights)
    return str(caught.value)


def test_missing_tensors_are_counted_and_the_first_are_named():
    weights = random_weights(small_config())
    kept = [item for item in weights.items() if not item[0].startswith("layers.1.")]
    text = load_error(kept)
    assert "9 missing: layers.1.attn_norm.weight, layers.1.mlp_norm.weight" in text
    assert ", ..." in text
    assert "layers.1.mlp.down.weight" not in text


def test_surplus_tensors_are_named():
    weights = {**random_weights(small_config()), "layers.2.attn.q.weight": torch.zeros(1)}
    assert "1 surplus: layers.2.attn.q.weight" in load_error(weights.items())


def test_a_head_of_a_tied_model_is_surplus():
    config = small_config(tie_embeddings=True)
    weights = {**random_weights(config), "lm_head.weight": torch.zeros(50, 24)}
    assert "1 surplus: lm_head.weight" in load_error(weights.items(), config)


def test_a_tensor_given_twice_is_surplus():
    weights = random_weights(small_config())
    doubled = [*weights.items(), ("norm.weight", weights["norm.weight"])]
    assert "1 surplus: norm.weight (given twice)" in load_error(doubled)


@pytest.mark.parametrize(
    ("name", "wanted", "got"),
    [
        ("layers.0.attn.q.weight", [32, 24], [16, 24]),
        ("layers.1.mlp.down.weight", [24, 40], [40, 24]),
        ("norm.weight", [24], [1]),
        ("norm.weight", [24], [1, 24]),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(name, wanted, got):
    weights = {**random_weights(small_config()), name: torch.zeros(got)}
    text = load_error(weights.items())
    assert f"1 misshapen: {name} (wanted {wanted}, got {got})" in text
    assert "missing" not in text


def test_all_faults_are_told_at_once():
    weights = random_weights(small_config())
    del weights["norm.weight"]
    weights["embed.weight"] = torch.zeros(3)
    weights["rotary.inv_freq"] = torch.zeros(3)
    text = load_error(weights.items())
    assert all(kind in text for kind in ("1 missing", "1 surplus", "1 misshapen"))


@pytest.mark.parametrize(("amx", "wanted"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_computes_in_bfloat16_only_with_amx(monkeypatch, amx, wanted):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "amx_bf16": amx})
    assert choose_dtype("cpu") == wanted


@pytest.mark.parametrize(("native", "wanted"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_computes_in_bfloat16_where_that_is_native(monkeypatch, native, wanted):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation
    )
    assert choose_dtype(torch.device("cuda", 0)) == wanted


def test_an_unmeasured_device_computes_in_float32():
    assert choose_dtype("mps") == torch.float32


def test_windows_differ_by_layer():
    rope = RopeConfig(rotary_dim=8)
    near, far = (
        small_config(layers=(LayerConfig(rope=rope, window=window), LayerConfig(rope=rope)))
        for window in (2, -1)
    )
    token_ids = token_tensor(PROMPTS[0])
    windowed, whole = (dense_logits(random_decoder(config), token_ids) for config in (near, far))
    torch.testing.assert_close(windowed[:2], whole[:2])
    assert relative_error(windowed[2:], whole[2:]) > 1e-2
