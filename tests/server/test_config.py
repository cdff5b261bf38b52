from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from astrai_server import config
from astrai_server.config import ConfigError, Option, Settings, list_options, resolve_settings
from astrai_server.option import Choice

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str | bytes) -> Path:
        path = tmp_path / "s.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file


def error_of(
    path: Path | None, env: dict[str, str] | None = None, flags: dict[str, Any] | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_settings(path, env, flags)
    text = str(caught.value)
    assert "\n" not in text
    return text.replace(f"{path.parent}/", "") if path else text


def test_no_source_at_all_gives_the_defaults() -> None:
    resolved = resolve_settings()
    assert resolved.settings == Settings()
    assert set(resolved.origins.values()) == {"default"}


def test_flags_beat_environment_beats_file_beats_defaults(write: Any) -> None:
    path = write("server:\n  port: 1\n  max_batch_size: 2\n  threads: 3\n")
    env = {"ASTRAI_SERVER__PORT": "10", "ASTRAI_SERVER__MAX_BATCH_SIZE": "20"}
    resolved = resolve_settings(path, env, {"server.port": 100})
    server = resolved.settings.server
    assert (server.port, server.max_batch_size, server.threads, server.host) == (100, 20, 3, "127.0.0.1")
    assert resolved.origins["server.port"] == "--port"
    assert resolved.origins["server.max_batch_size"] == "ASTRAI_SERVER__MAX_BATCH_SIZE"
    assert resolved.origins["server.threads"] == f"{path}:4"
    assert resolved.origins["server.host"] == "default"
    assert resolved.value("server.port") == 100


PORT = "server.port: wanted an integer from 0 to 65535, got"
THREADS = "server.threads: wanted an integer from 1 to 1024 or null, got"
HOST = "server.host: wanted a host name or an address, got"
BODY_TIMEOUT = "limits.body_timeout_s: wanted a number from 0.1 to 1000000000, got"
ORIGINS = "api.cors_origins: wanted a list of origins such as https://example.org, got"
N_TOKENS = "cache.n_tokens: wanted a multiple of cache.page_size=16, got"

# What the file holds -> what is said after its name.
FILE_ERRORS: dict[str | bytes, str] = {
    "server:\n  prot: 1": ":2: unknown key 'prot' in section 'server'; did you mean 'port'?",
    "cache:\n\n  zzz: 1": ":3: unknown key 'zzz' in section 'cache'; known: "
    "mode, page_size, n_tokens, prefix_cache, isolate",
    "server:\n  page-size: 3": ":2: unknown key 'page-size' in section 'server'; it belongs under 'cache:'",
    "server:\n  max-seq-len: 3": ":2: unknown key 'max-seq-len' in section 'server'; "
    "did you mean 'max_seq_len'?",
    "sever:\n  port: 1": ":1: unknown section 'sever'; did you mean 'server'?",
    "a: 1": ":1: unknown section 'a'; known: server, cache, limits, api, runtime",
    "foo: {}": ":1: unknown section 'foo'; known: server, cache, limits, api, runtime",
    "cache:\nport: 1": ":2: 'port' is not a section; it belongs under 'server:'",
    "server: 5": ":1: server: wanted keys and values below it, got 5",
    "server:\n  port: '8000'": f":2: {PORT} '8000'; remove the quotes",
    "server:\n  port: true": f":2: {PORT} true",
    "server:\n  port: 80.0": f":2: {PORT} 80.0",
    "server:\n  port: 65536": f":2: {PORT} 65536",
    "server:\n  port: null": f":2: {PORT} null",
    "server:\n  port: [1, 2, 3, 4]": f":2: {PORT} [1, 2, 3, ...]",
    "server:\n  port: {a: 1}": f":2: {PORT} a mapping",
    "server:\n  port: !!int x": f":2: {PORT} 'x' tagged as int",
    "server: &x\n  port: *x": f":2: {PORT} a mapping",
    "server:\n  threads: 0": f":2: {THREADS} 0",
    "server:\n  threads: 0x" + "f" * 5000: f":2: {THREADS} an integer of 20000 bits",
    "server:\n  host: 12:30": f":2: {HOST} 750; put it in quotes",
    "server:\n  host: 2001-01-01": f":2: {HOST} '2001-01-01' read as timestamp; put it in quotes",
    "server:\n  device: gpu": ":2: server.device: wanted auto, cpu, cuda or cuda:N, got 'gpu'",
    "server:\n  dtype: bf16": ":2: server.dtype: wanted auto, float32, bfloat16 or float16, got 'bf16'",
    "cache:\n  prefix_cache: 1": ":2: cache.prefix_cache: wanted true or false, got 1",
    "cache:\n  n_tokens: 100": f":2: {N_TOKENS} 100; nearest: 96 or 112",
    "cache:\n  n_tokens: 7": f":2: {N_TOKENS} 7; nearest: 16",
    "cache:\n  mode: contiguous\n  n_tokens: 160": ":3: cache.n_tokens: contiguous mode always holds "
    "max_batch_size * max_seq_len tokens; set cache.n_tokens to null or cache.mode to paged",
    "server:\n  max_batch_size: 513": ":2: limits.max_step_tokens: wanted at least "
    "server.max_batch_size=513, so that every running request advances in a step, got 512",
    "limits:\n  body_timeout_s: 1e3": f":2: {BODY_TIMEOUT} '1e3'; "
    "remove the quotes, and write a decimal point before an exponent",
    "limits:\n  body_timeout_s: .nan": f":2: {BODY_TIMEOUT} .nan",
    "limits:\n  body_timeout_s: -.inf": f":2: {BODY_TIMEOUT} -.inf",
    "api:\n  validation_status: '422'": ":2: api.validation_status: wanted 422 or 400, got '422'",
    "api:\n  cors_origins: ['a', 1]": f":2: {ORIGINS} ['a', 1]",
    "api:\n  cors_origins: [[a]]": f":2: {ORIGINS} [a nested value]",
    "api:\n  model_name: ''": ":2: api.model_name: wanted a name or null, got ''",
    "server:\n  port: 1\n  port: 2": ":3: 'port' occurs twice, first at s.yaml:2; remove one",
    "cache:\n  page_size: 1\ncache: {}": ":3: 'cache' occurs twice, first at s.yaml:1; remove one",
    "- a": ":1: wanted sections such as 'server:', got ['a']",
    "&a [*a]": ":1: wanted sections such as 'server:', got [a nested value]",
    "? [a]\n: b": ":1: wanted a name before the colon, got a nested value",
    "server:\n\tport: 1": ":2: not valid YAML: found character '\\t' that cannot start any token",
    "a: !!python/object:x y": ":1: unknown section 'a'; known: server, cache, limits, api, runtime",
    "[" * 100_000: ":1: wanted YAML nested at most 20 deep",
    "a: \x00": ": not valid YAML: special characters are not allowed",
    b"server:\n  host: \xff": ": wanted UTF-8 text, got byte 0xff at 16",
}


@pytest.mark.parametrize("text", FILE_ERRORS)
def test_a_bad_file_is_one_line_with_place_and_way_out(write: Any, text: str | bytes) -> None:
    assert error_of(write(text)) == f"s.yaml{FILE_ERRORS[text]}"


# Variable -> what is said after its name.
ENV_ERRORS = {
    ("ASTRAI_SERVER__PORT", "x"): f"{PORT} 'x'",
    ("ASTRAI_SERVER__PORT", ""): f"{PORT} null",
    ("ASTRAI_SERVER__HOST", ""): f"{HOST} ''",
    ("ASTRAI_SERVER__PROT", "1"): "unknown key 'prot' in section 'server'; did you mean 'port'?",
    ("ASTRAI_SERVR__PORT", "1"): "unknown section 'servr'; did you mean 'server'?",
    ("ASTRAI_CACHE__N_TOKENS", "17"): f"{N_TOKENS} 17; nearest: 16 or 32",
    ("ASTRAI_API__VALIDATION_STATUS", "401"): "api.validation_status: wanted 422 or 400, got '401'",
    ("ASTRAI_API__CORS_ORIGINS", "["): "api.cors_origins: wanted a list of origins such as "
    "https://example.org; not valid YAML: expected the node content, but found '<stream end>'",
}


@pytest.mark.parametrize("variable", ENV_ERRORS)
def test_a_bad_variable_is_named(variable: tuple[str, str]) -> None:
    assert error_of(None, dict([variable])) == f"{variable[0]}: {ENV_ERRORS[variable]}"


@pytest.mark.parametrize(
    ("name", "text", "option", "value"),
    [
        ("ASTRAI_SERVER__THREADS", "null", "server.threads", None),
        ("ASTRAI_SERVER__PARAM_PATH", "1e5", "server.param_path", "1e5"),
        ("ASTRAI_API__MODEL_NAME", "no", "api.model_name", "no"),
        ("ASTRAI_API__VALIDATION_STATUS", "400", "api.validation_status", 400),
        ("ASTRAI_CACHE__PREFIX_CACHE", "false", "cache.prefix_cache", False),
        ("ASTRAI_LIMITS__REQUEST_TIMEOUT_S", "2.5", "limits.request_timeout_s", 2.5),
        ("ASTRAI_API__CORS_ORIGINS", "[a, b]", "api.cors_origins", ("a", "b")),
    ],
)
def test_a_variable_is_read_as_its_options_type(name: str, text: str, option: str, value: Any) -> None:
    assert resolve_settings(None, {name: text}).value(option) == value


def test_other_variables_of_the_project_are_left_alone() -> None:
    env = {"ASTRAI_HOME": "x", "ASTRAI_RUNTIME__GPUS": "all", "PATH": "/"}
    assert resolve_settings(None, env).settings == Settings()


@pytest.mark.parametrize("text", ["", "# nothing\n", "server:\n", "server: {}\ncache: ~\n"])
def test_an_empty_file_or_section_gives_the_defaults(write: Any, text: str) -> None:
    assert resolve_settings(write(text)).settings == Settings()


def test_the_runtime_section_is_left_alone(write: Any) -> None:
    path = write("runtime:\n  gpus: all\n  ports: [[1]]\nserver:\n  port: 1\n")
    assert resolve_settings(path).settings.server.port == 1


def test_a_whole_number_may_stand_for_seconds(write: Any) -> None:
    assert resolve_settings(write("limits:\n  drain_timeout_s: 5\n")).settings.limits.drain_timeout_s == 5


def test_a_flag_that_contradicts_the_file_names_the_line_to_change(write: Any) -> None:
    path = write("cache:\n  n_tokens: 1616\n")
    text = error_of(path, flags={"cache.page_size": 64})
    assert text.startswith("s.yaml:2: cache.n_tokens: wanted a multiple of cache.page_size=64, got 1616")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert (
        error_of(tmp_path / "no.yaml") == "no.yaml: cannot read the configuration: No such file or directory"
    )


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    assert "Is a directory" in error_of(tmp_path)


def test_a_huge_file_is_refused_unread(write: Any) -> None:
    assert "at most 1048576 bytes, got 1048577" in error_of(write(b"#" * ((1 << 20) + 1)))


def test_settings_built_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="port: wanted an integer from 0 to 65535, got 70000"):
        config.ServerSettings(port=70000)
    with pytest.raises(ConfigError, match=r"cache\.n_tokens: wanted a multiple"):
        Settings(cache=config.CacheSettings(n_tokens=17))


