"""All chores of the project: each session builds its own environment with pip and runs alone on a fresh machine."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

PROJECT = nox.project.load_toml("pyproject.toml")


PYTHONS = [row.rpartition(" ")[2] for row in PROJECT["project"]["classifiers"] if " :: 3." in row]
CHANGELOG = Path("lightning_ddp_losses/cli/pages/about/changelog.md")
NEWEST_PYTHON = max(PYTHONS, key=lambda version: int(version.partition(".")[2]))
CONSTRAINTS = ("-c", ".github/constraints.txt")


def install(session: nox.Session, *groups: str, project: tuple[str, ...] = ("-e", ".[demo]")) -> None:
    """Install the project, or a distribution of it, and dependency groups under the constraints."""
    # torch first and alone: a resolver that sees an open range may download a build with gigabytes of CUDA
    session.install(*CONSTRAINTS, "torch")
    dependencies = nox.project.dependency_groups(PROJECT, *groups) if groups else ()
    session.install(*CONSTRAINTS, *project, *dependencies)


@nox.session
def fit(session: nox.Session) -> None:
    """Train ArcFace on the digits with two ranks; further arguments go to `ddp-losses fit`."""
    install(session)
    arguments = session.posargs or ["--config", "configs/digits_arcface.yaml"]
    session.run("ddp-losses", "fit", *arguments)


@nox.session
def audit(session: nox.Session) -> None:
    """Compare two ranks with one process on the digits; further arguments go to `ddp-losses audit`."""
    install(session)
    arguments = session.posargs or ["--config", "configs/digits_arcface.yaml"]
    session.run("ddp-losses", "audit", *arguments)


# a test whose ranks wait for each other leaves a core to another one
WORKERS = min(4, len(os.sched_getaffinity(0)) + 1) if hasattr(os, "sched_getaffinity") else 3
PARALLEL = ("-n", str(WORKERS), "--dist", "worksteal")
# one run of what is marked and of the folder `slow`, which is a session of its own otherwise
OTHER_FOLDERS = " ".join(name for name in PROJECT["tool"]["pytest"]["ini_options"]["norecursedirs"] if name != "slow")
SLOW = ("-m", "slow", "-o", f"norecursedirs={OTHER_FOLDERS}", "tests")
EVERYTHING = (("tests",), SLOW)


def run_tests(session: nox.Session, *arguments: str) -> None:
    """Run pytest. A job that sets COVERAGE_FILE measures what runs, and `nox -s coverage -- combine` joins the jobs."""
    python: tuple[str, ...] = ("python",)
    if "COVERAGE_FILE" in session.env or "COVERAGE_FILE" in os.environ:
        python = ("coverage", "run")
    session.run(*python, "-m", "pytest", *arguments, *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests."""
    install(session, "test")
    run_tests(session, *PARALLEL)


@nox.session
def slow(session: nox.Session) -> None:
    """Run what takes long and rarely breaks: launchers, whole commands, the matrix of modes, the rest of long products."""
    install(session, "test")
    run_tests(session, *PARALLEL, *SLOW)


@nox.session
def faults(session: nox.Session) -> None:
    """Run the tests with processes that die, come back, or never come."""
    install(session, "test")
    run_tests(session, "tests/faults")


@nox.session
def soak(session: nox.Session) -> None:
    """Train 2,000 steps on three ranks to which something happens every 200 steps; a few minutes."""
    install(session, "test")
    run_tests(session, "tests/faults/soak.py")


@nox.session
def kernels(session: nox.Session) -> None:
    """Run the hand-written kernels on the CPU, by triton's interpreter, and compile them for an H100: triton has 286 MB."""
    install(session, "test")
    session.install("triton==3.6.0")
    session.env["TRITON_INTERPRET"] = "1"
    run_tests(session, "-n", "2", "tests/kernels")


# what torchft asks for beside torch, which it would bring with gigabytes of CUDA
OF_TORCHFT = ("opentelemetry-api>=1.39", "opentelemetry-sdk>=1.39", "opentelemetry-exporter-otlp-proto-http>=1.39")


@nox.session
def torchft(session: nox.Session) -> None:
    """Run the tests with replicas that come and go, as torchft keeps them."""
    install(session, "test")
    session.install("--no-deps", "torchft==0.2.0")
    session.install(*OF_TORCHFT)
    run_tests(session, "tests/torchft")


@nox.session
def integrations(session: nox.Session) -> None:
    """Run the tests in other hosts: Fabric, accelerate, Hugging Face's Trainer, sentence-transformers."""
    install(session, "test", "integrations")
    run_tests(session, "tests/integrations")
    # the oldest release of the host whose factor is read, too
    session.install("transformers==5.23.*")
    session.run("python", "-m", "pytest", "tests/integrations/test_hf_trainer.py", "tests/integrations/test_pages.py")


def install_unpinned(session: nox.Session, *requirements: str) -> None:
    """Install the project and the tests without the constraints: several GB, unless PIP_EXTRA_INDEX_URL names torch's CPU builds."""
    session.install("--upgrade", "-e", ".[demo]", *requirements, *nox.project.dependency_groups(PROJECT, "test"))


