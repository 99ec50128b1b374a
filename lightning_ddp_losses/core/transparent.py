"""A module around another one that has the other one's names: of parameters, buffers, submodules and keys of a state dict.

``torch.nn`` names a parameter by the path of the module that holds it. A wrapper that registers what it wraps puts one more part into
each name. Then checkpoints, an optimizer's state by name, groups of parameters and attributes (``loss.W``) of the plain module do not fit
the wrapped one, and hooks that rename keys reach the state dict only. So the wrapped module is not registered. The wrapper
shares its tables: one dictionary of parameters, one of buffers, one of submodules. What is set, deleted, cast or moved through one of
the two modules is so in both.

A walk over ``modules()`` yields the wrapper, and what is inside the wrapped module, but not the wrapped module: ``all_modules`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.errors import ConfigurationError, expect

T = TypeVar("T", bound="TransparentWrapper")
_WRAPPED = "wrapped"
_TENSOR_NAMES = "_tensor_names"
_SHARED_METHODS = ("reset_parameters",)  # torch's name for what sets the weights of one module


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper that has its names. None for any other module."""
    found: nn.Module | None = vars(module).get(_WRAPPED) if isinstance(module, TransparentWrapper) else None
    return found


def _is_method(module: nn.Module, name: str) -> bool:
    """Return whether a module's class defines the name as a method, and the module has nothing else in its place."""
    return name not in vars(module) and callable(getattr(type(module), name, None))