def test_settings_are_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Settings().server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_resolves(path: Path) -> None:
    resolve_settings(path)


def test_the_main_configuration_spells_out_every_default() -> None:
    resolved = resolve_settings(CONFIGS / "serve.yaml")
    assert resolved.settings == Settings()
    assert "default" not in resolved.origins.values()


def test_every_option_is_documented_and_its_default_is_valid() -> None:
    options = list_options()
    assert len({option.flag for option in options}) == len(options)
    for option in options:
        assert option.doc.endswith("."), option.name
        assert option.kind.check(option.default) is None, option.name


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
NAMES = st.sampled_from(["server", "cache", "port", "n_tokens", "page_size", "<<", ""]) | st.text(max_size=6)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)
)
PIECES = [
    "server: ",
    "port: ",
    "  ",
    "\n",
    "- ",
    "[",
    "]",
    "{",
    "}",
    "&a ",
    "*a",
    "!!int ",
    "!!set ",
    "'",
    '"',
]
PIECES += [": ", "? ", "1", "~", "#", "\t", "\x00", "é", "%", "---", "...", "!!timestamp ", "<<: ", "|", ">"]
FILES = (
    st.text(max_size=40)
    | st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
    | TREES.map(lambda tree: str(yaml.safe_dump(tree, allow_unicode=True)))
)


