from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from astrai_bench.cli import bench
from astrai_bench.errors import BenchError
from astrai_bench.peers import read_earlier
from astrai_bench.peers_report import (
    END_MARK,
    START_MARK,
    build_rows,
    derive_metrics,
    format_table,
    name_result,
    replace_section,
)
from astrai_bench.peers_run import OWN, Record, choose_peers, estimate_s, find_scripts, run_rounds, run_script

PEERS = Path(__file__).parents[2] / "bench" / "peers"
TESTS = Path(__file__).parents[1]
SIZES = {"prompt": 6, "answer": 4, "prefill": 9, "batch": 3, "clients": 2, "repeats": 2}
FLAGS = [part for name, size in SIZES.items() for part in (f"--{name}", str(size))]

# A peer whose engine counts upwards from the last id of a prompt.
FAKE = """
import sys, time
sys.path[:0] = [{peers!r}]
from environment import SetupError
from frame import Peer, main

class Engine:
    def __init__(self, setup):
        assert setup.files["hf"] == "nowhere"
        self.short = setup.variant == "short"
        if setup.variant == "broken":
            raise RuntimeError("no such instruction")
    def generate(self, prompts, max_tokens):
        time.sleep(0.001 * max_tokens)
        return [[prompt[-1] + idx for idx in range(max_tokens - self.short)] for prompt in prompts]

def fail(environment):
    raise SetupError("the compiler is missing")

def serve(setup, port):
    code = "import sys; sys.path[:0] = [%r]; import scripted_server as s; s.serve_forever(%d)"
    return [sys.executable, "-c", code % ({tests!r}, port)]

main(Peer(name={name!r}, variants={variants!r}, start=Engine, packages=("pip",), {options}))
"""


