"""The subspace of a weight trajectory."""

from typing import NamedTuple

import jax
import optax


class Subspace(NamedTuple):
  """An affine subspace of the params, as PCA of their snapshots finds it.

  Attributes:
    mean: the mean of the snapshots, like the params.
    basis: the components, a tree like the params with leaves of shape ``[k, *leaf.shape]``.
    explained_variance: ``[k]``, the snapshots' variance along each component.
    explained_variance_ratio: ``[k]``, the same over their total variance.
  """

  mean: optax.Params
  basis: optax.Params
  explained_variance: jax.Array
  explained_variance_ratio: jax.Array
