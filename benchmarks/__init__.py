"""Benchmarks: each module here but the helpers has ``main(arguments)``, which returns one dict per row of its tables."""
