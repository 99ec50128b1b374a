"""Replicas that come and go, by torchft: `nox -s torchft`, in an environment of its own."""
