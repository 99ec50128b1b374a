"""Imports go down only, and third-party packages stay on the layers that need them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import lightning_ddp_losses

ROOT = Path(lightning_ddp_losses.__file__).parent
PACKAGE = ROOT.name
UPPER = {
    **dict.fromkeys(("losses", "metrics", "samplers", "layers", "strategies"), 1),
    **dict.fromkeys(("callbacks", "audit"), 2),
    **dict.fromkeys(("cli", "__main__", "__init__"), 3),
}
FLOOR = {path.stem for path in ROOT.glob("*.py")} - set(UPPER)  # a single file is on the floor unless it is named above
ON_LAYER = dict.fromkeys(FLOOR, 0) | UPPER
COMMON = {"torch", "xxhash"}  # what tensors are made of, and what hashes their memory
THIRD_PARTY = [
    COMMON,
    COMMON | {"lightning", "torchmetrics", "pytorch_metric_learning"},
    COMMON | {"lightning", "rich", "matplotlib"},
    None,  # everything
]
FILES = sorted(ROOT.rglob("*.py"))


def unit_of(parts: tuple[str, ...]) -> str:
    """The top-level module or subpackage that a file or a dotted name belongs to."""
    return parts[0] if parts else "__init__"


def unit_of_file(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return unit_of(parts)


def imports(path: Path) -> list[tuple[int, tuple[str, ...]]]:
    """Line and dotted name of each import in a file, nested ones too."""
    package = (PACKAGE, *path.relative_to(ROOT).parts[:-1])
    found: list[tuple[int, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = (*base, *(node.module.split(".") if node.module else ()))
            found += [(node.lineno, (*source, alias.name)) for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    unit = unit_of_file(path)
    assert unit in ON_LAYER, f"{unit}: give it a layer in this test (and in the design)"
    layer, wrong = ON_LAYER[unit], []
    for line, name in imports(path):
        if name[0] != PACKAGE:
            continue
        target = name[1] if name[1] in ON_LAYER else "__init__"
        if target == "__init__" and name[1] == "__version__":
            continue
        same_unit = target == unit
        sideways = layer == ON_LAYER[target] and not same_unit and layer in (1,)
        if ON_LAYER[target] > layer or sideways:
            wrong.append(f"{path.name}:{line} imports {'.'.join(name)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_third_party_packages_stay_on_their_layer(path: Path) -> None:
    allowed = THIRD_PARTY[ON_LAYER[unit_of_file(path)]]
    used = {name[0] for _, name in imports(path)} - set(sys.stdlib_module_names) - {PACKAGE}
    assert allowed is None or used <= allowed, f"{path.name} imports {sorted(used - allowed)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_groups_asks_torch_distributed_for_rank_and_world_size(path: Path) -> None:
    if path.name == "groups.py":
        return
    asked = [
        f"{path.name}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("get_rank", "get_world_size", "new_group", "init_process_group", "destroy_process_group")
        and isinstance(node.value, ast.Name | ast.Attribute)
        and ast.unparse(node.value) in ("dist", "torch.distributed", "distributed")
    ]
    assert not asked, asked


def test_the_lowest_layer_has_no_cycle() -> None:
    edges = {
        unit_of_file(path): {name[1] for _, name in imports(path) if name[0] == PACKAGE and name[1] in FLOOR}
        for path in FILES
        if unit_of_file(path) in FLOOR
    }
    done: set[str] = set()
    while edges:
        free = [unit for unit, needs in edges.items() if not (needs - {unit} - done)]
        assert free, f"cycle among {sorted(edges)}"
        done.update(free)
        for unit in free:
            del edges[unit]
