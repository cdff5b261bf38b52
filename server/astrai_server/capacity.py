"""How large the KV pool gets: from settings, the model's shape and free memory. Pure functions."""

from __future__ import annotations

import attrs

from astrai_server.config import ConfigError, Settings
from astrai_triton.model.config import ModelConfig

MIB = 1 << 20
# Above this a context costs more memory and start-up time than most people who leave it open expect.
LONGEST_DEFAULT_CONTEXT = 32768
# Tokens a request is expected to hold when the pool's size is left open.
TYPICAL_REQUEST_TOKENS = 2048
# Share of the free memory a pool of open size may take; the rest is for activations and neighbours.
MEMORY_SHARE = 0.5


@attrs.frozen
class PoolPlan:
    """The sizes of a KV pool before it is allocated."""

    max_seq_len: int
    """Tokens of prompt and answer together."""
    n_tokens: int
    """Tokens the pool holds over all requests, a multiple of the page size in paged mode."""
    is_paged: bool
    bytes_per_token: int
    """K and V of one token over all layers."""
    reason: str
    """Where ``n_tokens`` comes from, for people."""

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V."""
        return self.n_tokens * self.bytes_per_token

    @property
    def num_mib(self) -> float:
        """MiB of K and V."""
        return self.num_bytes / MIB

    def count_requests(self, tokens: int, max_batch_size: int) -> int:
        """Requests of ``tokens`` tokens each that run at once, prefixes not shared."""
        slots = tokens if self.is_paged else self.max_seq_len
        return min(max_batch_size, self.n_tokens // slots)


def plan_pool(settings: Settings, model: ModelConfig, item_size: int, free_bytes: int | None) -> PoolPlan:
    """Size the pool.

    Args:
        settings: ``server`` and ``cache`` count.
        model: shape of the model.
        item_size: bytes of one K or V element.
        free_bytes: memory that K and V may come from, weights already taken off; None is unknown.

    Raises:
        ConfigError: ``max_seq_len`` exceeds the model's context, or the pool exceeds ``free_bytes``.
    """
    batch, cache = settings.server.max_batch_size, settings.cache
    bytes_per_token = model.kv_elements_per_token * item_size
    affordable = None if free_bytes is None else int(free_bytes * MEMORY_SHARE) // bytes_per_token
    max_seq_len = _choose_context(settings, model, affordable)
    if cache.mode == "contiguous":
        n_tokens, reason = batch * max_seq_len, f"{batch} requests x {max_seq_len}"
    elif cache.n_tokens is not None:
        n_tokens, reason = cache.n_tokens, "cache.n_tokens"
    else:
        typical = min(max_seq_len, TYPICAL_REQUEST_TOKENS)
        n_tokens, reason = batch * typical, f"{batch} requests x {typical}"
        if n_tokens < max_seq_len:
            n_tokens, reason = max_seq_len, "one whole context"
        n_tokens = -(-n_tokens // cache.page_size) * cache.page_size
        if affordable is not None and n_tokens > affordable:
            n_tokens = affordable // cache.page_size * cache.page_size
            reason = f"{MEMORY_SHARE:.0%} of the free memory"
    plan = PoolPlan(max_seq_len, n_tokens, cache.mode == "paged", bytes_per_token, reason)
    _require_memory(plan, settings, free_bytes)
    return plan


def count_parameters(model: ModelConfig) -> int:
    """Weights of the model, without norms and biases (less than 1 %)."""
    attention = 2 * model.hidden_size * model.head_dim * (model.n_q_heads + model.n_kv_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    tables = 1 if model.tie_embeddings else 2
    return model.n_layers * (attention + mlp) + tables * model.vocab_size * model.hidden_size


def _choose_context(settings: Settings, model: ModelConfig, affordable: int | None) -> int:
    wanted = settings.server.max_seq_len
    if wanted is not None:
        if wanted > model.max_seq_len:
            raise ConfigError(
                f"server.max_seq_len: wanted at most {model.max_seq_len}, the model's context, got {wanted}"
            )
        return wanted
    context = min(model.max_seq_len, LONGEST_DEFAULT_CONTEXT)
    if settings.cache.mode == "contiguous" and affordable is not None:
        context = min(context, affordable // settings.server.max_batch_size)
    return context


def _require_memory(plan: PoolPlan, settings: Settings, free_bytes: int | None) -> None:
    """Refuse a pool that the machine would be killed for, or one that holds nothing."""
    smallest = settings.cache.page_size if plan.is_paged else 2 * settings.server.max_batch_size
    if free_bytes is None or (plan.n_tokens >= smallest and plan.num_bytes <= free_bytes):
        return
    option = "cache.n_tokens" if plan.is_paged else "server.max_seq_len"
    least = max(plan.n_tokens, smallest) * plan.bytes_per_token / MIB
    raise ConfigError(
        f"{option}: wanted a KV pool within the {free_bytes / MIB:.0f} MiB of free memory, "
        f"got {least:.0f} MiB ({plan.n_tokens} tokens x {plan.bytes_per_token} bytes); "
        "lower it or server.max_batch_size"
    )
