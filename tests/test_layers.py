"""Imports go down only, no files import each other in a circle, and third-party packages stay on the layers that need them."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

import lightning_ddp_losses

ROOT = Path(lightning_ddp_losses.__file__).parent
PACKAGE = ROOT.name
TORCH = {"torch", "xxhash"}  # what tensors are made of, and what hashes their memory
TRAINING = TORCH | {"lightning", "torchmetrics", "pytorch_metric_learning"}
REPORTING = TORCH | {"lightning", "rich", "matplotlib"}
# from the ground up: what stands on one layer, and the packages that may be imported there (None: all)
LAYERS: list[tuple[tuple[str, ...], set[str] | None]] = [
    (("errors",), set()),
    (("requirements",), {"packaging"}),
    (("core",), TORCH | {"yaml"}),  # the table of faults is a file of YAML
    (("distributed", "collectives", "sharding"), TORCH),
    (("randomness",), TORCH),
    (("samplers",), TORCH | {"lightning"}),
    (("losses", "metrics", "layers", "strategies", "microbatch"), TRAINING | {"triton"}),  # where torch brings it
    (("ssl", "integrations"), TRAINING | {"sentence_transformers", "transformers"}),  # a host in its own file
    (("callbacks", "audit"), REPORTING),
    (("demo",), None),
    (("cli", "testing"), None),
    (("__init__", "__main__"), None),
]
LAYER_OF = {unit: number for number, (units, _) in enumerate(LAYERS) for unit in units}
# names of torch, Lightning, torchmetrics and pytorch-metric-learning that are not public are read here alone; it imports them
# inside functions, so that `core` needs torch only
COMPAT = {ROOT / "core" / f"{library}_compat.py" for library in ("torch", "lightning", "metrics")}
# subclassing or overriding what a library keeps private: file, then the names it may use and why
PRIVATE_IN_PLACE: dict[str, dict[str, str]] = {
    "cli/app.py": {
        "_add_configure_optimizers_method_to_model": "the optimizer of the command line, which an audit's model has too",
        "_add_arguments": "a subcommand of LightningCLI's adds what its own have",
        "_get": "LightningCLI's reader of a config that may have subcommands",
        "_prepare_subcommand_parser": "overridden: the audit's parser",
        "_run_subcommand": "overridden: the audit runs no method of a trainer",
        "_subcommand_parsers": "the audit's parser knows the callbacks that the user's CLI adds",
    },
    "losses/class_sharded.py": {
        "_apply": "overridden: a move that makes new parameters keeps the tag of the shard",
        "_load_from_state_dict": "overridden: of a full weight this rank's part is kept",
        "_save_to_state_dict": "overridden: a weight that is still to be drawn is drawn before it is saved",
    },
    "metrics/composites.py": {
        "_base_metric": "the member of MinMaxMetric, which is subclassed",
        "_defaults": "the states of a metric, which no public method names",
        "_should_unsync": "torchmetrics' flag around compute, which members of a composite share",
        "_compute_and_reduce": "MetricCollection's names for its values, which no public method gives",
        "_convert_output": "a wrapper's names for its values, which no public method gives",
        "_filter_kwargs": "what a composition and a collection call their members with",
        "_get_args_kwargs_by_output": "MultioutputWrapper's cut of the inputs",
        "_is_suitable_val": "MinMaxMetric's check of its value",
        "_num_vals_seen": "the place in the window of Running, which is subclassed",
        "_to_sync": "torchmetrics' flag for compute: set by a base class, as torchmetrics' own wrappers set it",
        "_wrap_transform": "an input transformer's change of the inputs",
    },
    "metrics/metric.py": {
        "_sync_dist": "overridden: one exchange for all states; the seam that torchmetrics keeps for it",
        "_to_sync": "torchmetrics' flags around compute, which forward sets as the forward that it overrides",
        "_wrap_compute": "overridden: full precision, and a graph that ends there",
        "_wrap_update": "overridden: update with a graph, or with the rows of all ranks",
    },
    "metrics/conversion.py": {
        "_base_metric": "the metric that MetricTracker copies, which is subclassed",
        "_defaults": "the states of a metric as reset leaves them",
        "_reductions": "how a metric joins each state, which no public method gives",
    },
    "metrics/states.py": {
        "_defaults": "the states by name; torchmetrics offers no public list of them",
        "_reduce_states": "overridden: means in their own dtype",
        "_reductions": "the reduction of each state, likewise",
    },
    "strategies/ddp_losses.py": {
        "_configure_launcher": "overridden: processes of the main one send the whole of what is sharded",
        "_launcher": "what that method sets; the property of this name has no setter",
    },
    "strategies/ddp_setup.py": {
        "_collect_rank_zero_results": "overridden: the one place through which a trained state comes back to the main process"
    },
    "testing.py": {
        "_clear_sharding_prop_cache": "what DTensor remembers of a group that has ended; torch has no public way to forget it"
    },
}
# two documented import paths for what lies below them
THIN = {"collectives", "sharding"}
FILES = sorted(ROOT.rglob("*.py"))


def name_of_file(path: Path) -> str:
    return str(path.relative_to(ROOT))


def unit_of_file(path: Path) -> str:
    """The top-level module or subpackage that a file belongs to."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All that stands in a file."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> list[tuple[int, tuple[str, ...]]]:
    """Line and dotted name of each import in a file, nested ones too."""
    package = (PACKAGE, *path.relative_to(ROOT).parts[:-1])
    found: list[tuple[int, tuple[str, ...]]] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = (*base, *(node.module.split(".") if node.module else ()))
            found += [(node.lineno, (*source, alias.name)) for alias in node.names]
    return found


