"""The embeddable surface: what is exported, and what importing it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import astrai_triton
from astrai_triton import errors

ROOT = Path(__file__).parents[1]

PROBE = """
import json, sys
import torch
before = set(sys.modules)
import astrai_triton
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_everything_in_all_exists_and_is_sorted() -> None:
    assert [name for name in astrai_triton.__all__ if not hasattr(astrai_triton, name)] == []
    assert len(set(astrai_triton.__all__)) == len(astrai_triton.__all__)


def test_the_surface_is_what_the_readme_promises() -> None:
    promised = {
        "ATTN_BACKEND",
        "AttentionBackend",
        "CudaBackend",
        "FlashAttnBackend",
        "KVCache",
        "TorchNativeBackend",
        "TritonBackend",
        "apply_rotary_emb",
        "attention",
        "attn_backend",
        "__version__",
    }
    ops = {
        "attn_decode",
        "attn_paged_decode",
        "attn_paged_prefill",
        "attn_prefill",
        "merge_states",
        "rotary_append_",
        "rotary_emb",
        "rotary_qk_",
    }
    every_error = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.AstraiError)
    }
    assert set(astrai_triton.__all__) == promised | ops | every_error


def test_every_public_name_is_in_all() -> None:
    submodules = {
        name.removeprefix("astrai_triton.") for name in sys.modules if name.startswith("astrai_triton.")
    }
    needed_here = {"annotations", "importlib", "TYPE_CHECKING", "Any"}
    public = {name for name in vars(astrai_triton) if not name.startswith("_")} - submodules - needed_here
    assert public <= set(astrai_triton.__all__)


def test_the_ops_are_those_that_can_be_traced() -> None:
    from astrai_triton import ops
    from astrai_triton.ops import library

    assert [name for name in ops.__all__ if getattr(astrai_triton, name) is not getattr(library, name)] == []
    assert set(ops.__all__) <= set(astrai_triton.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'astrai_triton' has no attribute 'attn_encode'"):
        astrai_triton.attn_encode  # noqa: B018


def test_the_version_is_that_of_the_project() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    assert f'version = "{astrai_triton.__version__}"' in lines


def test_importing_loads_nothing_but_attrs_beyond_torch_and_the_ring() -> None:
    """What keeps the import short: whoever needs engine, model or tokenizer imports it."""
    probe = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, check=True)
    loaded = json.loads(probe.stdout)
    ring = [name for name in loaded if name.split(".")[0] == "astrai_triton"]
    others = {name.split(".")[0] for name in loaded} - {"astrai_triton"} - sys.stdlib_module_names
    assert others <= {"attr", "attrs"}
    assert {name.split(".")[1] for name in ring if "." in name} <= {
        "backend",
        "errors",
        "kvcache",
        "schedule",
    }
