"""An audit in a notebook: in a real kernel, with a module that exists in its cells only."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.processes import ROOT, run_python

CELLS = (
    """
    import sys
    import torch
    from lightning.pytorch import LightningModule
    from torch.utils.data import DataLoader, TensorDataset
    from lightning_ddp_losses import assert_parity, audit

    class InACell(LightningModule):
        def __init__(self, power):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.power = torch.nn.Linear(3, 2), power

        def training_step(self, batch, index):
            return self.layer(batch[0]).square().mean() ** self.power

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows = TensorDataset(torch.arange(48.0).reshape(16, 3) / 48)
    loader = DataLoader(rows, batch_size=4)
    # a kernel that has worked: what runs in it may not hang on the threads that it has used
    torch.randn(512, 512).matmul(torch.randn(512, 512)).sum()
    assert hasattr(sys, "ps1")
    """,
    "print(audit(InACell(1), train_dataloaders=loader, steps=2, timeout_seconds=200))",
    """
    try:
        assert_parity(InACell(2), train_dataloaders=loader, steps=1, strategy="ddp", timeout_seconds=200)
    except AssertionError as error:
        print(error)
    """,
    """
    from lightning_ddp_losses import parity

    def build():
        torch.manual_seed(0)
        return torch.nn.Linear(3, 2), lambda model: torch.optim.SGD(model.parameters(), 0.1)

    def step(model, x):
        return model(x).square().mean()

    print(parity(build, step, [torch.arange(24.0).reshape(8, 3) / 24], timeout_seconds=200).summary())
    print(parity(build, lambda model, x: 2 * model(x).square().sum(), [torch.ones(8, 3)], timeout_seconds=200))
    """,
)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The name of a kernel with this interpreter; nothing of the user's is read or written."""
    folder = tmp_path / "kernels" / "this"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "this", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return "this"


# jupyter_client and nbclient on their way to the next release of Python and of asyncio
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_an_audit_in_a_notebook(kernel: str, tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(_dedented(source)) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, kernel_name=kernel, timeout=180, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    _, equal, different, loops = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert "Equal: 2 ranks under ddp_losses, 2 steps" in equal
    assert "Different: 2 ranks under ddp, 1 step," in different
    assert "Equal: 2 ranks under ddp, 1 step," in loops
    assert "Diagnosis 1: " in loops
    assert "(F18)" in loops


# what Lightning says there names its own strategy, without this package
STRATEGY = """
    import sys

    sys.ps1 = "as a notebook's kernel has it"
    import lightning.pytorch as pl
    import lightning_ddp_losses

    for strategy in ("ddp_losses", lightning_ddp_losses.DDPLossStrategy(), "ddp_losses_notebook"):
        try:
            pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
            print("made")
        except lightning_ddp_losses.ConfigurationError as error:
            print(error)
"""


def test_a_strategy_that_no_notebook_can_start_names_the_one_that_can() -> None:
    done = run_python("-c", _dedented(STRATEGY))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('Trainer(strategy="ddp_losses_notebook")') == 2
    assert done.stdout.splitlines()[-1] == "made"


def _dedented(source: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in source.strip("\n").splitlines())
