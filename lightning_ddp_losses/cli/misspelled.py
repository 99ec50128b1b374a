"""Advice for a config that the parser rejected: which key or class of it does not exist, and what is similar.

The parser's own message has the same facts inside a report about types. This walk over the file looks up each `class_path` and compares the
keys of `init_args` with the arguments of the class.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import pydoc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn

_SECTIONS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path", "weights_only")
_SECTIONS_OF_STAGES = ("audit", "verbose", "return_predictions", "fit", "validate", "test", "predict")
_SHORT = "lightning_ddp_losses.cli"  # classes of this module need no path
_MOST_LISTED = 12


def advice(files: Sequence[Path]) -> str:
    """Return a line for each key and class of configs that does not exist, or an empty text.

    Args:
        files: Config files.
    """
    lines = []
    for file in files:
        config = None
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            config = yaml.safe_load(file.read_text())
        if isinstance(config, dict):
            lines += [f"{file}: {found}\n" for found in _mistakes(config)]
    return "".join(lines)


def _mistakes(config: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each mistake of a config."""
    sections = (*_SECTIONS, *_SECTIONS_OF_STAGES)
    # a command line of the user's own may add sections, so that only a similar name is a mistake
    for key in config:
        similar = difflib.get_close_matches(str(key), sections, n=1)
        if key not in sections and similar:
            yield f"`{key}` is not a section of a config. Did you mean {similar[0]}?"
    trainer = config.get("trainer")
    if isinstance(trainer, dict):
        yield from _unknown_keys(trainer, Trainer, "trainer")
    yield from _mistakes_of_classes(config, "")


def _mistakes_of_classes(value: Any, path: str) -> Iterator[str]:
    """Yield a sentence for each class that does not exist, and for each option that its class does not have."""
    if isinstance(value, list):
        for number, part in enumerate(value):
            yield from _mistakes_of_classes(part, f"{path}[{number}]")
    if not isinstance(value, dict):
        return
    name = value.get("class_path")
    if isinstance(name, str):
        found = _located(name)
        if found is None:
            yield f"{path}.class_path: there is no {name}.{_similar_class(name)}"
        elif isinstance(value.get("init_args"), dict):
            yield from _unknown_keys(value["init_args"], found, f"{path}.init_args")
    for key, part in value.items():
        yield from _mistakes_of_classes(part, f"{path}.{key}".lstrip("."))


def _located(name: str) -> Any:
    """Return the object of a dotted name, or of a name of our command line, or None."""
    module = pydoc.locate(_SHORT)
    if "." not in name:
        # jsonargparse also finds other imported classes by their name only
        return getattr(module, name, None) or _imported_class(name)
    with contextlib.suppress(Exception):
        return pydoc.locate(name)
    return None


def _imported_class(name: str) -> Any:
    """Return a class that has been imported, by its name only, or None."""
    bases: tuple[type, ...] = (LightningModule, LightningDataModule, nn.Module, torch.optim.Optimizer)
    for base in bases:
        for found in _subclasses(base):
            if found.__name__ == name:
                return found
    return None


def _subclasses(base: type) -> Iterator[type[Any]]:
    found: type[Any]
    for found in base.__subclasses__():
        yield found
        yield from _subclasses(found)


def _similar_class(name: str) -> str:
    """Return a question with the most similar name of the same module, or an empty text."""
    module, _, last = name.rpartition(".")
    place: Any = None
    with contextlib.suppress(Exception):
        place = pydoc.locate(module or _SHORT)
    similar = difflib.get_close_matches(last, dir(place), n=1)
    if not similar:
        return ""
    return f" Did you mean {module}.{similar[0]}?" if module else f" Did you mean {similar[0]}?"


def _unknown_keys(given: Mapping[str, Any], owner: Any, path: str) -> Iterator[str]:
    """Yield a sentence for each key that is not an argument of a class or function."""
    known = _argument_names(owner)
    for key in given:
        if known is None or key in known:
            continue
        similar = difflib.get_close_matches(str(key), known, n=1)
        end = f"Did you mean {similar[0]}?" if similar else f"Its options: {_first_names(known)}."
        yield f"{path}.{key}: {owner.__name__} has no such option. {end}"


def _argument_names(owner: Any) -> list[str] | None:
    """Return the names of the arguments, or None if it takes any."""
    try:
        parameters = list(inspect.signature(owner).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return [each.name for each in parameters]


def _first_names(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"{', '.join(names[:_MOST_LISTED])}{more}"
