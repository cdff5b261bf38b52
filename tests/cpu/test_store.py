"""Packed weights from the disk are those that were packed, and of this very checkpoint."""

from __future__ import annotations

import errno
import gc
import json
import os
import threading

import attrs
import pytest
import torch

from astrai_triton.cpu import (
    CpuDecoder,
    PackedFileError,
    PackedStore,
    describe,
    packed,
    store,
    why_not_config,
)
from astrai_triton.errors import BackendError
from cpu_kernels import needs_kernels
from random_models import VARIANTS, random_decoder, small_config

pytestmark = needs_kernels

MIB = 1 << 20
SEQUENCES = [[(7 * i + j) % 50 for j in range(length)] for i, length in enumerate((12, 5))]
MODELS = [
    (torch.float32, "none"),
    (torch.bfloat16, "none"),
    (torch.float32, "int8"),
    (torch.bfloat16, "int8"),
]


@pytest.fixture
def source(tmp_path):
    """What stands for a checkpoint: only its bytes count."""
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(5 * MIB))
    return path


@pytest.fixture
def kept(tmp_path):
    return PackedStore(tmp_path / "kept")


def run(session):
    return torch.cat([session.step(counts) for counts in ({0: 7, 1: 4}, {0: 4, 1: 1}, {0: 1})])


def save(kept, source, seed=0, quantize="none", **changes):
    decoder = random_decoder(small_config(**changes), seed=seed)
    key = describe(source, decoder.config, dtype=decoder.dtype, quantize=quantize)
    model = CpuDecoder(decoder, quantize=quantize)
    return key, model, kept.save(key, model)


