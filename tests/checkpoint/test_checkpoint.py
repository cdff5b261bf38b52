"""An open checkpoint, whatever its format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_triton.checkpoint import Checkpoint, export_directory, open_checkpoint, resolve
from astrai_triton.errors import CorruptFileError, TokenizerError, UnknownModelError
from astrai_triton.model import Decoder
from random_models import dense_logits, relative_error

Make = Callable[..., Any]
Write = Callable[..., Path]


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_both_formats_of_a_model_give_equal_tensors(
    pairing: Any, arch: str, make_model: Make, write_gguf: Write, tmp_path: Path
) -> None:
    model = make_model(arch)
    from_gguf = open_checkpoint(write_gguf(arch, model=model), pairing=pairing)
    from_safetensors = open_checkpoint(model.save(tmp_path / "hf"), pairing=pairing)
    assert from_gguf.config.pairing == from_safetensors.config.pairing == pairing
    wanted = dict(from_safetensors.tensors())
    got = dict(from_gguf.tensors())
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name


@pytest.mark.parametrize("pairing", [None, "adjacent", "half"])
def test_both_formats_of_a_model_give_equal_logits(
    pairing: Any, arch: str, make_model: Make, write_gguf: Write, tmp_path: Path
) -> None:
    # Without a pairing every file keeps its own order: adjacent in a llama GGUF, half in safetensors.
    model = make_model(arch)
    paths = (write_gguf(arch, model=model), model.save(tmp_path / "hf"))
    token_ids = torch.randint(0, 40, (24,), generator=torch.Generator().manual_seed(0))
    logits = []
    for path in paths:
        opened = open_checkpoint(path, pairing=pairing)
        decoder = Decoder(opened.config, dtype=torch.float32, device="cpu")
        decoder.load_weights(opened.tensors())
        logits.append(dense_logits(decoder, token_ids))
    assert relative_error(*logits) < 1e-5


def test_no_pairing_leaves_the_order_of_the_file(make_model: Make, write_gguf: Write, tmp_path: Path) -> None:
    model = make_model("llama")
    opened = open_checkpoint(model.save(tmp_path / "hf"), pairing=None)
    assert opened.config.pairing == "half"
    stored = model.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(dict(opened.tensors())["layers.0.attn.q.weight"], stored)
    assert open_checkpoint(write_gguf("llama", model=model), pairing=None).config.pairing == "adjacent"


@pytest.mark.parametrize("arch", ["llama", "phi3"])
@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_progress_ends_at_the_size_of_the_files(
    form: str, arch: str, make_model: Make, write_gguf: Write, tmp_path: Path
) -> None:
    model = make_model(arch)
    path = write_gguf(arch, model=model) if form == "gguf" else model.save(tmp_path / "hf")
    opened = open_checkpoint(path)
    told: list[tuple[str, int, int]] = []
    for _ in opened.tensors(lambda *args: told.append(args)):
        pass
    assert len(told) == opened.num_tensors == len(model.tensors)
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert told[-1] == ("loading weights", opened.num_bytes, opened.num_bytes)


def test_tensors_can_be_read_twice(make_model: Make, tmp_path: Path) -> None:
    opened = open_checkpoint(make_model("llama").save(tmp_path))
    assert [name for name, _ in opened.tensors()] == [name for name, _ in opened.tensors()]


def test_opening_does_not_need_a_tokenizer(make_model: Make, write_gguf: Write, tmp_path: Path) -> None:
    for path in (make_model("llama").save(tmp_path / "hf"), write_gguf()):
        opened = open_checkpoint(path)
        with pytest.raises(TokenizerError):
            _ = opened.tokenizer


def test_the_tokenizer_is_built_once(monkeypatch: pytest.MonkeyPatch, write_gguf: Write) -> None:
    built: list[Any] = []
    monkeypatch.setattr(
        "astrai_triton.checkpoint.gguf.from_gguf", lambda metadata: built.append(metadata) or built
    )
    opened = open_checkpoint(write_gguf())
    assert opened.tokenizer is opened.tokenizer
    assert len(built) == 1


def test_the_name_is_that_of_the_file_or_directory(
    make_model: Make, write_gguf: Write, tmp_path: Path
) -> None:
    assert open_checkpoint(write_gguf()).name == "model"
    assert open_checkpoint(make_model("llama").save(tmp_path / "my-llama")).name == "my-llama"
    assert open_checkpoint(write_gguf(), name="other").name == "other"


def test_a_hub_snapshot_is_named_after_its_repository(make_model: Make, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--some-model" / "snapshots" / "0123abc"
    assert open_checkpoint(make_model("llama").save(snapshot)).name == "org/some-model"


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="no such file or directory"):
        open_checkpoint(tmp_path / "nothing.gguf")


def test_a_file_of_another_kind_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x02pickle")
    with pytest.raises(CorruptFileError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "model.bin")


def test_an_unknown_pairing_is_an_error(write_gguf: Write) -> None:
    with pytest.raises(ValueError, match="pairing: wanted 'adjacent', 'half' or None, got 'interleaved'"):
        open_checkpoint(write_gguf(), pairing="interleaved")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint(resolve("smollm2"))


@pytest.mark.real_model
def test_smollm2_is_what_it_is_known_to_be(smollm2: Checkpoint) -> None:
    config = smollm2.config
    assert (config.arch, config.n_layers, config.hidden_size, config.intermediate_size) == (
        "llama",
        30,
        576,
        1536,
    )
    assert (config.n_q_heads, config.n_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_seq_len, config.norm_eps) == (49152, 8192, 1e-5)
    assert config.layers[0].rope.base == 100000.0
    assert config.tie_embeddings
    assert config.kv_elements_per_token * 4 == 46_080
    assert smollm2.tokenizer.vocab_size == 49152
    assert smollm2.num_tensors == 272


@pytest.mark.real_model
def test_smollm2_has_every_weight_once(smollm2: Checkpoint) -> None:
    tensors = {name: tensor.numel() for name, tensor in smollm2.tensors()}
    assert len(tensors) == 272
    assert sum(tensors.values()) == 134_515_008


@pytest.mark.real_model
def test_smollm2_survives_the_way_through_safetensors(smollm2: Checkpoint, tmp_path: Path) -> None:
    exported = open_checkpoint(export_directory(smollm2, tmp_path / "hf"))
    assert exported.config == smollm2.config
    for (name, tensor), (other_name, other) in zip(
        sorted(smollm2.tensors()), sorted(exported.tensors()), strict=True
    ):
        assert name == other_name
        assert torch.equal(tensor, other), name
