"""A `GlobalBatchLoss` has the names of the plain loss: parameters, buffers, keys, optimizer states and attributes fit each other."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn.utils import parametrizations, parametrize, prune

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses import GlobalBatchLoss as Wrapper
from lightning_ddp_losses.errors import ConfigurationError
from tests.doors import uncompiled
from tests.losses.lightly_paths import paths_of_lightly

DIM, CLASSES = 8, 5
POSITION = "criterion.queue_position.position"


class Several(nn.Module):
    """A loss with a part called `loss`, a tensor of its own, a buffer, and an option."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.ones(DIM))
        self.loss = pml.ArcFaceLoss(CLASSES, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.margin = 0.1
        self.register_buffer("centre", torch.zeros(DIM))
        self.register_buffer("cache", torch.zeros(DIM), persistent=False)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.loss(self.W * (rows - self.centre), labels) + self.margin * rows.mean()
        return found

    def value_of(self, rows: Tensor) -> Tensor:
        return rows.sum()


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.rand(DIM))


def dice(rows: Tensor, labels: Tensor) -> Tensor:
    return rows.square().mean() + 0 * labels.sum()


LOSSES: dict[str, Callable[[], Any]] = {
    "a weight": lambda: pml.ArcFaceLoss(CLASSES, DIM),
    "a part with the wrapper's old name": Several,
    "parts": lambda: pml.MultipleLosses([pml.ArcFaceLoss(CLASSES, DIM), pml.SupConLoss()]),
    "a buffer": weighted,
    "a memory": lambda: pml.CrossBatchMemory(pml.NTXentLoss(), DIM, 16),
    "two parametrized tensors": lambda: parametrizations.weight_norm(pml.ArcFaceLoss(CLASSES, DIM), "W"),
    "a function": lambda: dice,
}


class Model(nn.Module):
    def __init__(self, criterion: Any) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, DIM)
        self.criterion = criterion
        self.last = nn.Linear(DIM, 1)


def plain_and_wrapped(name: str) -> tuple[Model, Model]:
    torch.manual_seed(0)
    inner = LOSSES[name]()
    plain = inner if isinstance(inner, nn.Module) else nn.Module()
    wrapped = copy.deepcopy(inner)
    return Model(plain), Model(GlobalBatchLoss(wrapped))


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    labels = torch.arange(6) % CLASSES
    value = model.criterion(model.encoder(torch.randn(6, 4)), labels)
    for parameter in model.parameters():
        value = value + parameter.sum()
    value.backward()
    optimizer.step()


def keys(tensors: Iterable[str]) -> list[str]:
    return [key for key in tensors if key != POSITION]


def named(model: nn.Module) -> dict[str, list[str]]:
    found: dict[str, Any] = {"parameters": model.named_parameters(), "buffers": model.named_buffers()}
    return {kind: [name for name, _ in pairs] for kind, pairs in found.items()} | {"keys": keys(model.state_dict())}


def randomized(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.rand_like(value) if value.is_floating_point() else value + 1 for name, value in state.items()}


def is_equal(model: nn.Module, state: dict[str, Any]) -> bool:
    own = model.state_dict()
    return all(torch.equal(own[name], value) for name, value in state.items() if name in own)


@pytest.mark.parametrize("name", LOSSES)
def test_plain_and_wrapped_load_each_other(name: str) -> None:
    plain, wrapped = plain_and_wrapped(name)
    assert named(plain) == named(wrapped)
    assert all(wrapped.get_parameter(path) is tensor for path, tensor in wrapped.named_parameters())
    state = randomized(plain.state_dict())
    wrapped.load_state_dict(state)
    assert is_equal(wrapped, state)
    state = {key: value for key, value in randomized(wrapped.state_dict()).items() if key != POSITION}
    plain.load_state_dict(state)
    assert is_equal(plain, state)
    # names of batch norm's version and the like
    assert plain.state_dict()._metadata.keys() - {"criterion"} <= wrapped.state_dict()._metadata.keys()


