from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from astrai_server.cli import main
from astrai_server.config import list_options
from fakes import ScriptedModel


@pytest.fixture(autouse=True)
def _empty_homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model is on this machine."""
    monkeypatch.setenv("ASTRAI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


def invoke(*args: str, **options: Any) -> Result:
    return CliRunner().invoke(main, list(args), prog_name="astrai", **options)


def rows_of(result: Result) -> dict[str, list[str]]:
    assert result.exit_code == 0, result.output
    return {line.split()[0]: re.split(r"\s{2,}", line) for line in result.stdout.splitlines() if line}


def test_check_shows_every_setting_with_its_source(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("server:\n  device: cpu\n  dtype: float32\n")
    rows = rows_of(invoke("check", str(path), "--port", "9", env={"ASTRAI_CACHE__PAGE_SIZE": "8"}))
    for option in list_options():
        assert len(rows[option.name]) == 3
    assert rows["server.port"][1:] == ["9", "--port"]
    assert rows["server.dtype"][1:] == ["float32", f"{path}:3"]
    assert rows["cache.page_size"][1:] == ["8", "ASTRAI_CACHE__PAGE_SIZE"]
    assert rows["server.threads"][1:] == ["null", "default"]


@pytest.mark.parametrize(
    ("flags", "pool"),
    [
        ([], "depends on the model"),
        (["--n-tokens", "1600"], "1600 tokens; bytes depend on the model"),
        (["--cache-mode", "contiguous", "--max-seq-len", "100"], "1600 tokens; bytes depend on the model"),
    ],
)
@pytest.mark.parametrize("model", ["SmolLM2-135M-Instruct", "some/model", "./none.gguf"])
def test_check_fetches_nothing_and_says_what_is_missing(model: str, flags: list[str], pool: str) -> None:
    result = invoke("check", "--param-path", model, "--device", "cpu", "--dtype", "float32", *flags)
    assert result.exit_code == 0, result.output
    assert f"{model} is not on this machine" in result.stdout
    assert result.stdout.splitlines()[-1].split(maxsplit=2)[2] == pool


@pytest.fixture
def local_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model on this machine, as far as its configuration goes."""
    path = tmp_path / "m.gguf"
    path.touch()

    @attrs.frozen
    class Files:
        path: Path
        config: Any

    monkeypatch.setattr(
        "astrai_triton.checkpoint.open_checkpoint", lambda path: Files(path, ScriptedModel().config)
    )
    return path


def test_check_shows_what_the_pool_holds(local_model: Path) -> None:
    flags = ["--device", "cpu", "--dtype", "float32", "--n-tokens", "6400", "--max-batch-size", "8"]
    text = invoke("check", "--param-path", str(local_model), *flags).stdout
    assert "KV            64 bytes per token" in text
    assert "6400 tokens, 0 MiB (cache.n_tokens), pages of 16, prefix cache on, context 4096" in text
    assert "8 of 512 tokens, 3 of 2048 tokens, 1 of 4096 tokens; max_batch_size=8" in text


def test_check_refuses_what_serve_would_refuse(local_model: Path) -> None:
    flags = ["--device", "cpu", "--dtype", "float32", "--max-seq-len", "5000"]
    result = invoke("check", "--param-path", str(local_model), *flags)
    text = "--max-seq-len: server.max_seq_len: wanted at most 4096, the model's context, got 5000"
    assert result.exit_code == 1
    assert result.stderr == f"Error: {text}\n"


def test_info_shows_versions_hardware_and_every_attention_backend(tmp_path: Path) -> None:
    result = invoke("info")
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert sys.version.split()[0] in rows["Python"]
    assert str(tmp_path / "home") in rows["cache"]
    assert "OpenMP" in rows["OpenMP"]
    assert "the C library's (LD_PRELOAD of tcmalloc" in rows["allocator"]
    assert "built" in rows["CPU"] or "available" in rows["CPU"]
    assert rows["torch_native"].endswith("available")
    for name in ("triton", "cuda", "flash"):
        assert "available" in next(
            line for line in result.stdout.splitlines() if line.startswith(f"  {name} ")
        )


def test_check_shows_the_names_of_keys_and_never_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("alice: alice-0123456789abcdef\n")
    flags = ["--keys-file", str(path), "--device", "cpu", "--dtype", "float32"]
    result = invoke("check", *flags, env={"ASTRAI_API_KEYS": "bob: bob-0123456789abcdef"})
    assert "API keys      2: alice, bob\n" in result.stdout
    assert "0123456789abcdef" not in result.output
    assert "API keys      none are asked for\n" in invoke("check", *flags[2:]).stdout


def test_check_refuses_keys_that_serve_would_refuse(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("alice: alice-0123456789abcdef\nbob: short\n")
    result = invoke("check", "--keys-file", str(path))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {path}:2: wanted a key of at least 16 characters, got 5")


def test_check_names_the_flag_of_a_keys_file_that_is_not_there() -> None:
    result = invoke("check", "--keys-file", "none.txt")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: --keys-file: api.keys_file: cannot read none.txt: No such file")
