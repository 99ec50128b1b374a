"""`differentiable` in one process: what is kept, what works on, what is refused and why."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jsonargparse
import pytest
import torch
import torchmetrics as tm
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.clustering import MutualInfoScore, RandScore
from torchmetrics.wrappers import BootStrapper

from lightning_ddp_losses import ConfigurationError, DifferentiableMetric, differentiable
from tests.doors import WITHOUT_GRADIENT
from tests.metrics.cases import differentiable_classes
from tests.metrics.kinds import Ours
from tests.refusals import Mistake, refusals_of_one_process

PREDS, TARGET = torch.tensor([0.1, 0.4, 0.9, 0.3]), torch.tensor([0.0, 0.5, 1.0, 0.7])


def leaf() -> Tensor:
    return PREDS.clone().requires_grad_()


def test_an_instance_keeps_configuration_states_and_class_and_leaves_the_original_alone() -> None:
    metric = tm.MeanSquaredError(squared=False)
    metric.update(PREDS, TARGET)
    ours = differentiable(metric)
    assert isinstance(ours, tm.MeanSquaredError)
    assert isinstance(ours, DifferentiableMetric)
    assert repr(ours) == repr(metric)
    assert type(ours).__name__ == "MeanSquaredError"
    assert not isinstance(metric, DifferentiableMetric)
    ours.update(TARGET + 1, TARGET)
    assert float(metric.compute()) == pytest.approx(float((PREDS - TARGET).square().mean().sqrt()))
    assert float(ours.compute()) == pytest.approx(float(((PREDS - TARGET).square().mean() / 2 + 0.5).sqrt()))
    assert differentiable(ours) is not ours
    assert differentiable(metric.set_dtype(torch.float64)).sum_squared_error.dtype == torch.float64


def test_a_class_gives_a_subclass_made_once() -> None:
    cls = differentiable(tm.MinkowskiDistance)
    assert issubclass(cls, tm.MinkowskiDistance)
    assert differentiable(tm.MinkowskiDistance) is cls is differentiable(cls)
    assert type(differentiable(tm.MinkowskiDistance(3))) is cls
    cls(3, keep_graph=True)(leaf(), TARGET).backward()
    wrapper = differentiable(tm.MinMaxMetric)(base := tm.MeanSquaredError())
    wrapper(leaf(), TARGET)["raw"].backward()
    assert isinstance(wrapper._base_metric, DifferentiableMetric)
    assert not isinstance(base, DifferentiableMetric)
    differentiable(tm.MetricCollection)([tm.MeanSquaredError()])(leaf(), TARGET)["MeanSquaredError"].backward()


TASKS = {
    "binary": (torch.tensor([0.1, 0.6, 0.4, 0.8]), torch.tensor([0, 1, 1, 0])),
    "multiclass": (torch.linspace(-1, 1, 12).view(4, 3).sin(), torch.tensor([0, 2, 1, 1])),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_class_that_makes_other_classes_gives_their_differentiable_form(task: str) -> None:
    """``torchmetrics.HingeLoss(task=...)`` is a ``BinaryHingeLoss`` or a ``MulticlassHingeLoss``."""
    preds, target = TASKS[task]
    cls = differentiable(tm.HingeLoss)
    assert cls is differentiable(tm.HingeLoss)
    assert pickle.loads(pickle.dumps(cls)) is cls
    ours, stock = cls(task=task, num_classes=3, keep_graph=True), tm.HingeLoss(task=task, num_classes=3)  # type: ignore[call-arg, arg-type]
    assert isinstance(ours, DifferentiableMetric)
    assert isinstance(ours, type(stock))
    first, second = (preds.clone().requires_grad_() for _ in range(2))
    ours(first, target).backward()
    stock(second, target).backward()
    torch.testing.assert_close(first.grad, second.grad)
    assert type(pickle.loads(pickle.dumps(ours))) is type(ours)


ARGUMENTS = {"num_classes": 3, "num_labels": 3, "average": "macro"}
NEED_MORE = {
    "PrecisionAtFixedRecall": {"min_recall": 0.5},
    "RecallAtFixedPrecision": {"min_precision": 0.5},
    "SensitivityAtSpecificity": {"min_specificity": 0.5},
    "SpecificityAtSensitivity": {"min_sensitivity": 0.5},
}


def by_task() -> list[type[tm.Metric]]:
    """All classes of torchmetrics that are called with a task."""
    return [cls for cls in vars(tm).values() if isinstance(cls, type) and "task" in inspect.signature(cls).parameters]


@pytest.mark.parametrize("cls", by_task(), ids=lambda cls: cls.__name__)
def test_no_class_with_a_task_gives_a_plain_metric(cls: type[tm.Metric]) -> None:
    keeping, refusing = differentiable(cls, without_gradient="keep"), differentiable(cls)
    wanted = inspect.signature(cls).parameters
    arguments = {name: value for name, value in ARGUMENTS.items() if name in wanted} | NEED_MORE.get(cls.__name__, {})
    metric: Any = keeping(task="multiclass", **arguments)
    assert isinstance(metric, DifferentiableMetric)
    assert type(metric).__name__ == type(cls(task="multiclass", **arguments)).__name__  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(keeping)) is keeping
    if type(metric).is_differentiable is False:
        with pytest.raises(ConfigurationError, match="is_differentiable=False"):
            refusing(task="multiclass", **arguments)


def by_class() -> tm.MetricCollection:
    squared = tm.MeanSquaredError(num_outputs=2)
    return tm.MetricCollection([tm.ClasswiseWrapper(squared, labels=["x", "y"], prefix="mse_")], prefix="train_")


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "clone": lambda metric: metric.clone(),
    "prefix": lambda metric: metric.clone(prefix="val_"),
    "module": lambda metric: copy.deepcopy(nn.ModuleList([metric]))[0],
    "pickle": lambda metric: pickle.loads(pickle.dumps(metric)),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_wrapper_keeps_its_names(way: str) -> None:
    preds, target = torch.ones(4, 2), torch.zeros(4, 2)
    copied = COPIES[way](differentiable(by_class()))
    truth = COPIES[way](by_class())
    found = copied(preds.requires_grad_(), target)
    expected = truth(preds.detach(), target)
    assert {k: float(v.detach()) for k, v in found.items()} == {k: float(v) for k, v in expected.items()}
    assert isinstance(next(iter(copied.values(copy_state=False))), tm.ClasswiseWrapper)


class Holder(LightningModule):
    """Something to script that holds a metric."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.metric = metric

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:.*TorchScript", "ignore:.*torch.jit", "ignore:.*to_torchscript")
@pytest.mark.filterwarnings(
    "ignore:This property will be removed in 2.0.0"
)  # torch reads every property of torchmetrics'
def test_a_module_that_holds_a_metric_can_be_scripted() -> None:
    of_torchmetrics = everything()[:-1]  # TorchScript does not read the annotations of the class of our own
    for metric in of_torchmetrics:
        module = Holder(metric).eval()
        scripted: Any = module.to_torchscript()
        torch.testing.assert_close(scripted(torch.ones(2, 4)), module(torch.ones(2, 4)))


