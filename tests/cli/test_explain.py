"""`ddp-losses explain`: every fault, every public name and every recipe has a page that a terminal can show."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
import sys
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import lightning_ddp_losses
from lightning_ddp_losses import AuditReport
from lightning_ddp_losses.callbacks import FAULTS, Finding
from lightning_ddp_losses.cli import main, manual, search
from lightning_ddp_losses.cli.manual import find_page, run_explain
from lightning_ddp_losses.errors import DDPLossError, explained_by
from tests.doors import SYMPTOMS, UNUSED, Cause, Diagnosis
from tests.processes import ROOT, run_python

# the builder of the HTML manual is no module of a package
_SPEC = importlib.util.spec_from_file_location("build_manual", ROOT / ".docs" / "build.py")
assert _SPEC is not None
assert _SPEC.loader is not None
build = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(build)


def shown(*arguments: str, width: int = 80, status: int = 0) -> str:
    """What the command shows, on a terminal without colours."""
    file = StringIO()
    assert run_explain(arguments, Console(file=file, width=width, color_system=None)) == status
    text = file.getvalue()
    topic = [word for word in arguments if not word.startswith("-")]
    page = (find_page(topic) if topic else None) or ""
    code = "".join(re.findall(r"^```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)).splitlines()
    assert all(len(line) <= width or line in code for line in text.splitlines())
    assert "…" not in text  # nothing is cut off
    return text


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("topic", ["losses", *manual.readers()])
def test_no_line_of_the_losses_ends_inside_a_word(topic: str, width: int) -> None:
    page, words = find_page([topic]) or "", shown(topic, width=width).split()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 5
    assert {word for row in rows[1:] for word in re.sub("[`|]", "", row).split()} <= {*words}


def test_a_small_table_is_a_table() -> None:
    assert "  gather_with_grad  " in shown("open_clip")
    assert "  • towers" not in shown("open_clip")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_a_page(fault: str) -> None:
    page = manual.fault_page(fault)
    row = FAULTS[fault]
    for part in (row.title, row.symptom, row.effect, row.fix, row.before, row.after, *row.links()[:1]):
        assert part[1:].rstrip(".") in page
    assert find_page([fault.lower()]) == page


def test_the_page_of_a_fault_on_a_terminal() -> None:
    text = shown("F24", width=200)
    parts = [
        "F24: a loss parameter's gradient N times too large on N ranks",
        "How it shows.",
        "What it does to training.",
        "Found by.",
    ]
    parts += [
        "loss = DistributedLossWrapper(ArcFaceLoss(10, 32))",
        "loss = GlobalBatchLoss(ArcFaceLoss(10, 32))",
        "/issues/562",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_the_list_is_by_symptom_and_whole() -> None:
    text = shown("--all", width=110)
    places = [text.index(heading[:60]) for heading in SYMPTOMS.values()]
    assert places == sorted(places)
    assert all(f" {fault}: " in text for fault in FAULTS)


def test_a_number_without_a_fault_says_so() -> None:
    for fault in UNUSED:
        assert "never given to a fault" in flat(shown(fault))


@pytest.mark.parametrize("name", lightning_ddp_losses.__all__)
def test_a_public_name_has_a_page(name: str) -> None:
    text = flat(shown(name.lower(), width=110))
    assert f"from lightning_ddp_losses import {name} {name}(" in text
    # nothing of the docstring is lost
    docstring = getattr(lightning_ddp_losses, name).__doc__
    words = docstring.replace("`", "").replace("*", "").split()
    missing = [word for word in words if word.lower().strip(".:,") not in text.lower().replace("*", "")]
    assert not missing


@pytest.mark.parametrize(
    "topic", ["collectives.all_gather_with_grad", "lightning_ddp_losses.strategies.register_loss_type"]
)
def test_names_below_the_top_level(topic: str) -> None:
    module, _, name = topic.removeprefix("lightning_ddp_losses.").rpartition(".")
    assert f"from lightning_ddp_losses.{module} import {name}" in shown(topic, width=110)


def test_sections_of_a_docstring() -> None:
    text = manual.docstring_as_markdown("""Add.

    Args:
        a: One, of
            many words.
        *more: Others.

    Gradient: that of ``a``, and
        of others.

    Example:
        >>> add(1,
        ...     2)
        3
    """)
    assert text == (
        "Add.\n\n**Args.**\n\n* `a`: One, of\n  many words.\n* `*more`: Others.\n\n**Gradient.** That of `a`, and\nof others.\n\n"
        "**Example.**\n\n```python\n>>> add(1,\n...     2)\n3\n```"
    )


@pytest.mark.parametrize(
    ("topic", "near"),
    [
        ("GlobalBatchLos", "ddp-losses explain GlobalBatchLoss"),
        ("gathr", "ddp-losses explain F20"),
        ("hang backward", "ddp-losses explain F32"),
        ("barlow", "ddp-losses explain barlow_twins"),
        ("experts", "ddp-losses explain global_mean"),
        ("iou", "ddp-losses explain GlobalBatchLoss"),
        ("dice", "ddp-losses explain DifferentiableMetric"),
        ("lovasz", "ddp-losses explain DifferentiableMetric"),
        ("clip", "ddp-losses explain ClipLoss"),
        ("loss is nan", "ddp-losses explain F79"),
        ("hangs", "ddp-losses explain hang: "),
        ("teacher", "ddp-losses explain migrate distillation"),
        ("dropout", "ddp-losses explain global_randomness"),
        ("noise", "ddp-losses explain global_randomness"),
        ("seed", "ddp-losses explain global_randomness"),
        ("diffusion", "ddp-losses explain global_randomness"),
        ("gan", "ddp-losses explain global_randomness"),
    ],
)
def test_an_unknown_topic_names_what_is_near(topic: str, near: str) -> None:
    text = shown(*topic.split(), width=110)
    assert "Pages about" in text
    assert near in text
    assert 1 <= text.count("ddp-losses explain") - text.count("explain --all") <= 3


def test_words_that_no_page_has_lead_to_the_first_page() -> None:
    text = shown("qqqqq", width=110, status=1)
    assert "No page for" in text
    assert "ddp-losses explain --all" in text


def test_words_are_whole() -> None:
    assert "indices" in " ".join(row.effect for row in FAULTS.values())
    assert not re.search(r"explain F\d", shown("dice", width=110))
    assert "from lightning_ddp_losses.ssl import sinkhorn" in shown("sinkhorn", width=110)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp-losses", "explain", "f24"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert "GlobalBatchLoss(ArcFaceLoss(10, 32))" in capsys.readouterr().out


def test_findings_end_with_the_command_that_explains_them() -> None:
    lead = Finding("F24", "gradient of `loss.W`", check="GradientFlowCheck")
    lines = lead.text().splitlines()
    assert lines[-2:] == [FAULTS["F24"].fix, explained_by("F24")]
    followed = Cause(lead, [Finding("SYNC", "gradients", check="GradientFlowCheck")]).text().splitlines()
    assert followed[-2:] == ["  of the same cause: GradientFlowCheck, SYNC, gradients", explained_by("F24")]


def test_diagnoses_end_with_the_command_that_explains_them(tmp_path: Path) -> None:
    known = Diagnosis("F24", "a factor", "seen.", "Do this.")
    report = AuditReport(False, [], [], [], [known, Diagnosis("", "unknown", "seen.", "Look.")], [])
    lines = [line.strip() for line in str(report).splitlines()]
    assert lines[lines.index("Do: Do this.") + 1] == explained_by("F24")
    assert lines[-1] == "Do: Look."
    report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count("ddp-losses explain F24") == 1


def test_every_topic_has_a_page_with_a_stable_address() -> None:
    texts = build.page_texts()
    assert all(f"manual.faults.{fault}" in texts for fault in FAULTS)
    assert all(f"manual.recipes.{name}" in texts for name in (*manual.recipes(), "fabric", "torchrun", "pml"))
    assert all(f"manual.readers.{name}" in texts for name in ("metric_learning", "tokens", "self_supervised"))
    assert {"manual", "manual.faults", "manual.recipes", "manual.readers", "manual.numbers", "manual.losses"} <= {
        *texts
    }


def test_the_indexes_lead_to_every_page(tmp_path: Path) -> None:
    build.write_modules(tmp_path)

    def links(index: str) -> list[str]:
        return re.findall(rf"\]\({index}/(\w+)\.html\)", (tmp_path / "manual" / index / "__init__.py").read_text())

    assert sorted({*links("faults")}) == sorted(FAULTS)
    assert sorted(links("recipes")) == sorted(manual.recipes())
    assert links("readers") == [*manual.readers()]
    # symptoms lead to their part of the index
    start, faults = ((tmp_path / "manual" / name).read_text() for name in ("__init__.py", "faults/__init__.py"))
    for key in SYMPTOMS:
        assert f"(manual/faults.html#{key})" in start
        assert f'<a id="{key}"></a>' in faults


def test_the_search_of_the_site_has_the_pages_and_columns_of_the_terminal() -> None:
    pages = {page["fullname"]: page for page in build.indexed_pages()}
    modules = {*build.page_texts(), *manual.PLACES}
    assert pages.keys() == {page.topic for page in manual.searched_pages()}
    for page in manual.searched_pages():
        assert all(pages[page.topic][column] == getattr(page, column) for column in search.WEIGHTS)
        assert pages[page.topic]["modulename"] in modules
    assert pages["F24"]["modulename"] == "manual.faults.F24"
    assert pages["hang"]["qualname"] == "hang"
    assert pages["migrate pml"]["doc"] == manual.title_of(manual.recipes()["pml"])


def test_the_short_address_of_an_error_leads_to_its_page(tmp_path: Path) -> None:
    build.write_short_addresses(tmp_path)
    expected = {
        "F24": "../manual/faults/F24.html",
        "loop": "../manual/loop.html",
        "pml": "../manual/recipes/pml.html",
        "tokens": "../manual/readers/tokens.html",
        "hang": "../manual/faults.html#hang",
        "GlobalBatchLoss": "../lightning_ddp_losses.html#GlobalBatchLoss",
    }
    for topic, address in expected.items():
        assert f'0; url={address}"' in (tmp_path / "explain" / f"{topic}.html").read_text()
    for error in every_error():
        assert not error.page or (tmp_path / "explain" / f"{error.page}.html").exists()


def test_pages_link_faults_commands_and_names() -> None:
    topics, names = {"--all": "manual/faults.html"}, {name: f"{name}.html" for name in ("F24", "audit")}
    text = "F24, `audit`, `ddp-losses\n  explain --all`, [F24](there), ```F24```"
    linked = build.with_links(text, "manual.faults.F02", topics, names)
    assert linked == (
        "[F24](../../F24.html), [`audit`](../../audit.html), [`ddp-losses\n  explain --all`](../faults.html), [F24](there), ```F24```"
    )
    assert build.with_links("F24", "F24", topics, names) == "F24"


def test_the_package_itself_is_in_the_manual() -> None:
    version = lightning_ddp_losses.__version__
    assert f"\n## {version}\n" in manual.about()["changelog"]
    assert f"version = {{{version}}}" in manual.about()["citation"]
    for name, page in (manual.about() | manual.readers()).items():
        assert build.page_texts()[f"manual.{'readers.' * (name in manual.readers())}{name}"] == page
        assert find_page([name]) == page


def test_the_pictures_of_the_numbers_are_in_the_manual() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(pictures/([^)]+)\)", build.numbers())
    assert sorted(pictures) == sorted(path.name for path in (ROOT / "benchmarks" / "results").glob("*.png"))


def test_the_package_names_every_place_of_a_public_name() -> None:
    assert lightning_ddp_losses.__doc__ is not None
    assert all(f"``{place}``" in lightning_ddp_losses.__doc__ for place in manual.PLACES[1:])


@pytest.mark.parametrize("name", manual.readers())
def test_a_reader_has_the_call_its_cost_recipes_and_faults(name: str) -> None:
    page = manual.readers()[name]
    # code that tests of the README run
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert code in (ROOT / "README.md").read_text()
    assert not re.findall(r"^\{", page, re.MULTILINE)
    assert "| call | communication |" in page
    for line in re.findall(r"^\{losses: (.+)\}$", (manual.PAGES / "readers" / f"{name}.md").read_text(), re.MULTILINE):
        assert all(f"\n| {loss}" in page for loss in line.split(", "))
    commands = re.findall(r"^\* `ddp-losses explain (\w+)`", page, re.MULTILINE)
    assert len(commands) >= 3
    assert {*commands} <= {*manual.recipes()}
    assert len(re.findall(r"^\* `F\d\d`: ", page, re.MULTILINE)) >= 5
    assert f"explain {name}" in shown("readers")
    shown(name)


def test_the_overview_is_by_symptom_and_by_reader() -> None:
    text = flat(shown(width=110))
    for topic in (*SYMPTOMS, *manual.readers()):
        assert f"ddp-losses explain {topic}: " in text
        assert find_page([topic])
    assert all(find_page([topic]) for topic in re.findall(r"^ • ddp-losses explain (\w+)", shown(), re.MULTILINE))
    assert " F32: " in shown("hang")
    assert " F24: " not in shown("hang")


def test_hosts_and_peers_need_no_further_word() -> None:
    for name, text in manual.recipes().items():
        assert find_page([name]) == find_page(["migrate", name]) == text
    assert {*manual.HOSTS} < {*manual.recipes()}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_finding_of_each_fault_ends_with_its_command(fault: str) -> None:
    assert Finding(fault, "it").text().splitlines()[-1] == explained_by(fault)
    assert find_page([fault])


NEED_TRITON = ("kernels.element_kernels", "kernels.launches")


def every_error(root: type[DDPLossError] = DDPLossError) -> list[type[DDPLossError]]:
    for module in pkgutil.walk_packages(lightning_ddp_losses.__path__, "lightning_ddp_losses."):
        if not module.name.endswith(("__main__", "hf_trainer", "sentence_transformers", *NEED_TRITON)):
            importlib.import_module(module.name)
    found = [root]
    for each in found:
        ours = [error for error in each.__subclasses__() if error.__module__.startswith("lightning_ddp_losses")]
        # an example in a docstring makes one of its own
        found += [error for error in ours if hasattr(sys.modules[error.__module__], error.__name__)]
    return found


def test_errors_name_a_page_that_exists_and_all_but_the_general_ones_name_one() -> None:
    errors = every_error()
    assert len(errors) >= 9
    for error in errors:
        if error.page:
            assert find_page([error.page])
            assert error("it").__notes__ == [explained_by(error.page)]
    # of many causes: their text says what to do, and findings inside have commands of their own
    assert {error.__name__ for error in errors if not error.page} == {
        "DDPLossError",
        "ConfigurationError",
        "InputError",
    }


def test_commands_that_messages_name_have_a_page() -> None:
    named = set()
    for path in Path(lightning_ddp_losses.__file__).parent.rglob("*.py"):
        named |= set(
            re.findall(
                r"""ddp-losses explain ((?:migrate )?[\w-]+)|(?:explained_by\(|\bpage=)"(\w+)\"""", path.read_text()
            )
        )
    topics = {topic for pair in named for topic in pair if topic and topic not in ("TOPIC", "loss", "--all")}
    assert {"sentence_transformers", "torchrun", "migrate fabric", "F16", "F61"} <= topics
    assert [topic for topic in topics if not find_page(topic.split())] == []


