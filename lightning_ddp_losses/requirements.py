"""The releases that this package requires, read from metadata before any of them is imported.

A release with malware runs it on import, and an old release fails in a way that does not name it. Therefore ``import
lightning_ddp_losses`` reads the versions first. It rejects an unusable package that it would import; ``ddp-losses doctor`` shows all.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from lightning_ddp_losses.errors import format_error

IMPORTED = ("torch", "lightning", "torchmetrics", "pytorch-metric-learning", "xxhash")
"""Packages that ``import lightning_ddp_losses`` loads."""
MALICIOUS = {"lightning": ("2.6.2", "2.6.3")}
"""Releases with malware that steals passwords and keys on import. A mirror may still offer them."""
ADVISORY = "GHSA-w37p-236h-pfx3"


class Installed(NamedTuple):
    """One requirement.

    Attributes:
        name: Name of the package.
        version: The installed version. Empty if it is not installed.
        needs: Versions that this package accepts, in pip's notation.
        is_met: Whether the installed version is one of them.
    """

    name: str
    version: str
    needs: str
    is_met: bool


def version_of(name: str) -> str:
    """Return the version of the package that an import would find, or an empty text, without running code of the package."""
    return next((found.version for found in importlib.metadata.distributions(name=name)), "")


def read() -> list[Installed] | None:
    """Return the requirements of the installed package, without those of extras, or None if only its sources are available."""
    try:
        texts = importlib.metadata.requires("lightning-ddp-losses") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    rows = []
    for wanted in map(Requirement, texts):
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            version = version_of(wanted.name)
            rows.append(Installed(wanted.name, version, str(wanted.specifier), _is_met(wanted, version)))
    return rows


def _is_met(wanted: Requirement, version: str) -> bool:
    """Return whether a version is accepted. A pre-release counts as the release, because device vendors ship versions like 2.11.0a0."""
    if is_malicious(wanted.name, version):
        return False
    try:
        release = Version(version).base_version
    except InvalidVersion:  # missing, or a version in an unknown format
        return False
    return wanted.specifier.contains(release)


def is_malicious(name: str, version: str) -> bool:
    """Return whether a release contains malware."""
    return version in MALICIOUS.get(name, ())


def unmet(rows: Iterable[Installed]) -> list[Installed]:
    """Return the unmet requirements among the packages that the import loads."""
    return [row for row in rows if row.name in IMPORTED and not row.is_met]


def refuse_unusable() -> None:
    """Raise an error unless the packages that the import loads are usable.

    Raises:
        ImportError: A release with malware, or an installed version that this package does not accept, with the installed and the
            required versions. In the ``ddp-losses`` command it is a SystemExit, which only shows the message.
    """
    text = _malware_text() or _versions_text()
    if not text:
        return
    if _is_command():
        sys.exit(f"ddp-losses: {text}")
    raise ImportError(text)


def _malware_text() -> str:
    for name in MALICIOUS:
        version = version_of(name)
        if is_malicious(name, version):
            got = f"one with malware, which steals passwords and keys when it is imported ({ADVISORY})"
            fix = (
                f"lightning_ddp_losses has not imported it. Run: pip uninstall {name}. If anything else has imported it, replace all "
                "passwords, tokens and keys that this account can read. Then install another release, from a source without this one."
            )
            return format_error(f"{name} {version}", expected="another release", got=got, fix=fix)
    return ""


def _versions_text() -> str:
    rows = read() or []
    wrong = unmet(rows)
    if not wrong:
        return ""
    asked = [f"{row.name}{row.needs}" for row in wrong]
    got = [f"{row.name} {row.version or 'missing'}" for row in wrong]
    installed = [f"{row.name} {row.version or 'missing'}" for row in rows]
    quoted = " ".join(f"'{each}'" for each in asked)
    fix = f"Run: pip install {quoted}\nInstalled: Python {sys.version.split()[0]}, {', '.join(installed)}."
    return format_error("import lightning_ddp_losses", expected=", ".join(asked), got=", ".join(got), fix=fix)


def _is_command() -> bool:
    """Return whether this process is the ``ddp-losses`` command, including ``python -m lightning_ddp_losses``."""
    module = ["-m", "lightning_ddp_losses"]
    return Path(sys.argv[0]).stem == "ddp-losses" or sys.orig_argv[1:3] == module
