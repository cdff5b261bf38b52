from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_triton import attention

README = (Path(__file__).parent.parent / "README.md").read_text()
EMBED = re.findall(r"```python\n(.*?)```", README[README.index("## Embed") :], re.DOTALL)


def test_the_attention_example_runs() -> None:
    scope: dict[str, object] = {}
    exec(compile(EMBED[0], "README.md", "exec"), scope)
    assert scope["out"].shape == (2, 5, 8, 64)  # type: ignore[attr-defined]


@pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU or TRITON_INTERPRET=1",
)
def test_the_kernel_example_attends_to_the_pool_and_the_new_token() -> None:
    scope: dict[str, Any] = {}
    exec(compile(EMBED[1], "README.md", "exec"), scope)
    table, rows = scope["req_to_token"].long(), scope["rows"].tolist()
    for b, (row, kv_len) in enumerate(zip(rows, (17, 9), strict=True)):
        slots = table[row, :kv_len]
        k, v = scope["k_pool"][slots], scope["v_pool"][slots]
        assert torch.equal(k[-1], scope["new_k"][b])
        expected = attention(scope["q"][b][None, None], k[None], v[None])[0, 0]
        torch.testing.assert_close(scope["out"][b], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.real_model
def test_the_engine_example_answers(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EMBED[2], "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines[0]) > 10
    assert any(line.startswith("0 ") for line in lines)
    assert any(line.startswith("1 ") for line in lines)


def test_the_set_up_commands_come_first_and_are_what_ci_runs() -> None:
    commands = re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)[:2]
    assert commands[0].endswith("astrai serve -c configs/serve.yaml")
    ci = (Path(__file__).parent.parent / ".ci" / "run").read_text()
    assert 'pip install -c constraints.txt -e ".[serve,dev]"' in commands[1]
    assert '-c constraints.txt -e ".[serve,dev]"' in ci
    assert commands[1].endswith("nox")
