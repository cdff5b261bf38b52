"""API keys: where they come from, and whose a request is.

A key is only ever compared, by its SHA-256. What is logged, counted and shown is the key's name.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from astrai_server.problem import ApiKeyError
from astrai_server.settings import Settings
from astrai_server.source import ConfigError

ENV_KEYS = "ASTRAI_API_KEYS"
"""Variable with keys, separated by commas."""
MIN_KEY_CHARS = 16
MAX_FILE_BYTES = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
# What RFC 6750 lets stand after "Bearer".
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_COMMENT = re.compile(r"(^|\s)#.*")


@attrs.frozen
class ApiKey:
    """One key as the server keeps it."""

    name: str
    digest: bytes = attrs.field(repr=False)
    """SHA-256 of the key."""


class KeyRing:
    """All keys of a server.

    Args:
        keys: none of them lets everybody in, without a name.
    """

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the keys, in the order in which they were read."""
        return tuple(key.name for key in self._keys)

    def authenticate(self, headers: Mapping[str, str]) -> str | None:
        """Tell whose request it is, by ``Authorization: Bearer`` or else by ``x-api-key``.

        Returns:
            The name of the key; None where no key is asked for.

        Raises:
            ApiKeyError: no valid key.
        """
        if not self._keys:
            return None
        presented = list(_read_credentials(headers))
        for secret in presented:
            name = self._find(secret)
            if name is not None:
                return name
        raise ApiKeyError(was_given=bool(presented))

    def _find(self, secret: str) -> str | None:
        """Compares with every key, found or not, so that the time tells nothing about them."""
        digest = _digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.name
        return found


def load_keys(settings: Settings, env: Mapping[str, str]) -> KeyRing:
    """Collect the keys of ``api.keys_file`` and of the environment; all of them are valid.

    Each is ``name: key`` or the key alone, which is then called key-1, key-2, ... by its place among all. In
    the file, one a line; blank lines and comments (``#`` at the start or after a space) are passed over, and
    quotes around a key are taken off. In ``ASTRAI_API_KEYS``, separated by commas.

    Args:
        settings: ``api.keys_file`` counts, and what makes no sense without keys.
        env: environment variables.

    Raises:
        ConfigError: the file cannot be read or holds no key; a key that is too short, has an odd character or
            occurs twice; a name that does; a setting that needs keys where there are none. Never names a key.
    """
    entries: list[tuple[str, str]] = []
    if settings.api.keys_file is not None:
        entries += _read_file(Path(settings.api.keys_file).expanduser())
    if ENV_KEYS in env:
        items = env[ENV_KEYS].split(",")
        entries += [(f"{ENV_KEYS}: key {number}", item.strip()) for number, item in enumerate(items, start=1)]
    keys: list[ApiKey] = []
    places: dict[str | bytes, str] = {}
    for place, text in entries:
        key = _parse_entry(text, place, f"key-{len(keys) + 1}")
        for seen, noun in ((key.digest, "this key"), (key.name, f"the name {key.name!r}")):
            if seen in places:
                raise ConfigError(f"{place}: {noun} occurs twice, first at {places[seen]}; remove one")
            places[seen] = place
        keys.append(key)
    if not keys:
        _refuse_what_needs_keys(settings)
    return KeyRing(keys)


def _refuse_what_needs_keys(settings: Settings) -> None:
    for name, is_set in (
        ("cache.isolate", settings.cache.isolate),
        ("limits.max_requests_per_key", settings.limits.max_requests_per_key is not None),
    ):
        if is_set:
            raise ConfigError(
                f"{name}: wanted API keys to tell clients apart, got none; set api.keys_file or {ENV_KEYS}"
            )


def _read_file(path: Path) -> list[tuple[str, str]]:
    """Entries of a file with their places."""
    try:
        data = path.read_bytes()
        lines = data.decode("utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"api.keys_file: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"api.keys_file: wanted UTF-8 text in {path}, got other bytes") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"api.keys_file: wanted at most {MAX_FILE_BYTES} bytes, got {len(data)} in {path}")
    texts = ((number, _COMMENT.sub("", line).strip()) for number, line in enumerate(lines, start=1))
    entries = [(f"{path}:{number}", text) for number, text in texts if text not in ("", "---")]
    if not entries:
        raise ConfigError(
            f"api.keys_file: wanted at least one key in {path}, got none; null serves without keys"
        )
    return entries


def _parse_entry(text: str, place: str, default_name: str) -> ApiKey:
    name, colon, secret = (part.strip() for part in text.rpartition(":"))
    if not colon:
        name = default_name
    elif _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{place}: wanted a name of at most 64 letters, digits and . _ @ - before the colon, got "
            "something else; a key holds no colon"
        )
    if len(secret) >= 2 and secret[0] == secret[-1] and secret[0] in "'\"":
        secret = secret[1:-1]
    if len(secret) < MIN_KEY_CHARS:
        raise ConfigError(
            f"{place}: wanted a key of at least {MIN_KEY_CHARS} characters, got {len(secret)}; "
            "openssl rand -hex 32 makes one"
        )
    if _KEY.fullmatch(secret) is None:
        raise ConfigError(
            f"{place}: wanted a key of letters, digits and . _ ~ + / -, got another character in it; "
            "openssl rand -hex 32 makes one"
        )
    return ApiKey(name, _digest(secret))


def _read_credentials(headers: Mapping[str, str]) -> Iterator[str]:
    """What a request presents as keys."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        yield token.strip()
    if headers.get("x-api-key"):
        yield headers["x-api-key"].strip()


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
