from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch

from astrai_triton.errors import TokenizerError
from astrai_triton.tokenizer import from_gguf

PEERS = Path(__file__).parents[2] / "bench" / "peers"

LETTERS = ["Ġ", *"abcdehlort!0123456789", "Ċ"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ t", "Ġt h", "Ġth e"]
TEXTS = ["hello the 2024!", "  the\nhello ", "the<|end|>hello", "", "<|end|>"]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))


def make_metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<|end|>", *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 1)],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    return metadata | changes


def test_the_written_tokenizer_gives_our_ids(tmp_path: Path) -> None:
    import tokenizer_file

    ours = from_gguf(make_metadata())
    tokenizer_file.write_tokenizer(make_metadata(), tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == ours.encode(text, allow_special=True)
        assert theirs.decode(ids, skip_special_tokens=False) == text
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (config["eos_token"], config["chat_template"]) == ("<|end|>", "{{ messages[0].content }}")
    generation = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == 0


def test_transformers_reads_the_written_tokenizer_alike(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    import tokenizer_file

    tokenizer_file.write_tokenizer(make_metadata(), tmp_path)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), from_gguf(make_metadata())
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text, allow_special=True)


def test_another_kind_of_tokenizer_is_refused() -> None:
    import tokenizer_file

    with pytest.raises(TokenizerError, match="wanted 'gpt2'"):
        tokenizer_file.build_tokenizer(make_metadata(**{"tokenizer.ggml.model": "llama"}))


def write_source(path: Path) -> dict[str, np.ndarray]:
    """A GGUF with a matrix of Q4_1, a vector and metadata of several kinds; returns its values."""
    kind = gguf.GGMLQuantizationType.Q4_1
    matrix = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    packed = gguf.quants.quantize(matrix, kind)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "b"])
    writer.add_float32("llama.epsilon", 1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_tensor("blk.0.w.weight", packed, raw_dtype=kind)
    writer.add_tensor("norm.weight", np.arange(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"blk.0.w.weight": gguf.quants.dequantize(packed, kind), "norm.weight": np.arange(8)}


@pytest.mark.parametrize("name", ["bf16", "q8_0"])
def test_a_copy_has_the_sources_values_and_metadata(name: str, tmp_path: Path) -> None:
    import weights

    expected = write_source(tmp_path / "source.gguf")
    weights.write_gguf(tmp_path / "source.gguf", tmp_path / "copy.gguf", name)
    reader = gguf.GGUFReader(tmp_path / "copy.gguf")
    fields = {key: reader.fields[key].contents() for key in ("llama.context_length", "tokenizer.ggml.tokens")}
    assert fields == {"llama.context_length": 77, "tokenizer.ggml.tokens": ["a", "b"]}
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["general.file_type"].contents() == int(weights.FILE_TYPES[name])
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found["norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert found["blk.0.w.weight"].tensor_type == weights.TYPES[name]
    for key, tensor in found.items():
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        rounded = torch.from_numpy(expected[key]).float().bfloat16().float()
        # Q8_0 rounds to 1/127 of the largest of 32.
        torch.testing.assert_close(values, rounded, rtol=0, atol=0.02 if name == "q8_0" else 0.0)
