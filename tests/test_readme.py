"""The README is short, its links lead somewhere, and its code and commands run, as does the code of the tour of the parts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from pytorch_metric_learning.samplers import MPerClassSampler
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_losses.cli import manual
from lightning_ddp_losses.cli.manual import run_explain
from lightning_ddp_losses.testing import RankPool
from tests.oracle import assert_close
from tests.processes import ROOT, TORCHRUN, run_python

README = (ROOT / "README.md").read_text()
WORDS = 1300
PARTS = manual.about()["parts"]
PARITY, *SNIPPETS = re.findall(r"```python\n(.*?)```", README + PARTS, re.DOTALL)


def test_it_is_short() -> None:
    assert len(README.split()) <= WORDS


def test_its_links_lead_somewhere() -> None:
    for file, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", README):
        text = (ROOT / file).read_text() if file else README
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert not anchor or anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, anchor


def run_snippets() -> dict[str, Any]:
    """Run all snippets in the order of the pages, with what they take for granted; return the values of those that are losses."""
    torch.manual_seed(dist.get_rank())
    rows = 8 if dist.get_rank() else 5
    encoder, text_encoder = (torch.nn.Linear(6, 32) for _ in range(2))
    for number in (*encoder.parameters(), *text_encoder.parameters()):
        torch.nn.init.normal_(number, generator=torch.Generator().manual_seed(number.dim()))
    every_label = torch.arange(10).repeat(32)
    given: dict[str, Any] = {
        "pl": pl,
        "torch": torch,
        "losses": pml,
        "MPerClassSampler": MPerClassSampler,
        "DataLoader": DataLoader,
        "dataset": TensorDataset(every_label),
        "encoder": encoder,
        "images": torch.randn(rows, 6),
    }
    given["embeddings"], given["text_embeddings"] = encoder(given["images"]), text_encoder(given["images"])
    given |= {"first": given["embeddings"], "second": given["text_embeddings"]}
    values = {}
    for index, snippet in enumerate(SNIPPETS):
        given["labels"] = every_label if "GlobalBatchSampler" in snippet else torch.arange(rows) % 3
        given |= {"logits": given["embeddings"], "tokens": torch.randint(32, (rows,))}
        given |= {"prediction": given["embeddings"].sum(1), "target": given["images"].sum(1)}
        given.pop("value", None)
        exec(snippet, given)
        if "value" in given:
            given["value"].backward(retain_graph=True)
            values[str(index)] = given["value"].detach()
    assert given["rows"].shape == given["embeddings"].shape
    return values


# a Trainer that is made and does not fit says which loggers are not installed
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0")
def test_its_code_runs_and_gives_every_rank_the_same_loss(pool: RankPool) -> None:
    first, second = pool.run(2, run_snippets)
    assert len(first) == 6
    assert_close(first, second)


def build() -> Any:
    return torch.nn.Linear(3, 1), lambda model: torch.optim.SGD(model.parameters(), 0.1)


def test_its_comparison_runs() -> None:
    batches = [{"x": torch.randn(8, 3)}]
    exec(PARITY, {"build": build, "step": lambda model, batch: model(batch["x"]).square().mean(), "batches": batches})


@pytest.mark.parametrize(
    "launcher", [pytest.param([], id="Lightning", marks=pytest.mark.slow), pytest.param(TORCHRUN, id="torchrun")]
)
def test_the_three_changed_lines_train(tmp_path: Path, launcher: list[str]) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    lines = diff.splitlines()
    assert sum(line.startswith("+") for line in lines) == 3
    (tmp_path / "train.py").write_text("\n".join(line[1:] for line in lines if not line.startswith("-")))
    done = run_python(*launcher, "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "All 2 ranks are here" in done.stderr


@pytest.mark.parametrize("topic", sorted(set(re.findall(r"`ddp-losses explain ([^`]+)`", README))))
def test_what_it_says_to_explain_is_explained(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_explain(topic.split()) == 0
    assert capsys.readouterr().out


def test_its_config_for_own_data_is_that_of_the_page_which_is_run() -> None:
    (config,) = re.findall(r"```yaml\n(.*?)```", manual.about()["own_data"], re.DOTALL)
    assert config in README


def test_the_configs_of_its_commands_exist() -> None:
    for config in re.findall(r"configs/\w+\.yaml", README):
        assert (ROOT / config).is_file()
