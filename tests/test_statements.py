"""What metadata, the README, the workflows and the chores say of versions agrees, and a release is what its tag says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import lightning_ddp_losses
from tests.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((GITHUB / "workflows").glob("*.yml"))}
README = (ROOT / "README.md").read_text()
PINS = dict(re.findall(r"^([\w-]+)==(.+)$", (GITHUB / "constraints.txt").read_text(), re.MULTILINE))
PROMISED = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
STEPS = [
    pytest.param(step, id=f"{name}-{job}-{place}")
    for name, workflow in WORKFLOWS.items()
    for job, described in workflow["jobs"].items()
    for place, step in enumerate(described["steps"])
    if "uses" in step
]


def test_the_oldest_python_is_one() -> None:
    oldest = PROMISED[0]
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    assert f"with Python {oldest} or newer" in README
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"


def test_ci_runs_the_pythons_that_are_promised_and_no_other_counts() -> None:
    jobs = WORKFLOWS["ci"]["jobs"]
    rows = jobs["pythons"]["strategy"]["matrix"]["include"]
    oldest = {
        step["with"]["python-version"] for step in jobs["sessions"]["steps"] if "python-version" in step.get("with", {})
    }
    assert oldest == {PROMISED[0]}
    assert [row["python"] for row in rows if not row.get("may-fail")] == PROMISED[1:]
    assert not {row["python"] for row in rows if row.get("may-fail")} & set(PROMISED)
    assert f"CI runs torch {PINS['torch'].rpartition('.')[0]} on CPython {PROMISED[0]}" in README


def test_what_is_pinned_is_in_the_published_range() -> None:
    published = {}
    for text in PROJECT["project"]["dependencies"]:
        name, versions = re.fullmatch(r"([\w-]+)(?:\[\w+\])?(.*)", text).groups()  # type: ignore[union-attr]
        published[name] = SpecifierSet(versions)
    both = published.keys() & PINS.keys()
    assert both >= {"torch", "lightning", "torchmetrics", "pytorch-metric-learning"}
    assert [name for name in both if not published[name].contains(PINS[name])] == []
    assert f"torch=={PINS['torch']}" in README


def test_a_job_without_a_pinned_torch_takes_its_cpu_build() -> None:
    assert WORKFLOWS["ci"]["env"]["PIP_INDEX_URL"].endswith("/whl/cpu")
    assert [row["session"] for row in WORKFLOWS["ci"]["jobs"]["releases"]["strategy"]["matrix"]["include"]] == [
        "oldest",
        "newest",
        "nightly",
    ]


def test_one_mark_needs_all_jobs() -> None:
    jobs = WORKFLOWS["ci"]["jobs"]
    assert set(jobs["green"]["needs"]) == jobs.keys() - {"green"}
    assert jobs["green"]["if"] == "always()"


@pytest.mark.parametrize("step", STEPS)
def test_actions_are_named_by_commit(step: dict[str, Any]) -> None:
    assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])


@pytest.mark.parametrize("name", WORKFLOWS)
def test_jobs_have_the_rights_they_need(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {}
    writing = {job: rights for job, rights in rights_of(workflow).items() if "write" in rights.values()}
    expected = {"ci": set(), "docs": {"deploy"}, "publish": {"attest", "testpypi", "pypi"}}
    assert writing.keys() == expected[name]


def rights_of(workflow: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {job: described["permissions"] for job, described in workflow["jobs"].items()}


def test_what_is_published_was_tested() -> None:
    """An upload follows the tests of the distributions that one job has built."""
    jobs = WORKFLOWS["publish"]["jobs"]
    assert [jobs[job]["needs"] for job in ("test", "attest", "testpypi", "pypi")] == ["build", "test", "test", "attest"]
    building = [job for job, described in jobs.items() if "nox -s build" in str(described)]
    assert building == ["build"]


def test_the_source_distribution_holds_what_its_tests_read() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    # hatchling adds these by itself
    included += ["pyproject.toml", ".gitignore"]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.fail("git cannot list the files of this checkout") if (ROOT / ".git").exists() else None
        tops = {path.name for path in ROOT.iterdir() if path.name in included}
    else:
        tops = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert tops <= set(included)


def module_of(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_addresses_are_those_of_the_repository_that_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    hatchling = type(sys)("hatchling.metadata.plugin.interface")
    hatchling.MetadataHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", hatchling)
    addresses = module_of(GITHUB / "addresses.py").addresses
    assert addresses({}) == {}
    found = addresses({"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "Some/losses"})
    assert found == {
        "Documentation": "https://some.github.io/losses/manual.html",
        "Changelog": "https://some.github.io/losses/manual/changelog.html",
        "Issues": "https://github.com/Some/losses/issues",
        "Source": "https://github.com/Some/losses",
    }


def test_a_section_of_the_changelog_goes_by_kind_with_what_breaks_first() -> None:
    text = (Path(lightning_ddp_losses.__file__).parent / "cli/pages/about/changelog.md").read_text()
    newest = text.split("\n## ")[1]
    kinds = re.findall("^### (.+)$", newest, re.MULTILINE)
    assert kinds == [kind for kind in ("Breaking", "Added", "Changed", "Fixed") if kind in kinds]
    before, *parts = newest.split("\n### ")
    assert "* " not in before
    assert all("\n* " in part for part in parts)
