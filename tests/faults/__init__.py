"""Slow tests with real processes that die, stall and come back: `nox -s faults`."""
