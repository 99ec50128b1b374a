"""What is worth knowing of a healthy run, what is found when a checkpoint is saved or loaded, and what stays silent."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import pytest
import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_ddp_losses
from lightning_ddp_losses import (
    BatchCheck,
    ClipLoss,
    CommunicationMonitor,
    DDPChecks,
    GlobalBatchLoss,
    LossCheck,
    OptimizerCheck,
)
from lightning_ddp_losses.callbacks import device_check
from lightning_ddp_losses.cli import CellsDataModule, LossCLI
from lightning_ddp_losses.errors import explained_by
from lightning_ddp_losses.testing import RankPool
from tests.callbacks.data_cases import Lonely, Memory
from tests.callbacks.harness import Recorder, Subject, drawn, fit
from tests.cli.shipped_configs import smaller
from tests.doors import DEFAULT_CHECKS, place_of
from tests.fits import make_trainer

Found = list[tuple[str, str, str]]


def listed(checks: DDPChecks) -> Found:
    return [(f.fault, f.severity, f.text()) for f in checks.findings]


def found_in(subject: Callable[[bool], Any], sick: bool = False, strategy: str = "ddp", **options: Any) -> Found:
    """Train with all checks; the findings by fault, severity and text."""
    return listed(fit(None, subject(sick), strategy, action="log", file=False, **options))


class Contrast(Subject):  # a contrastive loss of this rank's rows, and dropout
    def build(self) -> None:
        self.contrast = pml.SupConLoss()
        self.dropout = nn.Dropout(0.1)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings = self.encoder(self.dropout(features))
        return super().objective(features, labels, index) + self.contrast(embeddings, labels)


def test_notes_of_a_healthy_run(pool: RankPool) -> None:
    for found in pool.run(2, found_in, Contrast, False, accumulate_grad_batches=2):
        texts = {fault: text for fault, severity, text in found if severity == "note"}
        assert {severity for _, severity, _ in found} == {"note"}
        assert {"F29", "F33", "F72"} == set(texts)
        assert "`contrast`" in texts["F29"]
        assert all(text.endswith(explained_by(fault)) for fault, text in texts.items())


class Graphs(Subject):  # two graphs of eight nodes in a batch, or edges alone
    def training_step(self, batch: Any, index: int) -> Tensor:
        nodes, edges, *_ = batch
        return nn.functional.cross_entropy(self.head(self.encoder(nodes)), edges[0, : len(nodes)])

    def train_dataloader(self) -> Any:
        nodes = torch.randn(8, 4, dtype=torch.float64)
        batch = (nodes, torch.arange(20).view(2, 10) % 3, torch.arange(8) // 4, torch.zeros(2))
        return DataLoader([batch[: 2 if self.sick else 4]] * 3, batch_size=None)


def rows_of(subject: Callable[[bool], Any], sick: bool, **options: Any) -> list[str]:
    """Train with one check; its lines for the table."""
    check = BatchCheck()
    fit(check, subject(sick), file=False, **options)
    return check.remarks()


def test_rows_of_a_step_stand_in_the_table(pool: RankPool) -> None:
    for remarks in pool.run(2, rows_of, Subject, False, accumulate_grad_batches=2):
        assert remarks[0].startswith("16 rows in an optimizer step (2 x 8, 4 per rank)")


def test_graphs_are_counted_and_not_their_nodes(pool: RankPool) -> None:
    for remarks in pool.run(2, rows_of, Graphs, False):
        assert remarks[0].startswith("4 rows in an optimizer step (1 x 4, 2 per rank)")
    assert pool.run(2, rows_of, Graphs, True) == [[], []], "no number is better than a wrong one"


class LogsAlone(Subject):  # logs its loss and its learning rate, without ``sync_dist`` where it is sick
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self.objective(*batch, index)
        self.log("train_loss", loss, sync_dist=not self.sick)
        self.log("mean_loss", loss, on_epoch=True, sync_dist=not self.sick)
        self.log("rate", 0.1)
        return loss


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_of_one_rank_are_named_if_they_differ(pool: RankPool, world_size: int) -> None:
    for found in pool.run(world_size, found_in, LogsAlone, True, max_epochs=2):
        texts = of(found, "F56")
        assert len(texts) == (world_size > 1), "once"
        for text in texts:
            assert "`train_loss`, `mean_loss` is logged without sync_dist" in text
            assert f"rank {world_size - 1}: " in text
            assert "rate" not in text
    assert not of(pool.run(2, found_in, LogsAlone, False)[0], "F56")


class GlobalContrast(Contrast):  # the same over all ranks: nothing to note of negatives
    def build(self) -> None:
        super().build()
        self.contrast = GlobalBatchLoss(self.contrast)


def test_a_global_loss_is_not_called_local(pool: RankPool) -> None:
    assert not {"F29", "F33"} & {fault for fault, *_ in pool.run(2, found_in, GlobalContrast)[0]}


class GlobalTowers(Subject):  # two towers whose rows are compared over all ranks
    def build(self) -> None:
        self.contrast = ClipLoss()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings = self.encoder(features)
        return super().objective(features, labels, index) + self.contrast(embeddings, embeddings.flip(1))


class TwoViews(GlobalTowers):
    """A wrapper that makes labels, and gathers nothing, around a loss that compares rows."""

    def build(self) -> None:
        self.contrast = pml.SelfSupervisedLoss(pml.NTXentLoss())


def test_a_wrapper_that_does_not_gather_is_called_local(pool: RankPool) -> None:
    texts = {fault: text for fault, _, text in pool.run(2, found_in, TwoViews)[0]}
    assert "`contrast.loss`" in texts["F29"]


class OwnReductions(Subject):
    """A module with an attribute that torchmetrics' metrics have too."""

    def build(self) -> None:
        self.own = nn.Identity()
        self.own._reductions = ["mean"]  # type: ignore[assignment]


