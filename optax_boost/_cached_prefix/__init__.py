"""Activations of a frozen prefix, kept per example."""

from optax_boost._cached_prefix._cache import PrefixCache
from optax_boost._cached_prefix._cache import cache_prefix

__all__ = ["PrefixCache", "cache_prefix"]