@pytest.mark.parametrize("prefix", ["", "criterion."])
@pytest.mark.parametrize("name", LOSSES)
def test_files_of_earlier_versions_load(name: str, prefix: str) -> None:
    _, wrapped = plain_and_wrapped(name)
    target = wrapped if prefix else wrapped.criterion
    state = randomized(target.state_dict())
    position = f"{prefix}queue_position.position"
    old = {}
    for key, value in state.items():
        is_of_loss = key.startswith(prefix) and key != position
        old[f"{prefix}loss.{key.removeprefix(prefix)}" if is_of_loss else key] = value
    before = list(old)
    target.load_state_dict(old)
    assert is_equal(target, state)
    assert list(old) == before, "the caller's own dict changed"
    if name != "a function":
        with pytest.raises(RuntimeError, match=r"Unexpected key.*of_another"):
            target.load_state_dict({**old, f"{prefix}loss.of_another": torch.zeros(1)})


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("a memory", "a function", "a buffer")])
def test_optimizers_by_name_load_each_other(name: str) -> None:
    """As `torch.distributed.checkpoint` names their states."""
    models = [*plain_and_wrapped(name)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=rate) for model, rate in zip(models, (0.1, 0.2), strict=True)]
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    for source, target in ((0, 1), (1, 0)):
        state = dcp.get_model_state_dict(models[source])
        dcp.set_model_state_dict(models[target], state)
        saved = copy.deepcopy(dcp.get_optimizer_state_dict(models[source], optimizers[source]))
        saved["state"]["encoder.weight"]["exp_avg"] += source + 1.0
        dcp.set_optimizer_state_dict(models[target], optimizers[target], saved)
        loaded = dcp.get_optimizer_state_dict(models[target], optimizers[target])
        assert loaded["state"].keys() == saved["state"].keys() == dict(models[1].named_parameters()).keys()
        for path, entry in saved["state"].items():
            assert torch.equal(entry["exp_avg"], loaded["state"][path]["exp_avg"]), path


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "double": lambda model: model.double(),
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "to": lambda model: model.to(torch.float64),
    "a copy of a copy": lambda model: copy.deepcopy(pickled(model.double())),
    "requires_grad_": lambda model: model.requires_grad_(True),
    "to_empty": lambda model: model.to_empty(device="cpu"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "a function"])
def test_both_modules_stay_one(name: str, change: str) -> None:
    if "parametrized" in name and change in ("pickle", "a copy of a copy"):
        return  # torch refuses to pickle such a module
    _, model = plain_and_wrapped(name)
    inside = model.criterion.wrapped
    model = CHANGES[change](model)
    wrapper, loss = model.criterion, model.criterion.wrapped
    assert (loss is inside) == (change not in ("deepcopy", "pickle", "a copy of a copy"))
    assert isinstance(wrapper, Wrapper)
    assert wrapper.state_dict().keys() - {"queue_position.position"} == loss.state_dict().keys()
    for own, other in zip(
        [*wrapper.parameters(), *wrapper.buffers()], [*loss.parameters(), *loss.buffers()], strict=True
    ):
        assert own is other
    # and in what comes later
    wrapper.late = nn.Parameter(torch.ones(1))
    wrapper.register_buffer("later", torch.ones(1))
    loss.add_module("latest", nn.Linear(1, 1))
    assert loss.late is wrapper.late
    assert loss.later is wrapper.later
    assert loss.latest is wrapper.latest
    assert {"late", "later", "latest.weight"} <= wrapper.state_dict().keys()


def set_by_name(model: nn.Module) -> None:
    """As Lightning does around a validation."""
    for _, inner in model.named_modules():
        inner.training = False


@pytest.mark.parametrize("set_mode", [nn.Module.eval, set_by_name, lambda model: model.train(False)])
def test_the_mode_is_that_of_the_loss(set_mode: Callable[[nn.Module], Any]) -> None:
    _, model = plain_and_wrapped("a part with the wrapper's old name")
    loss = model.criterion.wrapped
    set_mode(model)
    assert not any(inner.training for inner in (loss, loss.norm, model.criterion, model.criterion.norm))
    loss.train()
    assert model.criterion.training
    seen: list[nn.Module] = []
    model.apply(seen.append)
    assert loss in seen
    assert model.criterion not in seen, "each tensor would be changed twice"
    assert len(set(seen)) == len(seen)
    assert len({name for name, _ in model.named_modules()}) == len([*model.modules()])