def complaint(path: Path | None, env: dict[str, str] | None = None) -> str | None:
    """One line of complaint, or None; any other exception is the test's failure."""
    try:
        resolve_settings(path, env)
    except ConfigError as error:
        return str(error)
    return None


@given(text=FILES)
def test_no_text_raises_anything_but_a_config_error(tmp_path_factory: Any, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert "\n" not in (complaint(path) or "")


@given(tree=TREES, option=st.sampled_from(list_options()))
def test_no_value_of_a_known_option_raises_anything_but_a_config_error(
    tmp_path_factory: Any, tree: Any, option: Option
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_text(
        yaml.safe_dump({option.section: {option.key: tree}}, allow_unicode=True), encoding="utf-8"
    )
    text = complaint(path)
    assert text is None or text.startswith(f"{path}:")


@given(
    section=st.sampled_from(["SERVER", "CACHE", "X"]),
    key=st.sampled_from(["PORT", "MODE", ""]),
    text=st.text(),
)
def test_no_variable_raises_anything_but_a_config_error(section: str, key: str, text: str) -> None:
    text = complaint(None, {f"ASTRAI_{section}__{key}": text}) or "ASTRAI_"
    assert text.startswith("ASTRAI_")


def test_defaults_that_the_engine_has_too_are_the_engines() -> None:
    from astrai_triton.engine.budget import POLICIES
    from astrai_triton.engine.queue import MAX_OVERTAKEN

    limits = Settings().limits
    assert limits.max_overtaken == MAX_OVERTAKEN
    kinds = {option.name: option.kind for option in list_options()}
    policy = kinds["limits.policy"]
    assert isinstance(policy, Choice)
    assert set(policy.values) == set(POLICIES)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("limits:\n  policy: fair\n", "s.yaml:2: limits.policy: wanted budget or fcfs, got 'fair'"),
        ("limits:\n  max_overtaken: -1\n", "s.yaml:2: limits.max_overtaken: wanted an integer from 0 to"),
        ("api:\n  debug: 1\n", "s.yaml:2: api.debug: wanted true or false, got 1"),
        ("api:\n  keys_file: [a]\n", "s.yaml:2: api.keys_file: wanted a path or null, got ['a']"),
        (
            "server:\n  keys_file: a\n",
            "s.yaml:2: unknown key 'keys_file' in section 'server'; it belongs under",
        ),
    ],
)
def test_keys_policy_and_debugging_are_checked_like_everything_else(
    write: Any, text: str, problem: str
) -> None:
    assert error_of(write(text)).startswith(problem)
