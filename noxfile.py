"""All chores of the project: each session builds its own environment with pip and runs alone on a fresh machine."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

PROJECT = nox.project.load_toml("pyproject.toml")


PINS = PROJECT["tool"]["lightning-ddp-losses"]["constraints"]


def constraints(session: nox.Session) -> tuple[str, str]:
    """Return pip's option for the constraints of pyproject.toml."""
    file = Path(session.create_tmp()) / "constraints.txt"
    file.write_text("\n".join(PINS) + "\n")
    return "-c", str(file)


def install(session: nox.Session, *groups: str, extras: str = "") -> None:
    """Install the project and dependency groups under the constraints of pyproject.toml."""
    option = constraints(session)
    # torch first and alone: a resolver that sees an open range may download a build with gigabytes of CUDA
    session.install(*option, *(pin for pin in PINS if pin.startswith("torch==")))
    dependencies = nox.project.dependency_groups(PROJECT, *groups) if groups else ()
    session.install(*option, "-e", f".{extras}", *dependencies)


@nox.session
def fit(session: nox.Session) -> None:
    """Train ArcFace on the digits with two ranks; further arguments go to `ddp-losses fit`."""
    install(session, extras="[demo]")
    arguments = session.posargs or ["--config", "configs/digits_arcface.yaml"]
    session.run("ddp-losses", "fit", *arguments)


@nox.session
def audit(session: nox.Session) -> None:
    """Compare two ranks with one process on the digits; further arguments go to `ddp-losses audit`."""
    install(session, extras="[demo]")
    arguments = session.posargs or ["--config", "configs/digits_arcface.yaml"]
    session.run("ddp-losses", "audit", *arguments)


