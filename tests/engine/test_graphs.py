"""Captured decode steps, replayed by a stand-in that runs the forward again on the same buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch

from astrai_triton.backend import ATTN_BACKEND, attn_backend
from astrai_triton.cache import Lease, PagePool
from astrai_triton.engine import InferenceEngine, SamplingParams
from astrai_triton.engine import graphs as graphs_module
from astrai_triton.engine.graphs import CudaRecorder, DecodeGraphs, choose_size, padded_sizes
from astrai_triton.errors import PageOwnershipError, UnsupportedCallError
from astrai_triton.kvcache import KVCache
from drive import Replayer, build_engine, drain_events, run_all
from fakes import VOCAB, ScriptedModel
from random_models import random_decoder, small_config

CONTEXT = 40


class SlotModel:
    """Keeps token ids in the pool; the logits of a row are sums over what it reads there.

    Written like a captured forward has to be: no value reaches the host.
    """

    def __init__(self) -> None:
        plain = ScriptedModel(max_seq_len=CONTEXT)
        self.config, self.device, self.dtype = plain.config, plain.device, plain.dtype
        self.seen: list[tuple[torch.Tensor, torch.Tensor, KVCache, torch.Tensor]] = []

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, logits_rows: torch.Tensor
    ) -> torch.Tensor:
        self.seen.append((token_ids, positions, kv_cache, logits_rows))
        keys = kv_cache.k_buffer[0, :, 0, 0]
        slots = kv_cache.out_cache_loc.long()
        # A row without a slot rewrites slot 0 with what is there.
        safe = slots.clamp(min=0)
        keys[safe] = torch.where(slots >= 0, token_ids.float() + 1, keys[safe])
        # The row counts of a captured step never change, so they may come from the host.
        rows = torch.repeat_interleave(kv_cache.req_pool_indices.long(), torch.tensor(kv_cache.q_lens))
        table = kv_cache.req_to_token[rows].long()
        sees = torch.arange(table.shape[1]) <= positions[:, None]
        read = torch.where(sees & (table >= 0), keys[table.clamp(min=0)], 0.0)
        weights = torch.arange(1, table.shape[1] + 1, dtype=torch.float32)
        state = (read * weights).sum(dim=1)[logits_rows].long()
        return torch.nn.functional.one_hot(97 + state % 26, VOCAB).float()


@pytest.fixture
def pool() -> PagePool:
    return PagePool(
        n_layers=1,
        n_q_heads=1,
        n_kv_heads=1,
        head_dim=8,
        max_batch_size=6,
        max_seq_len=CONTEXT,
        max_step_tokens=64,
        page_size=4,
        n_tokens=160,
    )


def take(pool: PagePool, num_tokens: int) -> Lease:
    lease = pool.open([0] * num_tokens)
    assert lease is not None
    pool.extend(lease, num_tokens)
    return lease


def test_sizes_are_powers_of_two_up_to_the_largest_batch() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(2) == (1, 2)
    assert padded_sizes(12) == (1, 2, 4, 8, 12)
    assert padded_sizes(16) == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(("batch", "size"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 12), (12, 12)])
def test_a_batch_runs_as_the_smallest_size_that_holds_it(batch: int, size: int) -> None:
    assert choose_size(padded_sizes(12), batch) == size


@pytest.mark.parametrize("batch", [0, 13])
def test_a_batch_of_no_size_is_refused(batch: int) -> None:
    with pytest.raises(ValueError, match=f"wanted 1 to 12, got {batch}"):
        choose_size(padded_sizes(12), batch)


def test_every_size_is_captured_at_the_start_largest_first_and_touches_no_slot(pool: PagePool) -> None:
    recorder = Replayer()
    pool.storage.k_buffer.fill_(7.0)
    model = SlotModel()
    DecodeGraphs(model, pool, max_batch_size=6, record=recorder)
    assert recorder.sizes == [6, 4, 2, 1]
    assert bool((pool.storage.k_buffer == 7.0).all())
    for (token_ids, positions, cache, rows), size in zip(model.seen, recorder.sizes, strict=True):
        assert token_ids.shape == positions.shape == rows.shape == (size,)
        assert cache.out_cache_loc.tolist() == [-1] * size
        assert cache.seq_lens.tolist() == [0] * size
        assert cache.max_len == CONTEXT


def test_replays_of_any_length_and_batch_read_the_buffers_of_the_capture(pool: PagePool) -> None:
    model = SlotModel()
    recorder = Replayer()
    graphs = DecodeGraphs(model, pool, max_batch_size=6, record=recorder)
    captured = {len(seen[0]): seen for seen in model.seen}
    model.seen.clear()
    leases = [take(pool, CONTEXT) for _ in range(3)]
    for kv_lens in ((1, 1, 1), (CONTEXT, 1, 7), (2, CONTEXT, CONTEXT)):
        graphs.run(leases, kv_lens, torch.tensor([5, 6, 7]))
        token_ids, positions, cache, rows = model.seen[-1]
        first_ids, _, first_cache, first_rows = captured[4]
        assert cache is first_cache
        assert token_ids.data_ptr() == first_ids.data_ptr()
        assert rows.data_ptr() == first_rows.data_ptr()
        assert token_ids[:3].tolist() == [5, 6, 7]
        assert positions.tolist() == [*(kv_len - 1 for kv_len in kv_lens), 0]
        assert cache.seq_lens.tolist() == [*kv_lens, 0]
        assert cache.req_pool_indices[:3].tolist() == [lease.row for lease in leases]
    assert recorder.replayed == [4, 4, 4]
    assert recorder.sizes == [6, 4, 2, 1]


def test_only_the_rows_of_tasks_write_and_come_back(pool: PagePool) -> None:
    model = SlotModel()
    graphs = DecodeGraphs(model, pool, max_batch_size=6, record=Replayer())
    leases = [take(pool, 9) for _ in range(3)]
    before = pool.storage.k_buffer.clone()
    logits = graphs.run(leases, (9, 4, 1), torch.tensor([50, 60, 70]))
    assert logits.shape == (3, VOCAB)
    changed = (pool.storage.k_buffer != before).any(dim=3)[0, :, 0].nonzero().flatten().tolist()
    table = pool.req_to_token.table
    assert sorted(changed) == sorted(
        int(table[lease.row, kv_len - 1]) for lease, kv_len in zip(leases, (9, 4, 1), strict=True)
    )


def test_a_smaller_batch_after_a_larger_one_forgets_its_rows(pool: PagePool) -> None:
    model = SlotModel()
    graphs = DecodeGraphs(model, pool, max_batch_size=6, record=Replayer())
    leases = [take(pool, 9) for _ in range(4)]
    graphs.run(leases, (9, 8, 7, 6), torch.tensor([1, 2, 3, 4]))
    before = pool.storage.k_buffer.clone()
    graphs.run(leases[:3], (9, 8, 7), torch.tensor([1, 2, 3]))
    assert torch.equal(pool.storage.k_buffer, before)
    assert model.seen[-1][2].out_cache_loc[3] == -1


def test_a_step_that_the_pool_refuses_is_refused_before_the_replay(pool: PagePool) -> None:
    recorder = Replayer()
    graphs = DecodeGraphs(SlotModel(), pool, max_batch_size=6, record=recorder)
    lease = take(pool, 4)
    with pytest.raises(ValueError, match="extend the lease first"):
        graphs.run([lease], [9], torch.tensor([1]))
    pool.close(lease)
    with pytest.raises(PageOwnershipError, match="closed"):
        graphs.run([lease], [4], torch.tensor([1]))
    assert recorder.replayed == []


def test_the_forward_is_captured_under_its_backend(pool: PagePool) -> None:
    chosen: list[ATTN_BACKEND | None] = []

    class Watched(SlotModel):
        def __call__(self, *args: torch.Tensor | KVCache) -> torch.Tensor:  # type: ignore[override]
            chosen.append(graphs_module.current_backend())
            return super().__call__(*args)  # type: ignore[arg-type]

    DecodeGraphs(Watched(), pool, max_batch_size=1, record=Replayer())
    assert chosen == [ATTN_BACKEND.TRITON]


# In the engine


def build_replaying(
    monkeypatch: pytest.MonkeyPatch, *, cuda_graphs: bool | None = None, **sizes: int | None
) -> tuple[InferenceEngine, Replayer]:
    """An engine that believes its model can be captured."""
    recorder = Replayer()
    monkeypatch.setattr(graphs_module, "why_no_graphs", lambda device: None)
    monkeypatch.setattr(graphs_module, "CudaRecorder", lambda device: recorder)
    model = SlotModel()
    engine = build_engine(model, max_seq_len=CONTEXT, cuda_graphs=cuda_graphs, **sizes)  # type: ignore[arg-type]
    return engine, recorder


def answers(engine: InferenceEngine, prompts: Sequence[str]) -> list[str]:
    handles = [
        engine.submit(list(prompt.encode()), SamplingParams(temperature=0.0, max_tokens=20 - 3 * i))
        for i, prompt in enumerate(prompts)
    ]
    run_all(engine)
    return ["".join(event.text for event in drain_events(handle)) for handle in handles]


PROMPTS = ("a", "bcd", "efghijkl", "mn", "o")


@pytest.mark.parametrize("sizes", [{}, {"n_tokens": None}, {"n_tokens": 48}])
def test_the_engine_answers_the_same_with_graphs_and_captures_nothing_in_service(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int | None]
) -> None:
    plain = build_engine(SlotModel(), max_seq_len=CONTEXT, cuda_graphs=False, **sizes)  # type: ignore[arg-type]
    expected = answers(plain, PROMPTS)
    engine, recorder = build_replaying(monkeypatch, **sizes)
    assert engine.graph_sizes == (1, 2, 4, 8)
    assert answers(engine, PROMPTS) == expected
    assert recorder.sizes == [8, 4, 2, 1]
    assert len(recorder.replayed) >= 10
    assert plain.graph_sizes == ()


def test_a_task_of_another_backend_runs_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = build_replaying(monkeypatch)
    with attn_backend("torch_native"):
        answers(engine, PROMPTS)
    assert recorder.replayed == []
    with attn_backend("triton"):
        answers(engine, PROMPTS)
    assert recorder.replayed


def test_graphs_are_off_where_nobody_asks_and_refused_where_asked_for_in_vain() -> None:
    assert build_engine().graph_sizes == ()
    with pytest.raises(
        ValueError, match="cuda_graphs: wanted None or False here, got True; graphs need a CUDA"
    ):
        build_engine(cuda_graphs=True)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [("torch_native", "and torch_native was chosen"), ("triton", "not today"), (None, "not today")],
)
def test_graphs_want_the_triton_backend(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, reason: str
) -> None:
    monkeypatch.delenv("ASTR_BACKEND", raising=False)
    monkeypatch.setattr(graphs_module, "is_interpreted", lambda: False)
    monkeypatch.setattr(graphs_module, "backend_reasons", lambda: {"triton": "not today"})
    if chosen is not None:
        monkeypatch.setenv("ASTR_BACKEND", chosen)
    why = graphs_module.why_no_graphs(torch.device("cuda"))
    assert why is not None
    assert reason in why


def test_the_interpreter_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASTR_BACKEND", raising=False)
    monkeypatch.setattr(graphs_module, "is_interpreted", lambda: True)
    assert "TRITON_INTERPRET" in str(graphs_module.why_no_graphs(torch.device("cuda")))


def test_a_model_that_the_backend_cannot_run_is_served_without_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(device: torch.device) -> Replayer:
        raise UnsupportedCallError("triton", "head_dim 12")

    monkeypatch.setattr(graphs_module, "why_no_graphs", lambda device: None)
    monkeypatch.setattr(graphs_module, "CudaRecorder", refuse)
    assert build_engine().graph_sizes == ()
    with pytest.raises(ValueError, match="head_dim 12"):
        build_engine(cuda_graphs=True)


# What records them on a GPU


class FakeCuda:
    """The parts of ``torch.cuda`` a recorder uses; notes what happens in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.pools: list[object] = []
        current, side = FakeStream(self.log, "current"), FakeStream(self.log, "side")
        for name, fake in {
            "device": lambda device: self.within(str(device)),
            "Stream": lambda: side,
            "stream": lambda stream: self.within(stream.name),
            "current_stream": lambda: current,
            "graph_pool_handle": object,
            "CUDAGraph": lambda: self,
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        self.log.append(f"+{name}")
        yield
        self.log.append(f"-{name}")

    def graph(
        self, graph: object, *, pool: object, stream: FakeStream, capture_error_mode: str
    ) -> contextlib.AbstractContextManager[None]:
        assert graph is self
        assert capture_error_mode == "thread_local"
        self.pools.append(pool)
        return self.within(f"capture on {stream.name}")

    def replay(self) -> None:
        self.log.append("replay")


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_a_forward_is_warmed_up_beside_the_current_stream_and_captured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda:1"))
    cuda.log.clear()
    logits = torch.zeros(2, 3)

    def forward() -> torch.Tensor:
        cuda.log.append("forward")
        return logits

    captured = recorder(forward)
    assert cuda.log == [
        "+cuda:1",
        "side waits for current",
        *("+side", "forward", "forward", "-side"),
        "current waits for side",
        *("+capture on side", "forward", "-capture on side"),
        "-cuda:1",
    ]
    assert captured.logits is logits
    captured.replay()
    assert cuda.log[-1] == "replay"
    recorder(forward)
    assert cuda.pools[0] is cuda.pools[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_on_a_gpu_captured_steps_answer_like_eager_ones_at_any_length() -> None:
    def build(cuda_graphs: bool) -> InferenceEngine:
        model = random_decoder(small_config(vocab_size=VOCAB, head_dim=16, max_seq_len=1024), seed=3)
        sizes = {"max_batch_size": 5, "max_seq_len": 1024, "n_tokens": 4096}
        return build_engine(model.to("cuda"), cuda_graphs=cuda_graphs, **sizes)

    plain, captured = build(False), build(True)
    assert captured.graph_sizes == (1, 2, 4, 5)
    generator = torch.Generator().manual_seed(0)
    for prompt_lens in ((1,), (3, 700), (256, 255, 2), (1, 2, 3, 4, 600)):
        prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in prompt_lens]
        texts = []
        for engine in (plain, captured):
            handles = [
                engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
                for prompt in prompts
            ]
            run_all(engine)
            texts.append([[event.token_id for event in drain_events(handle)] for handle in handles])
        assert texts[0] == texts[1]