def everything() -> list[Any]:
    made = [tm.PearsonCorrCoef(), tm.MeanSquaredError() + 1, tm.MinMaxMetric(tm.R2Score())]
    made += [tm.wrappers.Running(tm.MeanSquaredError()), tm.MetricCollection([tm.R2Score(), tm.MeanSquaredError()])]
    return [differentiable(metric) for metric in made] + [Ours("cat list")]


def call(metric: Any) -> Any:
    return metric(torch.ones(2, 3, requires_grad=True)) if isinstance(metric, Ours) else metric(leaf(), TARGET)


def number(value: Any) -> list[float]:
    return [float(v) for v in value.values()] if isinstance(value, dict) else [float(value)]


@pytest.mark.parametrize("way", ["deepcopy", "clone", "pickle"])
def test_copies_hold_the_states_and_go_their_own_way(way: str) -> None:
    for metric in everything():
        call(metric)  # leaves a value with a graph behind
        other = COPIES[way](metric)
        assert type(other) is type(metric)
        assert number(other.compute()) == number(metric.compute())
        other.reset()
        call(other)
        assert number(metric.compute()) == number(metric.compute())
    assert pickle.loads(pickle.dumps(differentiable(tm.R2Score))) is differentiable(tm.R2Score)


class Doubled(differentiable(tm.MeanSquaredError)):  # type: ignore[misc]
    """A user's subclass of a class that was made differentiable."""

    def compute(self) -> Tensor:
        return 2 * super().compute()  # type: ignore[no-any-return]


