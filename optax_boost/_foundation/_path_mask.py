"""``path_mask``: a mask that selects leaves by their paths."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from optax_boost._foundation import _checks, _patterns, _selectors, _types


def path_mask(*patterns: str) -> Callable[[_types.Params], _types.Tree]:
  """Makes a mask for ``optax.masked`` that selects leaves by their paths.

  Args:
    *patterns: what to select, with the rules of a ``.gitignore`` file. A leaf's path is the names
      of its keys with slashes between them. A dot separates names, too, in paths and patterns.

      - ``bias`` selects each leaf of this name, and all leaves below each module of this name, at
        any depth; not ``bias_2``.
      - In one name, ``*`` matches any characters (``*norm*``), ``?`` matches one, ``[0-3]`` one of
        these, and ``[!0-3]`` any other one. A leaf or module with brackets in its name is selected
        by this name.
      - A pattern with a slash begins at the root: ``blocks/1`` selects ``blocks/1/kernel``, but not
        ``blocks/10/kernel``; ``/bias`` selects ``bias`` at the root alone.
      - ``**`` matches any number of names: ``**/attn/kernel``, ``blocks/**/bias``.
      - A bar is between patterns of which one must match: ``head|*norm*``.

  Returns:
    A function from params to a tree of bools, True for the leaves whose path a pattern matches.
    A pattern that matches nothing raises :class:`NoEffectWarning`.

  Raises:
    TypeError: a pattern is not a string; or, when the mask is called, it gets a count of steps in
      the place of params, as ``optax.inject_hyperparams`` passes to a function that is not in its
      ``static_args``.
    ValueError: a pattern is a regular expression (``kernel$``, ``.*bias``, ``(a|b)/w``), has no
      name, or has a bracket that is not closed.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> params = {"conv": {"kernel": jnp.ones((3, 3, 1, 8)), "bias": jnp.ones(8)}}
    >>> optax_boost.path_mask("kernel")(params)
    {'conv': {'bias': False, 'kernel': True}}
    >>> decay = optax.masked(optax.add_decayed_weights(1e-4), optax_boost.path_mask("kernel"))
  """
  for pattern in patterns:
    _patterns.compile_pattern("patterns", pattern)

  def mask(params: _types.Params) -> _types.Tree:
    if _is_count(params):
      raise TypeError(
        f"`path_mask` selects leaves of a tree of params; got {_checks.shorten(params)}, a count of"
        " steps: `optax.inject_hyperparams` takes a function for a schedule, unless its argument is"
        ' in `static_args`. Write `optax.inject_hyperparams(optax.adamw, static_args=("mask",))`.'
      )
    selected = _selectors.select(params, patterns, "patterns")
    return jax.tree.unflatten(jax.tree.structure(params), selected)

  return mask


def _is_count(params: _types.Unchecked) -> bool:
  """Returns whether the place of params has a scalar integer, which no optimizer trains."""
  if not _checks.is_any_array(params) or jnp.ndim(params):
    return False
  return jnp.issubdtype(jnp.result_type(params), jnp.integer)