def test_a_module_with_reductions_of_its_own_is_no_metric(pool: RankPool) -> None:
    assert "CHECK" not in {fault for fault, *_ in pool.run(2, found_in, OwnReductions)[0]}


@pytest.mark.parametrize("subject", [GlobalContrast, GlobalTowers])
def test_accumulation_gives_a_global_loss_no_more_negatives(pool: RankPool, subject: Callable[[bool], Any]) -> None:
    for found in pool.run(2, found_in, subject, False, "ddp_losses", accumulate_grad_batches=2):
        texts = {fault: text for fault, _, text in found}
        assert "`contrast`" in texts["F33"]
        assert "microbatched" in texts["F33"]
        assert "F29" not in texts


def test_a_last_batch_of_one_row_under_batch_norm_is_a_note(pool: RankPool) -> None:
    for sick in (False, True):
        for found in pool.run(2, found_in, Lonely, sick, max_steps=2):
            notes = [text for fault, severity, text in found if (fault, severity) == ("F62", "note")]
            assert len(notes) == sick
            assert all("the last batch has one row" in text and "drop_last=True" in text for text in notes)


def logged(folder: str) -> list[Any]:
    check = LossCheck()
    fit(check, logger=CSVLogger(folder, "run", version=0), log_every_n_steps=1)
    return check.history


