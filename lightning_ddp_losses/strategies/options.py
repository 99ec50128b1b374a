"""`LossOptions`: the options that all strategies with learnable losses have in common, validated in one place.

An option is a field here, a keyword of the strategies, and its use in the part that it concerns (``fit_part``).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.errors import ConfigurationError, expect, expect_option

_ALLOWED: dict[str, tuple[object, ...]] = {
    "global_batch": (False, "auto"),
    "accumulation": ("mean", "window"),
    "use_global_sampler": (True, False),
    "evaluation": ("exact", "padded"),
    "uneven": ("error", "join", "stop"),
}
_NEED_LOSSES = {"accumulation": "mean", "use_global_sampler": False, "uneven": "error"}  # with their defaults
_MAY_DIFFER = ("timeout", "start_method")  # how a node waits and starts its processes changes no gradient


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options of one strategy; ``DDPLossStrategy`` explains them.

    Attributes:
        texts: All arguments of the strategy that ranks must have in common, by name (``stable_texts``).

    Raises:
        ConfigurationError: for values that cannot work.
    """

    losses: str | Sequence[str] = "auto"
    adopt: bool = False
    check_calls: bool = True
    loss_reduce_dtype: torch.dtype | None = None
    global_batch: bool | str = False
    sharded_checkpoints: bool = False
    accumulation: str = "mean"
    use_global_sampler: bool = False
    evaluation: str = "exact"
    uneven: str = "error"
    texts: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> LossOptions:
        """Return the options among the arguments of a strategy."""
        options = {each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}
        options["loss_reduce_dtype"] = _parse_dtype(arguments["loss_reduce_dtype"])
        if isinstance(options["losses"], Sequence) and not isinstance(options["losses"], str):
            options["losses"] = list(options["losses"])
        return cls(**options, texts=stable_texts(arguments))

    def __post_init__(self) -> None:
        # a string is a sequence of strings too
        only_names = isinstance(self.losses, Sequence) and all(isinstance(name, str) for name in self.losses)
        expected = "'auto', a list of names, or a regular expression"
        expect(only_names, "losses", expected=expected, got=repr(self.losses))
        for name, allowed in _ALLOWED.items():
            expect_option(name, getattr(self, name), allowed)
        for name, default in _NEED_LOSSES.items():
            value = getattr(self, name)
            expect(
                self.losses != [] or value == default,
                f"{name}={value!r}",
                expected="losses that are looked after",
                got="losses=[], which is plain ddp",
                fix=f"Leave {name} out, or leave losses at 'auto'.",
            )


def _parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a floating dtype from itself or its name (``"bfloat16"``, ``"torch.bfloat16"``)."""
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        expected = "a floating torch.dtype or its name, or None"
        raise ConfigurationError("loss_reduce_dtype", expected=expected, got=repr(dtype))
    return found


# ---------------------------------------------------------------------- comparison between nodes


def stable_texts(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return a strategy's arguments as text, which two nodes can compare.

    Args:
        arguments: Arguments of its ``__init__`` by name, with those of ``**ddp_kwargs``. Objects (a plugin, a hook) and Lightning's
            defaults are left out.
    """
    defaults = inspect.signature(DDPStrategy.__init__).parameters
    found = {}
    for name, value in sorted(arguments.items()):
        is_default = name in defaults and value == defaults[name].default
        if name not in _MAY_DIFFER and not is_default and has_stable_repr(value):
            found[name] = repr(value)
    return found


def has_stable_repr(value: object) -> bool:
    """Return whether equal values have the same text in every process."""
    if isinstance(value, (list, tuple)):
        return all(map(has_stable_repr, value))
    return isinstance(value, (bool, int, float, str, torch.dtype, timedelta))


# ---------------------------------------------------------------------- options of torch's DDP


def without_defaults(ddp_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return DDP's options that differ from DDP's defaults.

    A YAML file fills in all of them with their defaults (``device_ids`` too, which Lightning passes itself); the settings
    must be those of Python code that names none.
    """
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    missing = object()
    changed = {}
    for name, value in ddp_kwargs.items():
        default = parameters[name].default if name in parameters else missing
        if value is not default and value != default:
            changed[name] = value
    return changed


def refuse_unknown_options(strategy: type, ddp_kwargs: Collection[str]) -> None:
    """Refuse options that torch's DDP would refuse when it wraps the model, each with the option that it may have meant.

    Args:
        strategy: Class of the strategy; its own options are known too.
        ddp_kwargs: Names that are left for torch's DDP.

    Raises:
        ConfigurationError: for a name that nothing takes, and for one that Lightning passes itself.
    """
    of_ddp = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module", "device_ids"}
    unknown = sorted(set(ddp_kwargs) - of_ddp)
    if not unknown:
        return
    # every option by name, of the strategy and of its bases
    known = set(of_ddp)
    for cls in strategy.__mro__:
        for name, parameter in inspect.signature(vars(cls).get("__init__", object)).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != "self":
                known.add(name)
    meant = [difflib.get_close_matches(name, sorted(known), n=1) for name in unknown]
    questions = [f"Did you mean {close[0]}?" for close in meant if close]
    raise ConfigurationError(
        f"{strategy.__name__}: options",
        expected="its own, those of Lightning's DDPStrategy, or those of torch's DistributedDataParallel",
        got=", ".join(unknown),
        fix=" ".join(questions) or None,
    )
