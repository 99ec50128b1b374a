"""Tests with the hosts installed: `nox -s integrations`."""
