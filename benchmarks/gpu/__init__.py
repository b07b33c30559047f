"""Every question that needs a GPU: steps by ``python -m benchmarks.gpu``, trainings beside it."""

# The parts, most wanted first, with the seconds that they should take on an H100: 15 to start a
# process and to make arrays; compiling, which took there 18 s for ResNet-50's first program and 5 s
# for each further one, and on two CPU cores for an H100 0.3 to 9 s for an optimizer
# (`benchmarks/results/devices.md`), and for GPT-2 in a scan and written out 16 and 29 s of its
# processor time; and up to two seconds for a row's steps.
SECONDS = {
  "frozen": 130,
  "backward": 30,
  "windows": 30,
  "wrappers": 35,
  "lars": 25,
  "sequences": 115,
  "resnet50": 75,
  "dim_reduce": 30,
  "adasum": 20,
  "sgperm": 50,
}