# a test whose ranks wait for each other leaves a core to another one
WORKERS = min(4, len(os.sched_getaffinity(0)) + 1) if hasattr(os, "sched_getaffinity") else 3
PYTEST = ("pytest", "-n", str(WORKERS), "--dist", "worksteal")
# in turn: pytest leaves out what lies inside a folder that it has been given
SLOW = (("-m", "slow", "tests"), ("tests/slow",))
EVERYTHING = (("tests",), *SLOW)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests."""
    install(session, "test", extras="[demo]")
    session.run("python", "-m", *PYTEST, *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Run what takes long and rarely breaks: launchers, whole commands, the matrix of modes, the rest of long products."""
    install(session, "test", extras="[demo]")
    for chosen in SLOW:
        session.run("python", "-m", *PYTEST, *chosen, *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Run the tests with processes that die, come back, or never come."""
    install(session, "test", extras="[demo]")
    session.run("python", "-m", "pytest", "tests/faults", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Train 2,000 steps on three ranks to which something happens every 200 steps; a few minutes."""
    install(session, "test", extras="[demo]")
    session.run("python", "-m", "pytest", "tests/faults/soak.py", *session.posargs)


# what torchft asks for beside torch, which it would bring with gigabytes of CUDA
OF_TORCHFT = ("opentelemetry-api>=1.39", "opentelemetry-sdk>=1.39", "opentelemetry-exporter-otlp-proto-http>=1.39")


@nox.session
def torchft(session: nox.Session) -> None:
    """Run the tests with replicas that come and go, as torchft keeps them."""
    install(session, "test", extras="[demo]")
    session.install("--no-deps", "torchft==0.2.0")
    session.install(*OF_TORCHFT)
    session.run("python", "-m", "pytest", "tests/torchft", *session.posargs)


@nox.session
def integrations(session: nox.Session) -> None:
    """Run the tests in other hosts: Fabric, accelerate, Hugging Face's Trainer, sentence-transformers."""
    install(session, "test", "integrations", extras="[demo]")
    session.run("python", "-m", "pytest", "tests/integrations", *session.posargs)
    # the oldest release of the host whose factor is read, too
    session.install("transformers==5.23.*")
    session.run("python", "-m", "pytest", "tests/integrations/test_hf_trainer.py", "tests/integrations/test_pages.py")


@nox.session
def oldest(session: nox.Session) -> None:
    """Run the tests with the oldest releases that are promised, torch too: several GB, which CI does not load."""
    lower = [re.sub(r"\[.*\]", "", d).split(",")[0].replace(">=", "==") for d in PROJECT["project"]["dependencies"]]
    session.install("-e", ".[demo]", *lower, *nox.project.dependency_groups(PROJECT, "test"))
    # which fsdp2_ddp_losses refuses, as they do not mark what is divided
    without_fsdp = ("-k", "not fsdp and not ModelParallel and not that_is_divided")
    for chosen in EVERYTHING:
        session.run("python", "-m", *PYTEST, *without_fsdp, *chosen, *session.posargs)


@nox.session
def newest(session: nox.Session) -> None:
    """Run the tests with the newest releases of everything, torch too: several GB, which CI does not load."""
    dependencies = nox.project.dependency_groups(PROJECT, "test")
    session.install("--upgrade", "-e", ".[demo]", *dependencies)
    for chosen in EVERYTHING:
        session.run("python", "-m", *PYTEST, *chosen, *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Compare randomised cases on ranks with one process: `--minutes 3 --seed 0`."""
    install(session, "test", extras="[demo]")
    session.run("python", "-m", "tests.fuzz", *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """Run the tests with the coverage of every rank process and of the commands that they start; takes twice as long."""
    install(session, "test", extras="[demo]")
    # ranks and commands stand in folders of their own, and each writes its part here
    session.env["COVERAGE_FILE"] = str(Path(".coverage").absolute())
    session.run("coverage", "erase")
    for chosen in EVERYTHING:
        session.run("coverage", "run", "-m", *PYTEST, *chosen, *session.posargs)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install(*constraints(session), *nox.project.dependency_groups(PROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


def code_lines(path: Path) -> int:
    """Return the lines of a file that are neither empty, nor comments, nor part of a docstring."""
    text = path.read_text()
    rows, prose = text.splitlines(), set[int]()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node) is not None:
            docstring = node.body[0]
            prose.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return sum(
        bool(row.strip()) and not row.strip().startswith("#") and i not in prose for i, row in enumerate(rows, 1)
    )


@nox.session(venv_backend="none")
def size(session: nox.Session) -> None:
    """Print how large the package is: code lines and files by folder."""
    folders: dict[Path, list[int]] = {}
    for path in sorted(Path("lightning_ddp_losses").rglob("*.py")):
        folders.setdefault(path.parent, []).append(code_lines(path))
    for folder, lines in folders.items():
        session.log(f"{sum(lines):6d} code lines in {len(lines):3d} files: {folder}")
    total = [number for lines in folders.values() for number in lines]
    session.log(f"{sum(total):6d} code lines in {len(total):3d} files: the package")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy, strictly, and what a user writes with pyright too."""
    install(session, "types", extras="[demo]")
    session.run("mypy")
    # the oldest and the newest Python
    for version in ("3.10", "3.13"):
        session.run("mypy", "--python-version", version)
    session.run("pyright", "tests/typing")


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks side by side with their peers; their cases and ranks are the tests' own."""
    install(session, "test", extras="[demo]")
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Check and measure on a GPU, with the packages of the interpreter that runs nox: `--part a` to `e`, `--device pretend`."""
    session.run(sys.executable, "-m", "benchmarks", "gpu", *session.posargs)


def broken_links(site: Path) -> list[str]:
    """Return the links of HTML pages to other pages, and to places in pages, that are not there."""
    texts = {page.resolve(): page.read_text() for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    broken = set()
    for page, text in texts.items():
        for link in re.findall(r'<a [^>]*?href="([^":$]*)"', text):
            path, _, anchor = link.partition("#")
            target = page
            if path:
                target = (page.parent / path).resolve()
            if not target.exists() or (anchor and anchor not in anchors[target]):
                broken.add(f"{page.name}: {link}")
    return sorted(broken)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the manual as HTML, with a search: site/index.html; a link to nowhere is an error."""
    install(session, "docs", extras="[demo]")
    session.run("python", ".docs/build.py", "site")
    if broken := broken_links(Path("site")):
        session.error("The manual has links to nowhere:\n" + "\n".join(broken))
    session.log("The manual is site/index.html.")


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel and the source distribution."""
    session.install(*nox.project.dependency_groups(PROJECT, "build"))
    session.run("python", "-m", "build")