class Chosen(tm.MeanSquaredError):
    """Its `__new__` decides, and makes its own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)


def test_classes_of_the_user() -> None:
    assert pickle.loads(pickle.dumps(Doubled)) is Doubled
    assert float(pickle.loads(pickle.dumps(Doubled()))(PREDS, TARGET)) == 2 * float(
        tm.MeanSquaredError()(PREDS, TARGET)
    )
    chosen = differentiable(Chosen)()
    assert isinstance(chosen, DifferentiableMetric)
    chosen(leaf(), TARGET).backward()


def test_what_holds_a_graph_is_copied_without_it() -> None:
    metric = differentiable(tm.MeanSquaredError(), keep_graph=True)
    metric.update(leaf(), TARGET)
    assert metric.sum_squared_error.requires_grad
    other = differentiable(metric)
    assert not other.sum_squared_error.requires_grad
    assert float(other.compute()) == float(metric.compute().detach())


def test_state_dict_moves_between_ours_and_torchmetrics() -> None:
    ours, stock = differentiable(tm.MeanSquaredError()), tm.MeanSquaredError()
    for metric in (ours, stock):
        metric.persistent(True)
    ours(leaf(), TARGET)
    stock.load_state_dict(ours.state_dict())
    stock._update_count = 1
    assert float(stock.compute()) == float(ours.compute())
    assert set(ours.state_dict()) == set(stock.state_dict())
    ours.reset()
    ours.load_state_dict(stock.state_dict())
    assert float(ours.sum_squared_error) == float(stock.sum_squared_error)


def test_merge_state_takes_ours_torchmetrics_and_dicts() -> None:
    a, b, stock = differentiable(tm.MeanSquaredError()), differentiable(tm.MeanSquaredError()), tm.MeanSquaredError()
    a(leaf(), TARGET)
    b(leaf() + 1, TARGET)
    stock.update(PREDS + 2, TARGET)
    a.merge_state(b)
    a.merge_state(stock)
    a.merge_state({"sum_squared_error": torch.zeros(1), "total": torch.tensor(4)})
    truth = torch.cat([PREDS - TARGET, PREDS + 1 - TARGET, PREDS + 2 - TARGET]).square().sum() / 16
    assert float(a.compute()) == pytest.approx(float(truth))
    with pytest.raises(ValueError, match="Expected incoming state"):
        a.merge_state(tm.R2Score())
    # a class of ours from the start has no class of torchmetrics beside it
    whole, half, other = (Ours("sum") for _ in range(3))
    for metric, part in ((whole, PREDS), (half, PREDS[:2]), (other, PREDS[2:])):
        metric.update(part.reshape(-1, 1).expand(-1, 3))
    half.merge_state(other)
    assert float(half.compute()) == pytest.approx(float(whole.compute()))
    with pytest.raises(RuntimeError, match="merge_state"):
        differentiable(tm.PearsonCorrCoef()).merge_state(differentiable(tm.PearsonCorrCoef()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning 2.6 calls it this way
@pytest.mark.parametrize("maker", ["differentiable", "synced"])
def test_a_command_line_makes_a_metric(maker: str) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--metric", type=tm.Metric)
    inside = {"class_path": "torchmetrics.PearsonCorrCoef"}
    given = {"class_path": f"lightning_ddp_losses.{maker}", "init_args": {"metric": inside}}
    metric = parser.instantiate_classes(parser.parse_object({"metric": given})).metric
    assert isinstance(metric, tm.PearsonCorrCoef)
    assert type(metric) is not tm.PearsonCorrCoef


def test_plots() -> None:
    metric = differentiable(tm.MeanSquaredError())
    values = [metric(leaf(), TARGET) for _ in range(2)]
    _, axes = metric.plot([value.detach() for value in values])
    assert axes.get_title() == tm.MeanSquaredError().plot(PREDS.sum())[1].get_title()
    metric.plot()


def test_a_trainable_parameter_stays_the_one_that_the_optimizer_holds() -> None:
    class Weighted(tm.MeanSquaredError):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))

        def update(self, preds: Tensor, target: Tensor) -> None:
            super().update(preds * self.weight, target)

    metric = Weighted()
    differentiable(metric)(PREDS, TARGET).backward()
    assert metric.weight.grad is not None


# ---------------------------------------------------------------------- refusals


class OwnForward(tm.MeanSquaredError):
    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args) * 2


class Synced(DifferentiableMetric):
    update = compute = lambda self: None  # type: ignore[assignment]

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None: ...


def refused(make: Callable[[], Any], *words: str, **options: Any) -> tuple[Callable[[], Any], tuple[str, ...]]:
    return lambda: differentiable(make(), **options), words


squared, on_cpu = tm.MeanSquaredError, partial(tm.MeanSquaredError, compute_on_cpu=True)
REFUSED: dict[str, Mistake] = {
    "ranks": refused(tm.SpearmanCorrCoef, "SpearmanCorrCoef", "is_differentiable=False", "without_gradient='keep'"),
    "labels": refused(RandScore, "RandScore", "integers"),
    "subclass": refused(lambda: type("Mine", (MutualInfoScore,), {})(), "Mine", "integers"),
    "inside": refused(lambda: squared() + tm.SpearmanCorrCoef(), "SpearmanCorrCoef"),
    "random": refused(lambda: BootStrapper(squared()), "BootStrapper", "forward"),
    "own forward": refused(OwnForward, "OwnForward", "the forward of OwnForward"),
    "compute_on_cpu": refused(on_cpu, "MeanSquaredError", "compute_on_cpu"),
    "dist_sync_fn": refused(partial(squared, dist_sync_fn=print), "dist_sync_fn", "process_group="),
    "a loss": refused(nn.MSELoss, "MSELoss"),
    "gather": refused(squared, "gather", gather="rows"),
    "without_gradient": refused(squared, "without_gradient", without_gradient="no"),
    "own sync": (Synced, ("_sync_dist",)),
}
_warns = pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save")
test_refusals_say_the_name_and_the_reason = _warns(refusals_of_one_process(REFUSED, ConfigurationError))


@pytest.mark.parametrize("value", [None, "yes", 0, 1, False])
@pytest.mark.parametrize("cls", [tm.MeanSquaredError, tm.HingeLoss])
def test_what_is_no_answer_is_quoted(cls: Any, value: Any) -> None:
    task = {"task": "binary"} if cls is tm.HingeLoss else {}
    end = ", which gives the gradient" if value is False else "\n"
    with pytest.raises(ConfigurationError, match=f"dist_sync_on_step: expected True, got {value!r}{end}"):
        differentiable(cls)(**task, dist_sync_on_step=value)


class PlainCounting(tm.Metric):
    """Counts, which has no gradient; its class does not say so."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("n", torch.tensor(0.0), "sum")

    def update(self, preds: Tensor) -> None:
        self.n = self.n + (preds > 0).sum()

    def compute(self) -> Tensor:
        return self.n