def imported_files(path: Path) -> set[Path]:
    """The files of this package that a file imports."""
    found = set()
    for _, name in imports(path):
        if name[0] != PACKAGE:
            continue
        for depth in range(len(name), 0, -1):
            place = ROOT.parent.joinpath(*name[:depth])
            module, package = place.with_suffix(".py"), place / "__init__.py"
            if module.exists() or package.exists():
                found.add(module if module.exists() else package)
                break
    return found - {path}


@pytest.mark.parametrize("path", FILES, ids=name_of_file)
def test_imports_go_down_only(path: Path) -> None:
    unit = unit_of_file(path)
    assert unit in LAYER_OF, f"{unit}: give it a layer in this test (and in the design)"
    layer, wrong = LAYER_OF[unit], []
    for line, name in imports(path):
        if name[0] != PACKAGE:
            continue
        target = name[1] if name[1] in LAYER_OF else "__init__"
        if target == unit or name[1] == "__version__":
            continue
        sideways = layer == LAYER_OF[target] and unit not in THIN and unit not in ("__init__", "__main__")
        if LAYER_OF[target] > layer or sideways:
            wrong.append(f"{path.name}:{line} imports {'.'.join(name)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=name_of_file)
def test_third_party_packages_stay_on_their_layer(path: Path) -> None:
    allowed = LAYERS[LAYER_OF[unit_of_file(path)]][1]
    used = {name[0] for _, name in imports(path)} - set(sys.stdlib_module_names) - {PACKAGE}
    if path in COMPAT:
        at_the_top = {
            node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        used = {str(name).split(".")[0] for name in at_the_top} - set(sys.stdlib_module_names) - {PACKAGE}
    assert allowed is None or used <= allowed, f"{path.name} imports {sorted(used - allowed)}"


@pytest.mark.parametrize("path", FILES, ids=name_of_file)
def test_only_process_groups_asks_torch_distributed_for_rank_and_world_size(path: Path) -> None:
    if path.name == "process_groups.py":
        return
    names = {"get_rank", "get_world_size", "new_group", "init_process_group", "destroy_process_group"}
    if path.name == "rendezvous.py":
        names.remove("init_process_group")  # it starts the strategy's world
    asked = [
        f"{path.name}:{node.lineno}"
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name | ast.Attribute)
        and ast.unparse(node.value) in ("dist", "torch.distributed", "distributed")
    ]
    assert not asked, asked


def test_no_files_import_each_other_in_a_circle() -> None:
    needs = {path: imported_files(path) for path in FILES if path.name != "__init__.py"}
    done: set[Path] = set()
    while needs:
        free = [path for path, below in needs.items() if not (below & needs.keys() - {path} - done)]
        assert free, f"a circle among {sorted(map(name_of_file, needs))}"
        done.update(free)
        for path in free:
            del needs[path]


# underscored, and documented for everybody
DOCUMENTED_ALL_THE_SAME = {"_fields", "_replace", "_asdict", "_make", "_exit"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED_ALL_THE_SAME


def defined_here() -> set[str]:
    """Every underscored name that some file of the package defines."""
    found: set[str] = set()
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def private_names(path: Path, ours: set[str]) -> list[tuple[int, str]]:
    """Line and name of each private name of another library that a file imports or reads."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith((PACKAGE, "__future__")):
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            found += [(node.lineno, part) for part in parts if is_private(part)]
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ours:
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(str(name)) and name not in ours:
                found.append((node.lineno, str(name)))
    return found


def test_private_names_of_other_libraries_are_read_in_one_place() -> None:
    ours, wrong = defined_here(), []
    for path in FILES:
        if path in COMPAT:
            continue
        listed = PRIVATE_IN_PLACE.get(name_of_file(path), {})
        names = private_names(path, ours)
        wrong += [f"{name_of_file(path)}:{line} {name}" for line, name in names if name not in listed]
    assert not wrong, "move to core/*_compat.py, or list in PRIVATE_IN_PLACE with a reason:\n" + "\n".join(wrong)
    # what is overridden is defined here, under the library's name
    texts = {path: (ROOT / path).read_text() for path in PRIVATE_IN_PLACE}
    stale = [f"{path}: {name}" for path, names in PRIVATE_IN_PLACE.items() for name in names if name not in texts[path]]
    assert not stale, "listed, and no longer used"
    assert all(reason for names in PRIVATE_IN_PLACE.values() for reason in names.values())


# what asks for one kind of accelerator would be wrong on the others: "not the CPU" is asked everywhere else
NAMES_OF_CUDA = {
    "audit/api.py": "what a user calls an accelerator of Lightning's",
    "audit/runs.py": "a process that has used CUDA cannot be forked",
    "core/inputs.py": "CUDA's graphs",
    "losses/kernels/choice.py": "kernels for NVIDIA's GPUs",
    "losses/kernels/launches.py": "triton launches on CUDA's current device",
    "testing.py": "each kind of accelerator is asked whether it is there",
}


@pytest.mark.parametrize("path", FILES, ids=name_of_file)
def test_no_file_takes_cuda_for_every_accelerator(path: Path) -> None:
    found = [
        node.lineno
        for node in nodes(path)
        if (isinstance(node, ast.Constant) and node.value == "cuda")
        or (isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"))
    ]
    assert not found or name_of_file(path) in NAMES_OF_CUDA, f"lines {found}"


LARGEST_FOLDER = 22
"""Files of a folder without its ``__init__``: as many as a newcomer can look through."""

MOST_ATTRIBUTES = 15
# classes with more attributes than that, and why
LARGE_CLASSES: dict[str, str] = {}


def test_no_folder_has_too_many_files() -> None:
    files: dict[str, int] = {}
    for path in FILES:
        folder = str(path.parent.relative_to(ROOT.parent))
        files[folder] = files.get(folder, 0) + (path.name != "__init__.py")
    assert {folder: number for folder, number in files.items() if number > LARGEST_FOLDER} == {}


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """The names that a class stores in ``self``."""
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_no_class_has_too_many_attributes() -> None:
    large = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and len(attributes_of(node)) > MOST_ATTRIBUTES:
                large[f"{name_of_file(path)}:{node.name}"] = len(attributes_of(node))
    assert {name: number for name, number in large.items() if name not in LARGE_CLASSES} == {}
    assert set(LARGE_CLASSES) <= large.keys(), "listed, and small enough by now"
    assert all(LARGE_CLASSES.values())


def test_each_lint_exemption_has_its_reason() -> None:
    repository = Path(__file__).parents[1]
    files = [repository / "noxfile.py"]
    for folder in (ROOT, repository / "tests", repository / "benchmarks"):
        files += sorted(folder.rglob("*.py"))
    bare = []
    for path in files:
        lines = path.read_text().splitlines()
        bare += [f"{path.name}: {line.strip()}" for line in lines if re.search(r"# noqa(: [A-Z0-9, ]+)?$", line)]
    assert bare == []
    # those of whole folders, and of everything
    settings = (repository / "pyproject.toml").read_text()
    listed = settings.partition("per-file-ignores]\n")[2].partition("\n\n")[0].splitlines()
    listed += settings.partition("\nignore = [\n")[2].partition("\n]")[0].splitlines()
    assert len(listed) > 5
    assert [line for line in listed if not re.search(r"\] #|, +#", line)] == []