@pytest.mark.parametrize(("dtype", "quantize"), MODELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loaded_decoder_gives_the_same_bits(variant, dtype, quantize, kept, source, open_session):
    config = small_config(**VARIANTS[variant])
    key = describe(source, config, dtype=dtype, quantize=quantize)
    model = CpuDecoder(random_decoder(config, dtype=dtype), quantize=quantize)
    wanted = run(open_session(model, SEQUENCES))
    kept.save(key, model)
    loaded = kept.load(key, threads=3)
    assert (loaded.config, loaded.dtype, loaded.quantize) == (config, dtype, quantize)
    assert loaded.num_bytes == model.num_bytes
    assert bytes(loaded.packed_weights()) == bytes(model.packed_weights())
    assert torch.equal(run(open_session(loaded, SEQUENCES)), wanted)


def test_what_was_not_saved_is_not_found(kept, source):
    key = describe(source, small_config(), dtype=torch.float32)
    assert kept.find(key) is None
    assert kept.load(key) is None
    assert not kept.root.exists()


def test_what_was_saved_is_found(kept, source):
    key, _, path = save(kept, source)
    assert kept.find(key) == path
    assert path.parent == kept.root
    assert "model.gguf" in path.name


@pytest.mark.parametrize(
    "change",
    [
        {"config": small_config(norm_eps=1e-6)},
        {"config": small_config(embed_scale=2.0)},
        {"dtype": torch.bfloat16},
        {"quantize": "int8"},
        {"isa": "neon"},
        {"code": "other"},
        {"place": "/elsewhere"},
        {"sources": ()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_weights_of_something_else_are_not_taken(change, kept, source):
    key, _, _ = save(kept, source)
    assert kept.load(attrs.evolve(key, **change)) is None


def overwrite(path, offset, count=1):
    """Other bytes, same size and time."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(count)
        file.seek(offset)
        file.write(bytes(byte ^ 255 for byte in old))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: overwrite(path, 0),
        lambda path: overwrite(path, MIB - 1),
        lambda path: overwrite(path, 5 * MIB - 1),
        lambda path: overwrite(path, 4 * MIB),
        # A tensor of fair size touches a sample.
        lambda path: overwrite(path, 2 * MIB, MIB // 4),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: os.utime(path, (1, 1)),
    ],
    ids=["first", "head", "last", "tail", "middle", "size", "time"],
)
def test_a_checkpoint_that_changed_is_noticed(change, kept, source):
    key, _, _ = save(kept, source)
    change(source)
    now = describe(source, key.config, dtype=key.dtype)
    assert kept.load(now) is None
    assert attrs.evolve(now, sources=key.sources) == key


def test_times_count_by_the_second(source):
    """Images of containers cut the rest off."""
    config = small_config()
    os.utime(source, ns=(10**18 + 999, 10**18 + 999))
    key = describe(source, config, dtype=torch.float32)
    os.utime(source, ns=(10**18, 10**18))
    assert describe(source, config, dtype=torch.float32) == key


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 3 * MIB])
def test_files_of_any_size_are_described(num_bytes, source):
    source.write_bytes(bytes(num_bytes))
    (file,) = describe(source, small_config(), dtype=torch.float32).sources
    assert (file.name, file.num_bytes) == ("model.gguf", num_bytes)


def test_of_a_directory_all_weights_count(tmp_path):
    directory = tmp_path / "hf"
    directory.mkdir()
    for name in ("b.safetensors", "a.safetensors", "model.safetensors.index.json", "tokenizer.json"):
        (directory / name).write_text(name)
    key = describe(directory, small_config(), dtype=torch.float32)
    names = ["a.safetensors", "b.safetensors", "model.safetensors.index.json"]
    assert [file.name for file in key.sources] == names
    assert key.place == str(directory)


def test_a_checkpoint_that_is_gone_is_named(tmp_path):
    with pytest.raises(PackedFileError, match=r"gone.gguf cannot be read \(No such file"):
        describe(tmp_path / "gone.gguf", small_config(), dtype=torch.float32)


def test_the_code_that_packs_is_part_of_the_key(source, tmp_path, monkeypatch):
    key = describe(source, small_config(), dtype=torch.float32)
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "pack.h").write_text("// other")
    monkeypatch.setattr(store, "SOURCES", sources)
    assert describe(source, small_config(), dtype=torch.float32).code != key.code


def test_a_damaged_file_is_refused_and_can_be_replaced(kept, source):
    key, model, path = save(kept, source)
    overwrite(path, path.stat().st_size - 1)
    assert kept.find(key) == path
    with pytest.raises(PackedFileError, match="is damaged"):
        kept.load(key)
    overwrite(path, 100)
    with pytest.raises(PackedFileError, match="header"):
        kept.find(key)
    kept.save(key, model)
    assert bytes(kept.load(key).packed_weights()) == bytes(model.packed_weights())


def test_the_newest_takes_the_place_of_older_ones(kept, source):
    old_key, _, old_path = save(kept, source)
    overwrite(source, 0)
    key, model, path = save(kept, source, seed=1)
    assert path == old_path
    assert kept.load(old_key) is None
    assert bytes(kept.load(key).packed_weights()) == bytes(model.packed_weights())


def test_kinds_of_one_checkpoint_are_kept_side_by_side(kept, source):
    keys = [save(kept, source)[0], save(kept, source, quantize="int8")[0]]
    assert [kept.load(key).quantize for key in keys] == ["none", "int8"]


def test_saving_removes_what_is_left_over(kept, source, tmp_path):
    gone = tmp_path / "gone.gguf"
    gone.write_bytes(b"x")
    _, _, orphan = save(kept, gone)
    gone.unlink()
    (kept.root / "killed.tmp").write_bytes(b"half of it")
    (kept.root / "damaged.packed").write_bytes(b"?")
    _, _, path = save(kept, source)
    assert not orphan.exists()
    assert {entry.name for entry in kept.root.iterdir()} == {path.name, ".lock", "damaged.packed"}


def test_savers_and_loaders_at_once_disturb_nobody(kept, source):
    key, model, _ = save(kept, source)
    wanted, errors = bytes(model.packed_weights()), []

    def repeat(action):
        try:
            for _ in range(10):
                action()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    def load():
        assert bytes(kept.load(key).packed_weights()) == wanted

    threads = [
        threading.Thread(target=repeat, args=(action,))
        for action in [lambda: kept.save(key, model), load] * 3
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(list(kept.root.glob("*.packed"))) == 1


def test_a_directory_that_cannot_be_written_is_named(source, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PackedFileError, match=r"cannot be written.*set ASTRAI_HOME to a directory"):
        save(PackedStore(tmp_path / "file" / "kept"), source)


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("posix_fallocate", errno.ENOSPC, "has no room for .* MiB are free.*ASTRAI_HOME"),
        ("fsync", errno.EIO, "cannot be written .Input/output error"),
    ],
)
def test_a_save_that_fails_leaves_everything_as_it_was(function, code, message, kept, source, monkeypatch):
    key, model, _ = save(kept, source)
    before = sorted(kept.root.iterdir())

    def fail(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as context:
        context.setattr(packed.os, function, fail)
        with pytest.raises(PackedFileError, match=message):
            kept.save(key, model)
    assert sorted(kept.root.iterdir()) == before
    assert bytes(kept.load(key).packed_weights()) == bytes(model.packed_weights())


@pytest.mark.parametrize("change", [{"quantize": "int8"}, {"dtype": torch.bfloat16}, {"isa": "neon"}])
def test_a_decoder_that_is_not_what_the_key_says_is_not_saved(change, kept, source):
    key, model, _ = save(kept, source)
    name, wanted = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"decoder: wanted {name} {wanted} as the key has it"):
        kept.save(attrs.evolve(key, **change), model)


def test_the_header_says_what_the_weights_are_of(kept, source):
    key, _, path = save(kept, source)
    with packed.PackedFile(path) as file:
        assert file.key["place"] == str(source)
        assert file.key["dtype"] == "float32"
        assert file.key == json.loads(json.dumps(file.key))
        assert file.key["config"]["hidden_size"] == key.config.hidden_size


def test_the_store_lies_in_the_home_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTRAI_HOME", str(tmp_path))
    assert PackedStore().root == tmp_path / "cpu" / "weights"


def test_packed_weights_outlive_their_decoder_and_cannot_be_changed():
    decoder = random_decoder(small_config())
    wanted = bytes(CpuDecoder(decoder).packed_weights())
    weights = CpuDecoder(decoder).packed_weights()
    gc.collect()
    assert bytes(weights) == wanted
    with pytest.raises(TypeError, match="read-only"):
        weights[0] = 1


def test_what_filling_raises_is_passed_on():
    def fail(_):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        CpuDecoder.from_packed(small_config(), fail, dtype=torch.float32)


def test_a_model_that_is_not_covered_is_not_filled():
    config = small_config(head_dim=520)
    assert "512" in why_not_config(config, dtype=torch.float32)
    with pytest.raises(BackendError, match=r"512.*use a Decoder"):
        CpuDecoder.from_packed(config, lambda weights: None, dtype=torch.float32)
