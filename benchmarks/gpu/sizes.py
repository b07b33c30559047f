"""How large the models and arrays are: as on a GPU, or small enough to try the command on a CPU."""

import dataclasses

import jax.numpy as jnp

from benchmarks import models


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The sizes of all parts.

  Attributes:
    resnet: the network of images.
    images: batch size, side.
    gpt2: the transformer.
    tokens: batch size, length of the sequences.
    many_leaves: how many leaves of 10 x 16.
    subspaces: numbers of params.
    components: dimensions of a subspace.
    permuted: shapes of kernels for SGPerm.
    calls: steps in one measurement.
  """

  resnet: models.ResNet
  images: tuple[int, int]
  gpt2: models.GPT2
  tokens: tuple[int, int]
  many_leaves: int
  subspaces: tuple[int, ...]
  components: int
  permuted: tuple[tuple[int, int], ...]
  calls: int


LARGE = Sizes(
  resnet=models.ResNet(),
  images=(128, 224),
  gpt2=models.GPT2(),
  tokens=(8, 512),
  many_leaves=1000,
  subspaces=(10**6, 10**7, 10**8),
  components=32,
  permuted=((1024, 1024),) * 20,
  calls=20,
)

SMALL = Sizes(
  resnet=models.ResNet(blocks=(1, 1), width=4, classes=10, dtype=jnp.float32),
  images=(4, 32),
  gpt2=models.GPT2(layers=2, width=16, heads=2, vocabulary=32, length=16, dtype=jnp.float32),
  tokens=(2, 8),
  many_leaves=20,
  subspaces=(10**3,),
  components=4,
  permuted=((16, 8),) * 2,
  calls=2,
)