def all_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all inside it, those too that a wrapper does not register."""
    for each in module.modules():
        yield each
        wrapped = wrapped_module(each)
        if wrapped is not None:
            yield wrapped


def saved_names(module: nn.Module, saved: Collection[str]) -> dict[str, str]:
    """Return for each tensor that earlier versions saved under another name that name.

    Args:
        module: The module that will load, with wrappers inside.
        saved: Keys of its saved state dict.
    """
    found = {}
    for path, each in module.named_modules():
        if isinstance(each, TransparentWrapper):
            renamed = each.renamed_keys(saved, f"{path}." if path else "")
            found.update({name: key for key, name in renamed.items()})
    return found


class TransparentWrapper(nn.Module):
    """A module with the names of the one inside it, which it does not register.

    Public attributes of the wrapped module are read, set and deleted through the wrapper too, unless the wrapper has one of that name.
    Of its methods only ``reset_parameters`` is read. A class with a constructor of its own cannot set what the wrapped module has.

    Class attributes:
        old_name: Name under which earlier versions registered the wrapped module. Keys of their state dicts are renamed when they are
            loaded. The attribute of that name is the wrapped module, unless that has one of its own.

    Attributes:
        wrapped: The module inside.
    """

    old_name = ""
    wrapped: nn.Module

    def wrap_(self, module: nn.Module) -> None:
        """Take the tables of a module, in place of those that this one has."""
        tables = torch_compat.shared_tables(module)
        vars(self).update(tables)
        vars(self)[_WRAPPED] = module
        # pruning and the like put another tensor in the place of one of these
        vars(self)[_TENSOR_NAMES] = frozenset([*tables["_parameters"], *tables["_buffers"]])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if _WRAPPED not in state:  # pickled by a version that registered it
            self.wrap_(self._modules.pop(self.old_name))  # type: ignore[arg-type]

    # ------------------------------------------------------------------ attributes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapped = wrapped_module(self)
            if wrapped is None or name[0] == "_":
                raise
        is_method = name not in _SHARED_METHODS and _is_method(wrapped, name)
        if not is_method and hasattr(wrapped, name):
            return getattr(wrapped, name)
        if name == self.old_name:
            return wrapped
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if is_method:
            kind = type(wrapped).__name__
            text += (
                f". {kind}.{name} knows only the rows of this rank: call it as `.{_WRAPPED}.{name}` if that is meant"
            )
        raise AttributeError(text, name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = wrapped_module(self)
        is_taken = name in vars(self) or hasattr(type(self), name)
        if wrapped is not None and (name == _WRAPPED or (name == self.old_name and getattr(self, name) is wrapped)):
            is_module = isinstance(value, nn.Module)
            expect(
                is_module,
                f"{type(self).__name__}: {name}",
                expected="a torch.nn.Module",
                got=repr(value),
                fix="Assign a module, or None.",
            )
            self.wrap_(value)
        elif wrapped is None or name[0] == "_" or is_taken:
            super().__setattr__(name, value)
        elif hasattr(wrapped, name):
            self._refuse_own_attribute(name, value)
            setattr(wrapped, name, value)
        elif isinstance(value, Tensor) and name in vars(self)[_TENSOR_NAMES]:
            setattr(wrapped, name, value)
        else:
            if name == "parametrizations":
                raise self._parametrization_error()
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        wrapped = wrapped_module(self)
        if wrapped is None or name[0] == "_" or name in vars(self):
            super().__delattr__(name)
        elif "parametrizations" in self._modules and (
            name in self._parameters or name in torch_compat.buffer_slots(self)
        ):
            raise self._parametrization_error()  # torch's first step
        else:
            delattr(wrapped, name)

    def _refuse_own_attribute(self, name: str, value: Any) -> None:
        """Refuse an attribute of a derived class that would replace one of the wrapped module. Not a new tensor or part in place of one."""
        constructor_of = next(kind for kind in type(self).__mro__ if "__init__" in vars(kind))
        tables = {"_parameters": nn.Parameter, "_buffers": Tensor, "_modules": nn.Module}
        replaces = any(name in vars(self)[table] and isinstance(value, kind) for table, kind in tables.items())
        expect(
            TransparentWrapper in constructor_of.__bases__ or replaces,
            f"{type(self).__name__}: {name}",
            expected=f"an attribute that {type(self.wrapped).__name__}, the wrapped loss, does not have",
            got=f"one that is set to {type(value).__name__}",
            fix=f"Give it another name; to change the loss, set `.{_WRAPPED}.{name}`.",
        )

    def _parametrization_error(self) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self).__name__}: parametrization of a tensor of {type(self.wrapped).__name__}",
            expected="one that is registered on the module which reads the tensor",
            got="one on the wrapper",
            fix=f"Give register_parametrization the attribute `.{_WRAPPED}` in place of the wrapper.",
        )

    @property
    def training(self) -> bool:
        """The mode of the wrapped module. Lightning sets it module by module, by name."""
        wrapped = wrapped_module(self)
        return True if wrapped is None else wrapped.training

    @training.setter
    def training(self, mode: bool) -> None:
        wrapped = wrapped_module(self)
        if wrapped is not None:
            wrapped.training = mode

    # ------------------------------------------------------------------ what a class may define for all of its modules

    def train(self: T, mode: bool = True) -> T:
        """Set the mode of the wrapped module and of those inside it."""
        self.wrapped.train(mode)
        return self

    def apply(self: T, fn: Callable[[nn.Module], None]) -> T:
        """Apply a function to all modules inside, and to the wrapped one. Not to this one: its tensors are the same."""
        self.wrapped.apply(fn)
        return self

    def _apply(self: T, fn: Callable[..., Any], recurse: bool = True) -> T:
        self.wrapped._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the wrapped module."""
        return self.wrapped.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for saved, name in self.renamed_keys(state_dict, prefix).items():
            state_dict[name] = state_dict.pop(saved)
        self.wrapped._load_from_state_dict(state_dict, prefix, *args)

    def renamed_keys(self, saved: Collection[str], prefix: str) -> dict[str, str]:
        """Return the key of the wrapped module for each saved key of earlier versions. In the order in which they can be renamed.

        Args:
            saved: Keys of a state dict.
            prefix: Part of the keys that leads to this module.
        """
        old_prefix = f"{prefix}{self.old_name}."
        renamed = {key: prefix + key.removeprefix(old_prefix) for key in saved if key.startswith(old_prefix)}
        if not self.old_name or not renamed:
            return {}
        # a module may have a submodule of the old name
        names = {prefix + name for name in self.wrapped.state_dict(keep_vars=True)}
        num_known, num_renamed = len(names.intersection(saved)), len(names.intersection(renamed.values()))
        return dict(sorted(renamed.items(), key=lambda item: len(item[0]))) if num_renamed > num_known else {}