@nox.session
def oldest(session: nox.Session) -> None:
    """Run the tests with the oldest releases that are promised, torch too."""
    lower = [re.sub(r"\[.*\]", "", d).split(",")[0].replace(">=", "==") for d in PROJECT["project"]["dependencies"]]
    install_unpinned(session, *lower)
    # which fsdp2_ddp_losses refuses, as they do not mark what is divided
    without_fsdp = ("-k", "not fsdp and not ModelParallel and not that_is_divided")
    for chosen in EVERYTHING:
        run_tests(session, *PARALLEL, *without_fsdp, *chosen)


@nox.session
def newest(session: nox.Session) -> None:
    """Run the tests with the newest releases of everything, torch too."""
    install_unpinned(session)
    for chosen in EVERYTHING:
        run_tests(session, *PARALLEL, *chosen)


@nox.session
def nightly(session: nox.Session) -> None:
    """Run the tests with torch's nightly CPU build and the newest releases of everything else."""
    install_unpinned(session)
    session.install("--upgrade", "--pre", "torch", "--index-url", "https://download.pytorch.org/whl/nightly/cpu")
    run_tests(session, *PARALLEL)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Compare randomised cases on ranks with one process: `--minutes 3 --seed 0`."""
    install(session, "test")
    session.run("python", "-m", "tests.fuzz", *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """Run the tests with the coverage of every rank process and command, in twice the time. `-- combine`: join what jobs measured."""
    # ranks and commands stand in folders of their own, and each writes its part here
    session.env["COVERAGE_FILE"] = str(Path(".coverage").absolute())
    if session.posargs == ["combine"]:
        session.install(*CONSTRAINTS, "coverage[toml]")
    else:
        install(session, "test")
        session.run("coverage", "erase")
        for chosen in EVERYTHING:
            run_tests(session, *PARALLEL, *chosen)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting, and that the workflows give no more rights than they need."""
    session.install(*CONSTRAINTS, *nox.project.dependency_groups(PROJECT, "lint"))
    session.run("zizmor", "--offline", "--quiet", ".github")
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
    install(session, "types")
    session.run("mypy")
    # pyproject.toml names the oldest Python
    session.run("mypy", "--python-version", NEWEST_PYTHON)
    session.run("pyright", "tests/typing")


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks side by side with their peers."""
    install(session, "test")
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the suite on a GPU, with the packages of the interpreter that runs nox: `--part a`, `b`, `c`, `e`, `--device pretend`."""
    session.run(sys.executable, "-m", "tests.gpu", *session.posargs)


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
    install(session, "docs")
    session.run("python", ".docs/build.py", "site")
    if broken := broken_links(Path("site")):
        session.error("The manual has links to nowhere:\n" + "\n".join(broken))
    session.log("The manual is site/index.html.")


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel and the source distribution into an empty dist/. `-- v0.3.0`: check that this tag is the version, with its date."""
    for tag in session.posargs:
        check_tag(session, tag)
    shutil.rmtree("dist", ignore_errors=True)
    session.install(*nox.project.dependency_groups(PROJECT, "build"))
    session.run("python", "-m", "build")
    session.run("twine", "check", "--strict", *map(str, Path("dist").iterdir()))


def check_tag(session: nox.Session, tag: str) -> None:
    """End the session unless a tag is the version of the package, and of the changelog's newest section, which has a date."""
    version = re.findall(r'^__version__ = "(.+)"$', Path("lightning_ddp_losses/__init__.py").read_text(), re.MULTILINE)
    newest = re.findall("^## (.+)$", CHANGELOG.read_text(), re.MULTILINE)[0]
    if [tag] != [f"v{number}" for number in version]:
        session.error(f"tag: expected v{version[0]}, the version of lightning_ddp_losses/__init__.py, got {tag}")
    if not re.fullmatch(re.escape(version[0]) + r" \(\d{4}-\d\d-\d\d\)", newest):
        session.error(f"{CHANGELOG}: expected the newest section to be '{version[0]} (its date)', got {newest!r}")


# minutes, and a test of each kind: exact losses on ranks, the command, the manual, what a distribution has to hold
QUICK = (
    *("tests/losses/test_contract.py", "tests/distributed", "tests/cli", "tests/strategies/test_names.py"),
    *("tests/test_requirements.py", "tests/test_public_names.py", "tests/test_layers.py", "tests/test_contributing.py"),
)


@nox.session
def packaged(session: nox.Session) -> None:
    """Run quick tests with the wheel of dist/, then with the package of its source distribution; further arguments choose other tests."""
    (wheel,), (archive,) = Path("dist").absolute().glob("*.whl"), Path("dist").absolute().glob("*.tar.gz")
    folder = Path(session.create_tmp()).absolute()
    shutil.unpack_archive(archive, folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    install(session, "test", project=(f"{wheel}[demo]",))
    tests = session.posargs or QUICK
    package, aside = source / "lightning_ddp_losses", folder / "aside"
    shutil.rmtree(aside, ignore_errors=True)
    with session.chdir(source):
        # out of the way of the installed wheel
        package.rename(aside)
        session.run("python", "-m", "pytest", *PARALLEL, *tests)
        aside.rename(package)
        session.install("--no-deps", "--force-reinstall", ".")
        session.run("python", "-m", "pytest", *PARALLEL, *tests)