class Counting(PlainCounting, DifferentiableMetric):
    """The same, written as one of ours."""


KEPT: dict[str, Callable[[], Any]] = {
    "a class": lambda: differentiable(PlainCounting, without_gradient="keep")(),
    "a class of ours": lambda: differentiable(Counting, without_gradient="keep")(),
    "an instance of ours": lambda: differentiable(Counting(), without_gradient="keep"),
    "what was refusing before": lambda: differentiable(differentiable(PlainCounting), without_gradient="keep")(),
    "a collection": lambda: differentiable(tm.MetricCollection, without_gradient="keep")([PlainCounting()]),
    "a wrapper": lambda: differentiable(tm.MinMaxMetric, without_gradient="keep")(PlainCounting()),
}


@pytest.mark.parametrize("name", KEPT)
def test_every_form_keeps_what_has_no_gradient(name: str) -> None:
    metric = KEPT[name]()
    metric(leaf())
    pickle.loads(pickle.dumps(metric))(leaf())
    assert 4 in [float(value) for value in flat_values(metric(leaf()))]
    kept = type(metric)
    assert pickle.loads(pickle.dumps(kept)) is kept


def flat_values(value: Any) -> list[Tensor]:
    return list(value.values()) if isinstance(value, dict) else [value]


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save")
def test_a_wrapper_class_keeps_metrics_that_say_they_have_none() -> None:
    differentiable(tm.MinMaxMetric, without_gradient="keep")(tm.SpearmanCorrCoef())(leaf(), TARGET)
    with pytest.raises(ConfigurationError, match="SpearmanCorrCoef"):
        differentiable(tm.MinMaxMetric)(tm.SpearmanCorrCoef())


def test_a_value_without_gradient_is_found_out() -> None:
    metric = Counting()
    with pytest.raises(ConfigurationError, match="metric Counting: value: expected a gradient"):
        metric(leaf())
    assert metric(PREDS) == 4


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save")
def test_what_has_no_gradient_may_ride_along() -> None:
    members = [tm.MeanSquaredError(), tm.SpearmanCorrCoef()]
    values = differentiable(tm.MetricCollection(members), without_gradient="keep")(leaf(), TARGET)
    assert values["MeanSquaredError"].requires_grad
    assert not values["SpearmanCorrCoef"].requires_grad


FED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "HausdorffDistance": lambda: (torch.rand(2, 2, 6, 6).round(), torch.rand(2, 2, 6, 6).round()),
    "VisualInformationFidelity": lambda: (torch.rand(2, 1, 42, 42), torch.rand(2, 1, 42, 42)),
    "DaviesBouldinScore": lambda: (torch.rand(9, 3), torch.arange(9) % 3),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_what_is_refused_for_its_gradient_has_none_in_torchmetrics_either(name: str) -> None:
    """When torchmetrics mends one, this says so."""
    cls = differentiable_classes()[name]
    kwargs = {"num_classes": 2, "input_format": "one-hot"} if name == "HausdorffDistance" else {}
    metric = cls(**kwargs)
    if name not in FED:  # labels: a leaf of integers cannot even ask
        labels = torch.arange(8) % 3
        with pytest.raises(ValueError, match="discrete"):
            metric(torch.rand(8, requires_grad=True), labels)
        assert not metric(labels, labels).requires_grad
        return
    first, *rest = FED[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = metric(first.requires_grad_(), *rest)
    with pytest.raises(RuntimeError):
        value.backward()
