"""Programs for TPUs and GPUs, compiled without having one: ``python -m benchmarks.devices``."""
