""":class:`DeviceSums`: a window's sum of gradients on each of the devices that divide a batch.

Each device adds the gradients of its own rows, and the sums of all devices are added once, when the
window ends. So a micro-batch sends no gradients. A leaf of the accumulator has a leading axis with
an entry for each device, and lies on the devices along this axis.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _arrays, _checks, _types
from optax_boost._step import _slots

P = jax.sharding.PartitionSpec


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceSums:
  """The devices that divide a batch.

  Attributes:
    batch: how the arrays of a batch lie on the devices.
  """

  batch: jax.sharding.NamedSharding

  @property
  def axes(self) -> tuple[str, ...]:
    """Returns the mesh axes along which a batch is divided."""
    return tuple(jax.tree.leaves(tuple(self.batch.spec)))

  def init(self, params: optax.Params) -> optax.Updates:
    """Returns the sums of an empty window, each on its device."""
    count = math.prod(self.batch.mesh.shape[axis] for axis in self.axes)

    def zeros(x: jax.Array) -> jax.Array:
      dtype = _arrays.accumulator_dtype(x.dtype)
      sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
      return jnp.zeros((count, *x.shape), dtype, device=self.sharding(sharding))

    return jax.tree.map(zeros, params)

  def sharding(self, param_sharding: Any) -> jax.sharding.NamedSharding:
    """Returns the sharding of the sums of a param's gradient."""
    on_mesh = getattr(param_sharding, "mesh", None) == self.batch.mesh
    spec = param_sharding.spec if on_mesh and not self._shared_axes(param_sharding) else ()
    return jax.sharding.NamedSharding(self.batch.mesh, P(self.axes, *spec))

  def _shared_axes(self, sharding: Any) -> set[str]:
    return {*self.axes} & {*jax.tree.leaves(tuple(getattr(sharding, "spec", None) or ()))}

  def check_whole(self, param_sharding: Any) -> None:
    """Raises ValueError if a param's sharding divides it along the axes of the batch."""
    if shared := self._shared_axes(param_sharding):
      raise ValueError(
        "`accumulate(..., batch_sharding=...)` keeps the whole gradient on each device, so params"
        f" can't be sharded over the axes of the batch, as in FSDP; got params sharded over"
        f" {sorted(shared)}. Leave `batch_sharding` out: gradients then are sharded like the"
        " params, and reduced in each micro-batch."
      )

  def reduce(self, sums: optax.Updates) -> optax.Updates:
    """Adds up the sums of all devices; returns the total on each, in place of its own sum."""
    own = P(self.axes)
    return self._on_devices(lambda sums: jax.lax.psum(sums, self.axes), (own,), own)(sums)

  def total(self, reduced: optax.Updates) -> optax.Updates:
    """Returns the total of which :meth:`reduce` has made a copy for each device."""
    first = lambda sums: jax.tree.map(lambda x: x[0], sums)  # noqa: E731
    return self._on_devices(first, (P(self.axes),), P())(reduced)

  def map(
    self, function: Callable[..., Any], sums: optax.Updates, batch: _types.Batch, *whole: Any
  ) -> Any:
    """Calls ``function(sums, batch, *whole)`` on each device, with its own sums and rows.

    `function` returns a pair of trees: what is the same on all devices, and what is joined along
    the first axis, as the sums are.
    """

    def rows(x: jax.Array) -> jax.sharding.PartitionSpec:
      return P(*self.batch.spec[: jnp.ndim(x)])

    def on_device(sums: optax.Updates, *arguments: Any) -> Any:
      return function(jax.tree.map(lambda x: x[0], sums), *arguments)

    own = P(self.axes)
    in_specs = own, jax.tree.map(rows, batch), *[P()] * len(whole)
    return self._on_devices(on_device, in_specs, (P(), own))(sums, batch, *whole)

  def _on_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    # Without `check_vma`, losses need not mark what differs by device, such as the carry of a scan.
    return jax.shard_map(
      function,
      mesh=self.batch.mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      axis_names={*self.axes},
      check_vma=False,
    )


def find(
  tx: optax.GradientTransformation, opt_state: optax.OptState
) -> tuple[DeviceSums | None, list[bool]]:
  """Returns the devices of `tx`, and for each array of its state if it is a sum of devices."""
  step = _slots.step_of(tx)
  sums = step.accumulation.device_sums if step and step.accumulation else None
  flags = jax.tree.map(lambda _: False, opt_state)
  if sums is not None:
    window = flags.accumulation
    of_sums = jax.tree.map(lambda _: True, window.accumulator)
    flags = flags._replace(accumulation=window._replace(accumulator=of_sums))
  return sums, jax.tree.leaves(flags)


def check(batch_sharding: _types.Unchecked) -> DeviceSums | None:
  """Returns the devices of the argument `batch_sharding`; None for None."""
  if batch_sharding is None:
    return None
  if isinstance(batch_sharding, jax.sharding.NamedSharding) and isinstance(
    batch_sharding.mesh, jax.sharding.Mesh
  ):
    sums = DeviceSums(batch_sharding)
    if sums.axes:
      return sums
  raise TypeError(
    "`batch_sharding` must be the jax.NamedSharding of the batches, whose spec divides their rows"
    ' over devices, as in `jax.NamedSharding(mesh, jax.P("data"))`; got'
    f" {_checks.shorten(batch_sharding)}."
  )
