"""Releases are read before anything of them is imported: a malicious one is not run, an old one is named."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lightning_ddp_losses import requirements
from tests.processes import ROOT, run_python

IMPORT = ("-c", "import lightning_ddp_losses")
COMMAND = ("-m", "lightning_ddp_losses")
OURS = "Name: lightning-ddp-losses\nVersion: 0.2.0\n"
NEEDED = ("torch>=2.11", "lightning>=2.6,!=2.6.2,!=2.6.3", "torchmetrics>=1.8.2", "pytorch-metric-learning>=2.9")


def install(folder: Path, name: str, metadata: str) -> None:
    info = folder / f"{name.replace('-', '_')}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\n{metadata}")


def planted(folder: Path, name: str, version: str) -> None:
    """Write a release into a folder, with a module that leaves a file where it is imported."""
    install(folder, name, f"Name: {name}\nVersion: {version}\n")
    install(folder, "lightning-ddp-losses", OURS + "".join(f"Requires-Dist: {needed}\n" for needed in NEEDED))
    package = folder / name.replace("-", "_")
    package.mkdir()
    text = f"import pathlib\npathlib.Path({str(folder / 'was-run')!r}).touch()\nraise AttributeError('old')\n"
    (package / "__init__.py").write_text(text)


def run_with(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(*arguments, PYTHONPATH=f"{folder}:{ROOT}")


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
@pytest.mark.parametrize("arguments", [IMPORT, (*COMMAND, "doctor"), (*COMMAND, "--version")], ids=" ".join)
def test_a_release_with_malware_is_named_and_not_imported(
    tmp_path: Path, version: str, arguments: tuple[str, ...]
) -> None:
    planted(tmp_path, "lightning", version)
    done = run_with(tmp_path, *arguments)
    assert done.returncode == 1
    assert f"lightning {version}: expected another release, got one with malware" in done.stderr
    assert "GHSA-w37p-236h-pfx3" in done.stderr
    assert "pip uninstall lightning" in done.stderr
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    ("name", "old", "asked"),
    [
        ("torchmetrics", "1.2.0", "torchmetrics>=1.8.2"),
        ("pytorch-metric-learning", "2.3.0", "pytorch-metric-learning>=2.9"),
    ],
)
@pytest.mark.parametrize("arguments", [IMPORT, (*COMMAND, "doctor")], ids=" ".join)
def test_an_old_release_is_named_with_what_is_installed_and_asked_for(
    tmp_path: Path, name: str, old: str, asked: str, arguments: tuple[str, ...]
) -> None:
    planted(tmp_path, name, old)
    done = run_with(tmp_path, *arguments)
    assert done.returncode == 1
    assert f"expected {asked}, got {name} {old}" in done.stderr
    assert f"pip install '{asked}'" in done.stderr
    # the other versions, as a report of a bug needs them
    assert f"torch {importlib.metadata.version('torch')}" in done.stderr
    assert not (tmp_path / "was-run").exists()
    # a command ends in its message
    assert ("Traceback" in done.stderr) == (arguments == IMPORT)


def test_builds_before_a_release_and_of_other_makers_are_that_release(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["torch>=2.11", "jsonargparse>=4.51,<5", "xxhash>=3.5", "matplotlib>=3.8; extra == 'demo'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    found = {"torch": "2.11.0a0+nv26.1", "jsonargparse": "5.0"}
    monkeypatch.setattr(requirements, "version_of", lambda name: found.get(name, ""))
    rows = {row.name: row for row in requirements.read() or ()}
    assert {name: row.is_met for name, row in rows.items()} == {"torch": True, "jsonargparse": False, "xxhash": False}
    # of what an import does not load, nothing is refused
    assert [row.name for row in requirements.unmet(rows.values())] == ["xxhash"]


def test_sources_that_are_not_installed_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert requirements.read() is None
    requirements.refuse_unusable()


def test_the_metadata_excludes_releases_with_malware() -> None:
    texts = re.findall(r'"(lightning[><=!~][^"]*)"', (ROOT / "pyproject.toml").read_text())
    texts += re.findall("^lightning=.*$", (ROOT / ".github" / "constraints.txt").read_text(), re.MULTILINE)
    asked = [Requirement(text) for text in texts]
    assert len(asked) == 2, "the range that is published, and the constraint"
    for name, versions in requirements.MALICIOUS.items():
        assert name == "lightning"
        for each in asked:
            assert not any(each.specifier.contains(version) for version in versions)


def test_versions_are_read_before_anything_else_is_imported() -> None:
    code = (
        "import sys, importlib.util\n"
        "spec = importlib.util.find_spec('lightning_ddp_losses')\n"
        "package = importlib.util.module_from_spec(spec)\n"
        "sys.modules['lightning_ddp_losses'] = package\n"
        "from lightning_ddp_losses import requirements\n"
        "requirements.refuse_unusable()\n"
        "print(*sys.modules)\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    assert not loaded & {"torch", "lightning", "torchmetrics", "pytorch_metric_learning"}
