"""Every question that needs a GPU: steps by ``python -m benchmarks.gpu``, trainings beside it."""

# The parts, most wanted first, with the seconds that they may take on an H100: ten to start a
# process and to make arrays, what measured compiling took there (ResNet-50 18 s and 5 s for each
# further program) or on two CPU cores for an H100 (`benchmarks/results/devices.md`), and half a
# second to two for each row's steps.
SECONDS = {
  "frozen": 120,
  "wrappers": 45,
  "lars": 35,
  "sequences": 95,
  "resnet50": 75,
  "dim_reduce": 30,
  "adasum": 20,
  "sgperm": 120,
}
