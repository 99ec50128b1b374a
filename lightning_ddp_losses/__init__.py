"""Distributed losses that are right: W ranks compute the gradient of one process, exactly."""

__version__ = "0.1.0"