# loaded where they are used, if at all: each costs some hundredths of what Lightning's import takes
HEAVY = [
    "jsonargparse",
    "matplotlib",
    "pytorch_metric_learning.testers",
    "pytorch_metric_learning.trainers",
    "sklearn",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic",
    "torchmetrics.image",
    "torchmetrics.text",
    "lightning_ddp_losses.cli",
]


@pytest.mark.slow
def test_importing_the_package_brings_little_that_lightning_does_not() -> None:
    """Time is compared in `benchmarks import_time`; here what is loaded is counted."""
    code = "import sys, lightning.pytorch; before = set(sys.modules); import lightning_ddp_losses; print(*set(sys.modules) - before)"
    brought = run_python("-c", code).stdout.split()
    packages = {name.partition(".")[0] for name in brought} - set(sys.stdlib_module_names)
    assert packages == {"lightning_ddp_losses", "pytorch_metric_learning", "xxhash"}
    of_others = [name for name in brought if not name.startswith("lightning_ddp_losses")]
    assert len(of_others) < 110, "losses, miners and reducers to be found among a module's parts are 85"
    assert not [name for name in brought if f"{name}.".startswith(tuple(f"{heavy}." for heavy in HEAVY))]


WITHOUT = """
import importlib, pkgutil, sys

import lightning.pytorch  # torchmetrics imports transformers where it is installed

# packages of development and of other hosts
for name in ("pytest", "hypothesis", "transformers", "accelerate", "sentence_transformers"):
    sys.modules[name] = None
import lightning_ddp_losses
from lightning_ddp_losses.cli.manual import run_explain

for module in pkgutil.walk_packages(lightning_ddp_losses.__path__, "lightning_ddp_losses."):
    of_others = (".testing", ".__main__", ".hf_trainer", ".sentence_transformers", ".element_kernels", ".launches")
    if not any(part in module.name for part in of_others):
        importlib.import_module(module.name)
print([run_explain(topic.split()) for topic in ("GlobalBatchLoss", "loss is nan", "parity", "qqqqq")])
"""


