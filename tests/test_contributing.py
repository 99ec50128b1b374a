"""What contributors are told to run exists: sessions that CI, the README and CONTRIBUTING name, and the templates of issues."""

from __future__ import annotations

import ast
import re

import pytest
import yaml

from tests.processes import ROOT

GITHUB = ROOT / ".github"
WORKFLOW = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
SESSIONS = {
    node.name for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
}


def test_the_sessions_of_the_workflow_exist() -> None:
    matrices = [job["strategy"]["matrix"] for job in WORKFLOW["jobs"].values()]
    named = [name for matrix in matrices for name in matrix.get("session", [])]
    named += [row["session"] for matrix in matrices for row in matrix["include"]]
    assert {session for name in named for session in name.split()} <= SESSIONS


def test_the_workflow_runs_what_the_project_calls_ci() -> None:
    named = " ".join(WORKFLOW["jobs"]["sessions"]["strategy"]["matrix"]["session"]).split()
    commands = re.findall(r"nox -s ([a-z0-9 ]+)", (ROOT / ".ci" / "run").read_text())
    assert {session for command in commands for session in command.split()} <= set(named)


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