def test_the_loss_of_every_rank_is_recorded(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(2, logged, str(tmp_path))
    assert first == second
    assert [step for step, _ in first] == [0, 1, 2, 3]
    lines = (tmp_path / "run" / "version_0" / "losses_by_rank.csv").read_text().splitlines()
    assert lines[0] == "step,rank_0,rank_1"
    assert [tuple(map(float, line.split(",")[1:])) for line in lines[1:]] == [losses for _, losses in first]


def three_runs(folder: str) -> None:
    loggers = [{"logger": Recorder(folder, run)} for run in ("first", "second")]
    for options in (*loggers, {"default_root_dir": folder}, {"default_root_dir": folder}):
        fit(subject=Contrast(False), log_every_n_steps=1, **options)


def test_each_run_has_files_of_its_own(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, three_runs, str(tmp_path))
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.*")}
    numbers = {"project/first/": "", "project/second/": "", "ddp_checks/": "_1"}
    expected = {f"{place}losses_by_rank{number}.csv" for place, number in [*numbers.items(), ("ddp_checks/", "")]}
    assert {name for name in found if name.endswith(".csv")} == expected
    assert all(found[name].count("step,rank_0,rank_1") == 1 for name in expected), "one run in each"
    assert {name.replace("losses_by_rank", "ddp_checks").replace("csv", "jsonl") for name in expected} <= set(found)


def columns(log_figures: bool) -> set[str]:
    logger = Recorder(tempfile.gettempdir(), "columns")
    fit([LossCheck(), BatchCheck()], log_figures=log_figures, file=False, logger=logger, log_every_n_steps=1)
    return {name for row in logger.sent.values() for name in row if name.startswith("ddp_checks/")}


def test_loggers_get_the_numbers_of_findings_and_more_if_asked(pool: RankPool) -> None:
    few = {"ddp_checks/errors", "ddp_checks/warnings", "ddp_checks/notes"}
    assert pool.run(2, columns, False) == [few] * 2
    assert pool.run(2, columns, True)[0] > few | {"ddp_checks/loss_max"}


def warned_where() -> list[tuple[str, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checks = DDPChecks([LossCheck(zero_steps=1)], summary=False, file=False)
        make_trainer("ddp", callbacks=[checks]).fit(Zero(False))
    return [(w.filename, str(w.message)) for w in caught if "F31" in str(w.message)]


class Zero(Subject):  # a loss of nothing, which is a warning
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return 0 * super().objective(features, labels, index)


def test_a_warning_names_the_line_that_fits(pool: RankPool) -> None:
    (warned,), nothing = pool.run(2, warned_where)
    assert nothing == []
    assert warned[0] == __file__
    assert warned[1].startswith("LossCheck, F31, before backward of step 0")


def shown(sick: bool) -> str:
    said = io.StringIO()
    checks = [LossCheck(zero_steps=1), CommunicationMonitor(every_n_steps=1), OptimizerCheck()]
    with contextlib.redirect_stdout(said):
        fit(checks, (Zero if sick else Subject)(False), action={"warning": "log"}, summary=True)
    return said.getvalue()


def test_one_table_says_what_was_found_and_seen(pool: RankPool) -> None:
    healthy, sick = (pool.run(2, shown, is_sick)[0] for is_sick in (False, True))
    assert re.search(r"DDPChecks: 3 checks, 4 steps, 0 findings, \d", healthy)
    assert "DDPChecks: 3 checks, 4 steps, 1 finding, " in sick
    assert "1 warning" in sick
    assert "findings" not in healthy.partition("\n")[2], "an empty column"
    for text in (healthy, sick):
        table = " ".join(text.split())
        assert "collectives and" in table
        assert "loss of the last step" in table
        assert "comm/" not in text
        assert text.count("CommunicationMonitor") == 1
        assert text.splitlines()[-1] == "Nothing to report: OptimizerCheck"


def test_what_comes_before_the_first_step_has_no_number() -> None:
    assert place_of("before the wrap", 0) == "before the wrap"
    assert place_of("end of training", 1) == "end of training, after 1 step"
    assert place_of("before backward", 0) == "before backward of step 0"


class Saves(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def resume(subject: Any, sick: bool, path: str) -> Found:
    checks = DDPChecks(action="log", summary=False, file=False)
    make_trainer("ddp", callbacks=[checks], max_epochs=2).fit(subject(sick), ckpt_path=path)
    return listed(checks)


def of(found: Found, fault: str) -> list[str]:
    return [text for name, _, text in found if name == fault]


class Grows(Memory):  # reads the same rows whatever the number of ranks
    def train_dataloader(self) -> Any:
        rows = 4 if self.sick else 12 // dist.get_world_size()
        return drawn(rows)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("sick", [False, True])
def test_loading(pool: RankPool, tmp_path: Path, sick: bool) -> None:
    path = str(tmp_path / "a.ckpt")
    pool.run(2, found_in, Grows, sick, callbacks=[Saves(path)])
    for found in pool.run(3, resume, Grows, sick, path):
        assert bool(of(found, "F76")) == sick
        assert bool(of(found, "F65")) == sick
    again = pool.run(2, resume, Grows, sick, path)
    assert not of(again[0], "F76")


def on_devices(names: tuple[str, ...], visible: int, kind: str = "cuda") -> Found:
    check = device_check.DeviceCheck
    before = device_check.device_identity, device_check.visible_devices
    find_idle = check._find_idle_devices
    device_check.device_identity = lambda _: names[dist.get_rank()]  # type: ignore[assignment]
    device_check.visible_devices = lambda: visible  # type: ignore[assignment]
    check._find_idle_devices = lambda *given: find_idle(*given[:2], torch.device(kind))  # type: ignore[method-assign]
    try:
        return found_in(Subject)
    finally:
        device_check.device_identity, device_check.visible_devices = before
        check._find_idle_devices = find_idle  # type: ignore[method-assign]


def test_ranks_on_one_device_and_devices_without_a_rank(pool: RankPool) -> None:
    for found in pool.run(2, on_devices, ("gpu 0", "gpu 1"), 2):
        assert not of(found, "F73") + of(found, "IDLE")
    for found in pool.run(2, on_devices, ("gpu 0", "gpu 0"), 4):
        assert "(rank 0, 1)" in of(found, "F73")[0]
        assert "4 accelerators are visible, 2 of them in use" in of(found, "IDLE")[0]
    assert not of(pool.run(2, on_devices, ("", ""), 4, "cpu")[0], "IDLE")


def use_of_ranks() -> tuple[dict[str, float], list[str], int]:
    check = device_check.DeviceCheck()
    make_trainer("ddp", callbacks=[check]).fit(Subject(False))
    (status,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return check.figures(), check.remarks(), int(status) * 1024


def test_the_use_of_every_rank_is_told(pool: RankPool) -> None:
    used = pool.run(2, use_of_ranks)
    figures, remarks, _ = used[1]
    assert figures["rank_0_batches"] == figures["rank_1_batches"] == 4
    assert figures["rank_1_seconds"] > 0
    for rank, (_, _, anonymous) in enumerate(used):
        assert figures[f"rank_{rank}_peak_bytes"] == pytest.approx(anonymous, rel=0.1)
        assert re.fullmatch(rf"rank {rank}: 4 batches, \d+\.\d s, 0\.\d\d GiB", remarks[rank])


# Every config of ours runs without an error or a warning of a check, and one config names every option there is.

CONFIGS = sorted((Path(lightning_ddp_losses.__file__).parents[1] / "configs").glob("*.yaml"))


def run(path: str, shared_folder: str) -> Found:
    """Train two epochs of a few steps on the ranks of the pool, with the checks of the config."""
    given = yaml.safe_load(Path(path).read_text())["trainer"]
    # Lightning 2.6 uses jsonargparse in ways that its next major version changes; Python hides this from users
    quiet = mock.patch.dict(os.environ, JSONARGPARSE_DEPRECATION_WARNINGS="off")
    with quiet, tempfile.TemporaryDirectory() as folder:
        options = ["--config", path, *smaller(Path(path)), "--trainer.devices", "1", "--trainer.strategy", "auto"]
        cli = LossCLI(args=[*options, "--trainer.logger.init_args.save_dir", folder], run=False)
    # warnings of checks are errors here, as all warnings are
    (checks,) = (c for c in cli.trainer.callbacks if isinstance(c, DDPChecks))  # type: ignore[attr-defined]
    accumulate = given.get("accumulate_grad_batches", 1)
    limits = {"limit_train_batches": 6, "limit_val_batches": 1, "max_epochs": 2, "accumulate_grad_batches": accumulate}
    strategy = given["strategy"]
    if not isinstance(strategy, str):
        kind = getattr(lightning_ddp_losses, strategy["class_path"].rpartition(".")[2])
        strategy = kind(**strategy["init_args"])
    if isinstance(cli.datamodule, CellsDataModule):  # the file that ranks share
        cli.datamodule.path = Path(shared_folder, cli.datamodule.path.name)
    trainer = make_trainer(strategy, callbacks=[checks], **limits, use_distributed_sampler=True)
    trainer.fit(cli.model, cli.datamodule)
    return listed(checks)


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_of_ours_is_healthy(pool: RankPool, path: Path, tmp_path: Path) -> None:
    for found in pool.run(2, run, str(path), str(tmp_path)):
        assert [entry for entry in found if entry[1] != "note"] == []


def test_one_config_names_every_check_and_every_option_at_its_default() -> None:
    path = next(path for path in CONFIGS if path.stem == "checks_all")
    (callback,) = yaml.safe_load(path.read_text())["trainer"]["callbacks"]
    options: dict[str, Any] = callback["init_args"]
    assert set(options) == set(inspect.signature(DDPChecks).parameters)
    checks = {entry["class_path"].rpartition(".")[2]: entry.get("init_args", {}) for entry in options["checks"]}
    assert list(checks) == [check.__name__ for check in DEFAULT_CHECKS]
    for check in DEFAULT_CHECKS:
        defaults = {name: p.default for name, p in inspect.signature(check).parameters.items()}
        assert checks[check.__name__].items() <= defaults.items()
        assert set(defaults) - set(checks[check.__name__]) <= {"action", "every_n_steps"}
        # LightningCLI checks types by them
        assert set(get_type_hints(check.__init__)) == {*defaults, "return"}
