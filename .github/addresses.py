"""Addresses of the project in its metadata: those of the repository whose workflow builds it. Built elsewhere, it has none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def addresses(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the addresses by their names on the package index, from the variables of a GitHub workflow."""
    repository = environment.get("GITHUB_REPOSITORY")
    if repository is None:
        return {}
    source = f"{environment['GITHUB_SERVER_URL']}/{repository}"
    owner, _, name = repository.partition("/")
    # where docs.yml deploys the manual
    site = f"https://{owner.lower()}.github.io/{name}"
    return {
        "Documentation": f"{site}/manual.html",
        "Changelog": f"{site}/manual/changelog.html",
        "Issues": f"{source}/issues",
        "Source": source,
    }


class Addresses(MetadataHookInterface):
    """Hatchling's hook of `pyproject.toml`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the addresses to the metadata that is written."""
        metadata["urls"] = addresses(os.environ)
