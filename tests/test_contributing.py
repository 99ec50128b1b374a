"""What contributors are told to run exists: sessions that CI, the README and CONTRIBUTING name, and the templates of issues."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import yaml

from tests.processes import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path.read_text() for path in (GITHUB / "workflows").glob("*.yml")}
CI = yaml.safe_load(WORKFLOWS["ci"])
SESSIONS = {
    node.name for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
}


def sessions_of(job: dict[str, Any]) -> set[str]:
    """The sessions that a job of CI runs, by its matrix or by its commands."""
    matrix = job.get("strategy", {}).get("matrix", {})
    rows = [*matrix.get("session", []), *(row.get("session", "") for row in matrix.get("include", []))]
    rows += re.findall(r"nox -s ([a-z0-9 ]+)", " ".join(str(step.get("run")) for step in job["steps"]))
    return {session for row in rows for session in row.split()}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_sessions_of_a_workflow_exist(name: str) -> None:
    jobs = yaml.safe_load(WORKFLOWS[name])["jobs"].values()
    named = set().union(*map(sessions_of, jobs))
    assert named
    assert named <= SESSIONS


def test_the_workflow_runs_what_the_project_calls_ci() -> None:
    commands = re.findall(r"(?:nox -s|alike) ([a-z0-9][a-z0-9 ]*)", (ROOT / ".ci" / "run").read_text())
    named = {session for command in commands for session in command.split()}
    assert named <= sessions_of(CI["jobs"]["sessions"])
    assert named >= {"tests", "slow", "faults", "integrations", "fuzz", "lint", "types", "docs"}


def test_the_quick_tests_of_a_distribution_exist() -> None:
    (files,) = [
        [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "QUICK"
    ]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("page", ["README.md", ".github/CONTRIBUTING.md", ".github/pull_request_template.md"])
def test_the_sessions_of_a_page_exist(page: str) -> None:
    commands = re.findall(r"nox -s ([a-z0-9 ]+)", (ROOT / page).read_text())
    assert {session for command in commands for session in command.split()} <= SESSIONS
    assert commands


@pytest.mark.parametrize("name", ["wrong_gradient", "error_or_hang"])
def test_issues_ask_for_the_doctor(name: str) -> None:
    template = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    asked = {part["id"]: part for part in template["body"] if "id" in part}
    assert "ddp-losses doctor" in asked["doctor"]["attributes"]["label"]
    assert all(part["validations"]["required"] for part in asked.values())