def write_peer(directory: Path, name: str, variants: tuple[str, ...] = ("bf16",), options: str = "") -> Path:
    path = directory / f"run_{name}.py"
    path.write_text(
        FAKE.format(peers=str(PEERS), tests=str(TESTS), name=name, variants=variants, options=options)
    )
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Weights that are there already."""
    weights = tmp_path / "home" / "weights"
    weights.mkdir(parents=True)
    ready = {"model": "fake", "files": {"hf": "nowhere"}, "check_ids": [5, 7]}
    (weights / "ready.json").write_text(json.dumps(ready), encoding="utf-8")
    return tmp_path / "home"


def run_peer(path: Path, home: Path, *flags: str) -> dict[str, Any]:
    return run_script(path, ["--home", str(home), *FLAGS, *flags])


def test_a_script_measures_its_engine_in_an_environment_of_its_own(home: Path, tmp_path: Path) -> None:
    result = run_peer(write_peer(tmp_path, "fake"), home)
    found = result["variants"]["bf16"]
    assert found["check"] == list(range(7, 23))
    assert found["sizes"] == SIZES
    assert [len(found[f"{name}_s"]) for name in ("prefill", "first", "single", "batch")] == [2] * 4
    assert min(found["single_s"]) > min(found["first_s"])
    assert found["start_s"] > 0
    assert found["http"] == {"reason": "the package has no server"}
    assert (home / "fake" / "bin" / "python").exists()


def test_the_server_is_asked_by_clients_and_ended(home: Path, tmp_path: Path) -> None:
    result = run_peer(write_peer(tmp_path, "own", options="serve=serve, is_own=True"), home)
    http = result["variants"]["bf16"]["http"]
    assert http["requests"] == {
        "sent": 4,
        "answered": 4,
        "failed": 0,
        "errors": {},
        "example": None,
        "shorter_than_max_tokens": 0,
    }
    assert 0 < http["start_s"] < http["first_token_s"]
    assert (http["tokens"]["input_min"], http["tokens"]["input_max"], http["tokens"]["output"]) == (6, 6, 16)
    result_after = CliRunner().invoke(bench, ["serve", http["load"]["url"]])
    assert "wanted a list of models" in str(result_after.exception)


def test_what_cannot_be_installed_run_or_trusted_is_a_reason(home: Path, tmp_path: Path) -> None:
    result = run_peer(write_peer(tmp_path, "uninstalled", options="step=fail"), home)
    assert (result["reason"], result["variants"]) == ("the compiler is missing", {})
    result = run_peer(write_peer(tmp_path, "mixed", ("bf16", "broken", "short")), home)
    assert "single_s" in result["variants"]["bf16"]
    assert result["variants"]["broken"] == {"reason": "RuntimeError: no such instruction"}
    reason = result["variants"]["short"]["reason"]
    assert reason == "WrongAnswerError: wanted 1 answers of 16 tokens, got lengths [15]"


def test_a_script_that_dies_is_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "run_dead.py"
    path.write_text("raise SystemExit('out of memory')", encoding="utf-8")
    assert run_script(path, []) == {"peer": "run_dead", "variants": {}, "reason": "status 1: out of memory"}


def test_an_environment_is_made_once_for_the_same_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PEERS))
    import environment

    steps: list[Path] = []
    for _ in range(2):
        made = environment.make_environment(tmp_path, "peer", (), lambda made: steps.append(made.directory))
    assert steps == [tmp_path / "peer"]
    (made.directory / "ready").write_text("another", encoding="ascii")
    environment.make_environment(tmp_path, "peer", (), lambda made: steps.append(made.directory))
    assert len(steps) == 2
    with pytest.raises(environment.SetupError, match=r"-c failed: no wheel \(see "):
        made.run(sys.executable, "-c", "raise SystemExit('no wheel')")


def test_a_mend_of_sources_is_made_once_and_refused_where_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PEERS))
    import run_llama_cpp
    from environment import SetupError

    path = tmp_path / "mmq.cpp"
    path.write_text("    _tile_loadconfig(&tc);\n", encoding="utf-8")
    for _ in range(2):
        run_llama_cpp.keep_tile_shapes(path)
    first, second = path.read_text(encoding="utf-8").splitlines()
    assert '"memory"' in first
    assert second == "    _tile_loadconfig(&tc);"
    path.write_text("_tile_load(tc);", encoding="utf-8")
    with pytest.raises(SetupError, match="wanted one '_tile_loadconfig"):
        run_llama_cpp.keep_tile_shapes(path)


def write_scripts(tmp_path: Path) -> Path:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    write_peer(scripts, OWN, ("bf16", "int8", "f32"), "is_own=True")
    write_peer(scripts, "good", ("bf16", "broken"))
    write_peer(scripts, "bad", options="step=fail")
    return scripts


def test_ours_and_the_peers_alternate_and_a_failed_one_is_not_run_again(home: Path, tmp_path: Path) -> None:
    scripts = find_scripts(write_scripts(tmp_path))
    records = run_rounds(scripts, choose_peers(scripts, []), 2, ["--home", str(home), "--no-http", *FLAGS])
    order = [(record.round, record.pair, record.peer) for record in records]
    assert order == [
        (0, "bad", OWN),
        (0, "bad", "bad"),
        (0, "good", OWN),
        (0, "good", "good"),
        (1, "good", OWN),
        (1, "good", "good"),
    ]
    assert set(records[0].result["variants"]) == {"bf16", "int8"}
    assert all(record.wall_s > 0 for record in records)


def test_one_variant_of_a_peer_can_be_chosen(home: Path, tmp_path: Path) -> None:
    scripts = find_scripts(write_scripts(tmp_path))
    chosen = choose_peers(scripts, ["good:broken", "bad"])
    assert chosen == {"good": ["broken"], "bad": []}
    records = run_rounds(scripts, {"good": ["broken"]}, 1, ["--home", str(home), "--no-http", *FLAGS])
    assert set(records[-1].result["variants"]) == {"broken"}
    records = run_rounds(scripts, {"good": ["int3"]}, 1, ["--home", str(home), "--no-http", *FLAGS])
    assert "invalid choice: 'int3'" in records[-1].result["reason"]


def test_the_expected_time_is_that_of_the_last_run() -> None:
    records = [("astrai", 500.0), ("vllm", 900.0), ("astrai", 60.0), ("vllm", 240.0)]
    earlier = [{"peer": peer, "wall_s": seconds} for peer, seconds in records]
    assert estimate_s(["vllm"], 3, earlier) == 900
    assert estimate_s(["vllm", "other"], 1, earlier) == 60 + 240 + 60 + 180


def test_the_command_writes_a_table_and_a_file(home: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{START_MARK}\nold\n{END_MARK}\nafter\n", encoding="utf-8")
    options = {"scripts": write_scripts(tmp_path), "home": home, "readme": readme, "results": tmp_path / "r"}
    flags = [part for name, path in options.items() for part in (f"--{name}", str(path))]
    result = CliRunner().invoke(bench, ["peers", *flags, "--rounds", "1", "--", "--no-http", *FLAGS])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output.splitlines()[-1])
    assert result.output.startswith("About 12 min; ")
    (path,) = (tmp_path / "r").iterdir()
    assert json.loads(path.read_text(encoding="utf-8")) == document
    assert [(row["peer"], row["variant"]) for row in document["rows"]] == [
        (OWN, "bf16"),
        (OWN, "int8"),
        ("bad", None),
        ("good", "bf16"),
        ("good", "broken"),
    ]
    # The next run knows how long it takes.
    assert [record["peer"] for record in read_earlier(tmp_path / "r")] == [OWN, "bad", OWN, "good"]
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{START_MARK}\nThe values of fake; ")
    assert text.endswith(f"{END_MARK}\nafter\n")
    assert "old" not in text
    assert "- bad: the compiler is missing" in text
    assert "- good, broken: RuntimeError: no such instruction" in text


def make_result(single: float, batch: float, check: list[int], **changes: Any) -> dict[str, Any]:
    times = {"prefill_s": [2.0], "first_s": [1.0], "single_s": [single], "batch_s": [batch]}
    result = {"start_s": 3.0, "check": check, "sizes": SIZES, "versions": {"python": "3.11"}}
    return result | times | changes


def make_record(idx: int, peer: str, result: dict[str, Any], **others: dict[str, Any]) -> Record:
    found = {"peer": peer, "variants": {"bf16": result, **others}}
    return Record(round=idx, pair="x", peer=peer, load=0.0, wall_s=1.0, result=found)


def test_figures_are_medians_of_repetitions() -> None:
    times = {"first_s": [1.0, 9.0, 1.0], "single_s": [4.0, 3.0, 2.0], "batch_s": [6.0, 2.0, 3.0]}
    http = {"output_tok_s": 50.0, "first_token_s": 2.5, "latency": {"ttft_ms": {"p50": 8.0}}}
    found = derive_metrics(make_result(0.0, 0.0, [], **times, http=http))
    assert found == {
        "start_s": 3.0,
        "prefill_tok_s": 4.5,
        "single_tok_s": 1.5,
        "batch_tok_s": 4.0,
        "http_tok_s": 50.0,
        "http_ttft_ms": 8.0,
        "http_start_s": 2.5,
    }


def test_a_stream_faster_than_its_first_token_has_no_rate() -> None:
    assert "single_tok_s" not in derive_metrics(make_result(0.9, 1.0, []))


def test_ratios_are_of_the_same_round_and_above_one_where_ours_is_better() -> None:
    records = [
        make_record(0, OWN, make_result(2.0, 1.0, [1, 2, 3])),
        make_record(0, "x", make_result(3.0, 2.0, [1, 2, 4], start_s=6.0)),
        make_record(1, OWN, make_result(2.0, 4.0, [1, 2, 3])),
        make_record(1, "x", make_result(2.0, 4.0, [1, 2, 4], start_s=1.5)),
    ]
    ours, theirs = build_rows(records)
    assert ours.figures["single_tok_s"].ours_better is None
    assert ours.same_tokens == (3, 3)
    assert theirs.same_tokens == (2, 3)
    assert theirs.figures["single_tok_s"].ours_better == (1.5, 1.0, 2.0)
    assert theirs.figures["batch_tok_s"].ours_better == (1.5, 1.0, 2.0)
    assert theirs.figures["start_s"].ours_better == (1.25, 0.5, 2.0)
    lines = format_table([ours, theirs], SIZES).splitlines()
    assert "3 at once, tok/s" in lines[0]
    assert "prompt of 9, tok/s" in lines[0]
    assert lines[3].startswith("| x, bf16 | 2.25 (1.50×, 1.00–2.00) |")
    assert lines[3].endswith("| 2/3 |")


def test_variants_of_8_and_4_bits_meet_our_int8() -> None:
    own = make_record(0, OWN, make_result(2.0, 1.0, [1, 2]), int8=make_result(1.5, 1.0, [1, 3]))
    slow = make_result(3.0, 1.0, [1, 2])
    peer = make_record(0, "x", slow, q8_0=slow, int4=slow, int8={"reason": "no"})
    rows = {(row.peer, row.variant): row for row in build_rows([own, peer])}
    assert list(rows)[:2] == [(OWN, "bf16"), (OWN, "int8")]
    ratios = {
        variant: row.figures["single_tok_s"].ours_better
        for (name, variant), row in rows.items()
        if name == "x" and row.figures
    }
    assert ratios == {"bf16": (2, 2, 2), "q8_0": (4, 4, 4), "int4": (4, 4, 4)}
    # The text is compared with ours in 16 bits.
    assert (rows["x", "q8_0"].same_tokens, rows[OWN, "int8"].same_tokens) == ((2, 2), (1, 2))


def test_a_peer_is_shown_where_ours_has_failed() -> None:
    broken: dict[str, Any] = {"reason": "no compiler"}
    rows = build_rows([make_record(0, OWN, broken), make_record(0, "x", make_result(2.0, 1.0, [1]))])
    assert rows[0].reasons == {"run": "no compiler"}
    assert rows[1].figures["single_tok_s"].ours_better is None


def test_a_server_that_failed_is_a_note() -> None:
    broken = make_result(2.0, 1.0, [1], http={"reason": "status 400"})
    rows = build_rows([make_record(0, OWN, make_result(2.0, 1.0, [1])), make_record(0, "x", broken)])
    assert format_table(rows, SIZES).endswith("- x, bf16, no HTTP: status 400")


@pytest.mark.parametrize("text", [START_MARK, END_MARK, f"{END_MARK} {START_MARK}"])
def test_marks_that_do_not_match_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BenchError, match="and after it"):
        replace_section(path, "table")
    assert path.read_text(encoding="utf-8") == text


def test_a_file_without_marks_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("text", encoding="utf-8")
    assert replace_section(path, "table") is False
    assert path.read_text(encoding="utf-8") == "text"


def test_an_unknown_peer_is_refused_with_the_choices() -> None:
    scripts = find_scripts(PEERS)
    assert set(scripts) >= {OWN, "llama_cpp", "openvino", "transformers", "vllm"}
    with pytest.raises(BenchError, match="wanted one of llama_cpp, openvino, transformers, vllm, got sglang"):
        choose_peers(scripts, ["sglang"])


def test_a_directory_without_scripts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="run this from a checkout"):
        find_scripts(tmp_path)


def test_a_result_is_named_by_machine_and_day() -> None:
    name = name_result("Intel(R) Xeon(R) Processor, AVX512", "2026-11-30T10:00:00+00:00")
    assert name == "peers-intel-r-xeon-r-processor-avx512-2026-11-30.json"


def test_weights_are_made_in_a_home_that_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PEERS))
    import frame

    home = tmp_path / "new" / "home"

    def run(environment: Any, *command: Any) -> None:
        environment.log.write_text("a log beside what is made")
        (home / "weights").mkdir()
        (home / "weights" / "ready.json").write_text('{"files": {}}')

    monkeypatch.setattr(frame.Environment, "run", run)
    assert frame._prepare_weights(home) == {"files": {}}
