"""How large the models and arrays are: as on a GPU, or small enough to try the command on a CPU."""

import dataclasses

import jax
import jax.numpy as jnp

from benchmarks import models


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The sizes of all parts.

  Attributes:
    copied: megabytes of the array whose copy measures the device's bandwidth.
    resnet: the network of images.
    images: batch size, side.
    gpt2: the transformer that is fine-tuned.
    tokens: batch size, length of its sequences.
    cut: transformers trained on sequences of several lengths.
    cut_tokens: tokens of their batches.
    cut_lengths: by width, the lengths that a batch is cut into.
    subspaces: numbers of params.
    components: dimensions of a subspace.
    permuted: shapes of kernels for SGPerm.
    replicas: numbers of replicas and of their params for AdaSum.
    calls: train steps in one measurement.
    steps: steps of an optimizer in one program.
  """

  copied: int
  resnet: models.ResNet
  images: tuple[int, int]
  gpt2: models.GPT2
  tokens: tuple[int, int]
  cut: models.GPT2
  cut_tokens: int
  cut_lengths: dict[int, tuple[int, ...]]
  subspaces: tuple[int, ...]
  components: int
  permuted: tuple[tuple[int, int], ...]
  replicas: tuple[int, int]
  calls: int
  steps: int


def transformer(width: int, length: int, layers: int = 8) -> models.GPT2:
  """A transformer of bytes, in bfloat16 and with cuDNN's attention where the device is a GPU."""
  on_gpu = jax.default_backend() == "gpu"
  return models.GPT2(
    layers=layers,
    width=width,
    heads=max(1, width // 64),
    vocabulary=256,
    length=length,
    dtype=jnp.bfloat16 if on_gpu else jnp.float32,
    rotary=True,
    rematerialized=False,
    attention="cudnn" if on_gpu else None,
  )


def large() -> Sizes:
  return Sizes(
    copied=1000,
    resnet=models.ResNet(),
    images=(128, 224),
    gpt2=models.GPT2(),
    tokens=(8, 512),
    cut=transformer(512, 8192),
    cut_tokens=32_768,
    cut_lengths={512: (8192, 4096, 1024, 256, 64), 1024: (8192, 4096, 1024, 256)},
    subspaces=(10**6, 10**7, 10**8),
    components=32,
    permuted=((1024, 1024),) * 20,
    replicas=(8, 25_000_000),
    calls=10,
    steps=20,
  )


def small() -> Sizes:
  tiny = models.GPT2(layers=2, width=16, heads=2, vocabulary=32, length=16, dtype=jnp.float32)
  return Sizes(
    copied=1,
    resnet=models.ResNet(blocks=(1,), width=4, classes=10, dtype=jnp.float32),
    images=(4, 32),
    gpt2=tiny,
    tokens=(2, 8),
    cut=transformer(16, 64, layers=1),
    cut_tokens=64,
    cut_lengths={16: (64, 16)},
    subspaces=(10**3,),
    components=4,
    permuted=((16, 8),) * 2,
    replicas=(4, 1000),
    calls=2,
    steps=2,
  )
