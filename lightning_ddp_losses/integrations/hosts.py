"""Releases of the hosts that the tests run with."""

from __future__ import annotations

import warnings
from importlib.metadata import version

TESTED = {"sentence-transformers": ("6.2",), "transformers": ("5.23", "5.24"), "accelerate": ("1.15",)}
"""By distribution, the releases that the tests run with."""


def warn_untested(host: str, check: str) -> None:
    """Warn of a release that the tests do not run with.

    Args:
        host: Name of the distribution.
        check: A way to try whether the release works.
    """
    found = version(host)
    if found.rpartition(".")[0] not in TESTED[host]:
        tested = ", ".join(f"{release}.*" for release in TESTED[host])
        warnings.warn(f"{host} {found} is not among the tested releases ({tested}). {check}", stacklevel=3)