def test_attributes_are_those_of_the_loss() -> None:
    inner = Several()
    loss = GlobalBatchLoss(inner)
    # read
    assert loss.W is inner.W
    assert loss.margin == 0.1
    assert loss.centre is inner.centre
    # set: also what is no parameter
    loss.margin = 0.5
    assert inner.margin == 0.5
    assert "margin" not in vars(loss)
    loss.margin = nn.Parameter(torch.tensor(2.0))
    assert inner.margin is loss.margin
    assert "margin" in loss.state_dict()
    loss.W = nn.Parameter(torch.zeros(DIM))
    assert inner.W is loss.W
    # what the wrapper has itself
    loss.mode = "rows"
    loss.note = 3
    assert not hasattr(inner, "mode")
    assert not hasattr(inner, "note")
    # a method would compute on this rank's rows
    assert not hasattr(loss, "value_of")
    with pytest.raises(AttributeError, match=r"rows of this rank: call it as `.wrapped.value_of`"):
        loss.value_of(torch.ones(1))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = loss.nothing
    assert loss.loss is inner.loss, "of the loss itself"


class MSNLoss(nn.Module):
    """A loss by whose path in lightly its samples are laid out."""


def test_the_wrapped_loss_can_be_replaced() -> None:
    inner = pml.ArcFaceLoss(CLASSES, DIM)
    loss = GlobalBatchLoss(inner)
    assert loss.loss is loss.wrapped is inner
    loss.loss = pml.ArcFaceLoss(3, DIM)
    assert loss.W.shape == (DIM, 3)
    assert loss.loss is loss.wrapped is not inner
    with pytest.raises(ConfigurationError, match=r"loss: expected a torch.nn.Module"):
        loss.loss = 3
    loss.wrapped = pml.CrossBatchMemory(pml.NTXentLoss(), DIM, 16)
    assert [*loss.state_dict()] == ["embedding_memory", "label_memory", "queue_position.position"]
    loss.wrapped = pml.SupConLoss()
    assert not loss.state_dict()
    # the options are those of the new loss
    loss = GlobalBatchLoss(nn.MSELoss(), views=2)
    with pytest.raises(ConfigurationError, match="SupConLoss"):
        loss.wrapped = pml.SupConLoss()
    loss = GlobalBatchLoss(nn.MSELoss())
    with paths_of_lightly(MSNLoss):
        loss.wrapped = MSNLoss()
        assert (
            repr(loss.layout) == repr(GlobalBatchLoss(MSNLoss()).layout) != repr(GlobalBatchLoss(nn.MSELoss()).layout)
        )
    with pytest.raises(ConfigurationError, match=r"wrapped: expected a torch.nn.Module"):
        loss.wrapped = 3


def test_what_is_deleted_or_replaced_is_so_in_the_loss() -> None:
    inner = Several()
    loss = GlobalBatchLoss(inner)
    del loss.margin
    del loss.W
    del loss.norm
    assert not any(hasattr(inner, name) for name in ("margin", "W", "norm"))
    with pytest.raises(AttributeError):
        del loss.nothing
    # a method that is replaced, and is there again
    loss.value_of = torch.mean
    assert loss.value_of is inner.value_of is torch.mean
    del loss.value_of
    assert inner.value_of(torch.ones(2)).item() == 2


def test_the_loss_of_a_compiled_loss_is_no_compiled_wrapper() -> None:
    """It shares the name under which `torch.compile` registers what it compiles."""
    compiled = torch.compile(pml.ArcFaceLoss(CLASSES, DIM), backend="eager")
    loss = GlobalBatchLoss(compiled)
    assert [*loss.state_dict()] == ["_orig_mod.W"]
    assert uncompiled(loss) is loss
    plain = GlobalBatchLoss(pml.ArcFaceLoss(CLASSES, DIM))
    assert uncompiled(torch.compile(plain, backend="eager")) is plain
    assert uncompiled(compiled) is loss._orig_mod


class Resettable(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows).square().mean()


def test_loops_that_initialise_reach_the_loss() -> None:
    """As after `to_empty`. Names of the weights alone would leave them as they are in memory."""
    model = nn.Sequential(GlobalBatchLoss(Resettable(DIM, 1)))
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    for inner in model.modules():
        if hasattr(inner, "reset_parameters"):
            inner.reset_parameters()
    assert model[0].weight.isfinite().all()


