"""Numbers in two words, ``(2, ...)``: the unevaluated sum of a float and a much smaller one.

Source: Dekker, "A floating-point technique for extending the available precision", 1971.
"""

import jax
import jax.numpy as jnp


def words(x: jax.Array) -> jax.Array:
  return jnp.stack([x, jnp.zeros_like(x)])


def fast_two_sum(a: jax.Array, b: jax.Array) -> jax.Array:
  """The sum of two floats without an error, for |a| >= |b|."""
  total = a + b
  return jnp.stack([total, b - (total - a)])


def head(x: jax.Array) -> jax.Array:
  """`x` rounded to half of its bits."""
  info = jnp.finfo(x.dtype)
  return jax.lax.reduce_precision(x, info.nexp, info.nmant // 2)


def add(x: jax.Array, y: jax.Array) -> jax.Array:
  total = x[0] + y[0]
  part = total - x[0]
  error = (x[0] - (total - part)) + (y[0] - part)
  return fast_two_sum(total, error + (x[1] + y[1]))


def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
  product = x[0] * y[0]
  x_head, y_head = head(x[0]), head(y[0])
  x_tail, y_tail = x[0] - x_head, y[0] - y_head
  error = ((x_head * y_head - product) + x_head * y_tail + x_tail * y_head) + x_tail * y_tail
  return fast_two_sum(product, error + (x[0] * y[1] + x[1] * y[0]))


def divide(x: jax.Array, y: jax.Array) -> jax.Array:
  quotient = x[0] / y[0]
  rest = add(x, -multiply(words(quotient), y))
  return fast_two_sum(quotient, (rest[0] + rest[1]) / y[0])