@pytest.mark.slow
def test_the_manual_needs_no_package_of_development() -> None:
    done = run_python("-c", WITHOUT, folder=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 1]"


@pytest.mark.parametrize("name", [name for name, text in manual.recipes().items() if "```python" in text])
def test_the_code_of_a_recipe_is_saved(name: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.py"
    assert run_explain(["migrate", name, "--save", str(file)], Console(file=StringIO())) == 0
    saved = file.read_text()
    ast.parse(saved)
    # what is not commented stands on the page, in its order
    code = [line for line in saved.splitlines() if line and not line.startswith("#")]
    lines = iter(manual.recipes()[name].splitlines())
    assert all(any(line == other for other in lines) for line in code)
    assert code
    with pytest.raises(DDPLossError, match="expected a new file"):
        run_explain(["migrate", name, "--save", str(file)])


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("migrate kubernetes", "expected .yaml, got it.cpp"),
        ("export", "expected .py, got it.cpp"),
        ("citation", "the page has no code"),
    ],
)
def test_code_that_a_page_does_not_have_is_not_saved(topic: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(DDPLossError, match=re.escape(expected)):
        run_explain([*topic.split(), "--save", str(tmp_path / "it.cpp")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "topic", ["own_data", "certificates", "migrate kubernetes", "F55", "fit_numbers", "GlobalBatchLoss"]
)
def test_lines_of_code_are_not_wrapped_whatever_the_width(
    topic: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is copied from a narrow terminal, or from a pipe, is the code of the page."""
    monkeypatch.setenv("COLUMNS", "60")
    assert run_explain(topic.split()) == 0
    shown = capsys.readouterr().out
    page = find_page(topic.split())
    assert page is not None
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        assert f"\n{block.rstrip()}\n" in shown
    # text is wrapped
    code = set("\n".join(blocks).splitlines())
    assert max(len(line) for line in shown.splitlines() if line not in code) <= 60
    if topic == "own_data":
        config = next(block for block in blocks if block.startswith("trainer:"))
        start = shown.index("trainer:")
        assert yaml.safe_load(shown[start : start + len(config)]) == yaml.safe_load(config)
        assert max(map(len, config.splitlines())) > 60