REPLACED_TENSORS: dict[str, Callable[[nn.Module], Any]] = {
    "pruning": lambda loss: prune.l1_unstructured(loss, "W", 0.5),
    "weight_norm": lambda loss: nn.utils.weight_norm(loss, "W"),
    "spectral_norm": lambda loss: nn.utils.spectral_norm(loss, "W").eval(),
    "removed pruning": lambda loss: prune.remove(prune.l1_unstructured(loss, "W", 0.5), "W"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", REPLACED_TENSORS)
def test_hooks_that_replace_a_tensor(kind: str) -> None:
    """Pruning and the like put a computed tensor in the place of the parameter."""
    plain, wrapped = plain_and_wrapped("a weight")
    wrapped.load_state_dict(plain.state_dict())
    for model in (plain, wrapped):
        torch.manual_seed(0)
        REPLACED_TENSORS[kind](model.criterion)
    assert named(plain) == named(wrapped)
    for model in (plain, wrapped):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(wrapped.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


class Twice(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return 2 * tensor


def test_parametrizations_are_the_losss() -> None:
    """Before and after, on the loss. On the wrapper it is refused, not ignored."""
    model = Model(GlobalBatchLoss(pml.ArcFaceLoss(CLASSES, DIM)))
    loss = model.criterion
    weight = loss.W.detach().clone()
    parametrize.register_parametrization(loss.wrapped, "W", Twice())
    assert torch.equal(loss.W, 2 * weight)
    assert "criterion.parametrizations.W.original" in model.state_dict()
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not torch.equal(loss.W, 2 * weight)
    parametrize.remove_parametrizations(loss.wrapped, "W")
    assert [*loss.state_dict()] == ["W"]
    with pytest.raises(ConfigurationError, match=r"Give register_parametrization the attribute `.wrapped`"):
        parametrize.register_parametrization(loss, "W", Twice())
    # next to one of the loss
    second = GlobalBatchLoss(parametrizations.weight_norm(Several(), "W"))
    second.gain = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigurationError, match=r"Give register_parametrization the attribute `.wrapped`"):
        parametrize.register_parametrization(second, "gain", Twice())
    assert second.gain is second.wrapped.gain
    assert not hasattr(Wrapper, "gain"), "the class of all losses changed"


def test_hooks_of_the_loss_run() -> None:
    inner = pml.ArcFaceLoss(CLASSES, DIM)
    loss = GlobalBatchLoss(inner, mode="replicated")
    seen: list[str] = []
    inner.register_forward_hook(lambda *_: seen.append("forward"))
    inner.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    loss.register_state_dict_pre_hook(lambda *_: seen.append("saves"))
    inner.register_load_state_dict_pre_hook(lambda *_: seen.append("loads"))
    loss.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    loss.load_state_dict(loss.state_dict())
    assert seen == ["saves", "saved", "loads", "loaded"]
    loss(torch.randn(6, DIM), torch.arange(6) % CLASSES)
    assert seen[-1] == "forward"
    assert torch.func.functional_call(loss, {"W": torch.zeros(DIM, CLASSES)}, (torch.randn(2, DIM), torch.arange(2)))


class Own(GlobalBatchLoss):
    """A user's own class."""

    def __init__(self, inner: nn.Module, **own: Any) -> None:
        super().__init__(inner)
        self.factor = 2.0
        self.gain = nn.Parameter(torch.ones(()))
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.factor * self.gain * super().forward(*args, **kwargs)


def test_a_class_of_ones_own_and_lists_keep_working() -> None:
    losses = nn.ModuleList([Own(pml.ArcFaceLoss(CLASSES, DIM)), GlobalBatchLoss(pml.SupConLoss())])
    assert [*losses.state_dict()] == ["0.W", "0.gain"]
    twin = copy.deepcopy(losses)
    twin.load_state_dict(losses.state_dict())
    rows, labels = torch.randn(6, DIM), torch.arange(6) % CLASSES
    assert losses[0](rows, labels).item() == pytest.approx(2 * losses[0].wrapped(rows, labels).item())
    losses[0].W = nn.Parameter(torch.ones(DIM, CLASSES))
    assert losses[0].wrapped.W is losses[0].W


@pytest.mark.parametrize("own", [{"scale": nn.Parameter(torch.ones(()))}, {"margin": 0.5}, {"get_logits": print}])
def test_a_class_of_ones_own_does_not_change_the_loss(own: dict[str, Any]) -> None:
    inner = pml.ArcFaceLoss(CLASSES, DIM)
    (name,) = own
    with pytest.raises(
        ConfigurationError, match=rf"(?s)Own: {name}: expected an attribute that ArcFaceLoss.*another name"
    ):
        Own(inner, **own)
    assert inner.scale == pml.ArcFaceLoss(CLASSES, DIM).scale
