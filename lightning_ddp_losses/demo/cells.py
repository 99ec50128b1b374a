"""Counts similar to single-cell data, to try large batches: drawn from a seed, stored on disk, read one batch at a time.

A cell has a type. Types belong to families (a tree of two levels, as for the cells of an organism). A type is a profile: the share of each
gene in the expression of its cells. For a cell with a library of ``n`` molecules, gene ``g`` with share ``p_g`` is counted::

    rate_g = n p_g z_g                    z_g ~ Gamma(shape r, mean 1): cells of one type differ
    count_g ~ Poisson(rate_g)             and is lost (0) with probability K / (K + rate_g): dropouts affect weakly expressed genes

The counts are stored in one ``.npy`` file that every rank maps, so that memory does not grow with the number of cells. Only the labels and
the order of an epoch do, by a few bytes per cell.

Source of the dropouts' form: Andrews, Hemberg, "M3Drop" (2019), Bioinformatics 35(16).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_ddp_losses.demo.data import BatchedArrayDataModule, open_array
from lightning_ddp_losses.demo.module import MLPEncoder
from lightning_ddp_losses.demo.tables import PathLike
from lightning_ddp_losses.errors import expect, expect_count

_TYPES_OF_A_FAMILY = 10
_BLOCK = 1_000  # number of cells drawn at a time, each block with a separate seed
_MOLECULES = 3_000  # median library of a cell. The next constant is the standard deviation of its logarithm
_LIBRARY_SPREAD = 0.5
_GAMMA_SHAPE = 2.0  # r: small if cells of one type differ much
_HALF_LOST = 0.5  # K: the rate at which half of the counts are lost
# standard deviation of the logarithm of a gene's share: over genes, over families and, for few genes, over the types of a family
_GENE_SPREAD, _FAMILY_SPREAD, _TYPE_SPREAD = 1.2, 0.5, 1.0
_MARKED_GENES = 0.05  # share of the genes that distinguish a type within its family


class CellsDataModule(BatchedArrayDataModule):
    """Counts (cells, genes) uint16 in a file that is written once, with a seeded part of them held out.

    The labels are available immediately. The file is written by ``prepare_data``, by one rank of each node (100,000 cells of 2,000 genes:
    400 MB, half a minute), and is found again by its name, which describes its contents.

    Args:
        cells: Number of cells, N.
        genes: Number of genes of each cell.
        types: Number of cell types, the labels. Ten of them form a family.
        batch_size: Cells of the GLOBAL batch, over all ranks.
        held_out_cells: Cells that are never trained on. Their number does not grow with `cells`, as their embeddings stay in memory.
        seed: Determines the counts, the split and, with the epoch, the order of training.
        folder: Folder of the file.
        num_workers: Processes that read ahead on each rank.
        m_per_class: Cells of each type in a training batch, for losses that compare rows. If None, cells are drawn at random.

    Raises:
        ConfigurationError: Invalid numbers.

    Example:
        >>> data = CellsDataModule(cells=300, genes=20, types=30, batch_size=60, held_out_cells=50)
        >>> len(data.train_rows), len(data.held_out_rows)
        (250, 50)
    """

    inputs_name = "log-normalised counts"

    def __init__(
        self,
        cells: int = 100_000,
        genes: int = 2_000,
        types: int = 200,
        *,
        batch_size: int = 4_096,
        held_out_cells: int = 5_000,
        seed: int = 0,
        folder: PathLike = "logs/cells",
        num_workers: int = 0,
        m_per_class: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, m_per_class)
        for name, value in (("genes", genes), ("types", types), ("held_out_cells", held_out_cells)):
            expect_count(name, value)
        expect(
            held_out_cells < cells,
            "cells",
            expected=f"more than held_out_cells={held_out_cells}",
            got=cells,
            fix="Raise cells, or lower held_out_cells.",
        )
        self.cells, self.genes, self.types = cells, genes, types
        self.path = Path(folder) / f"counts_{cells}x{genes}_{types}types_seed{seed}.npy"
        self.labels = self.held_out_labels = draw_types(cells, types, seed)
        order = np.random.default_rng([seed, 1]).permutation(cells)
        self.held_out_rows, self.train_rows = np.sort(order[:held_out_cells]), np.sort(order[held_out_cells:])

    def prepare_data(self) -> None:
        """Write the counts, unless the file exists."""
        if not self.path.exists():
            write_counts(self.path, self.labels, self.genes, self.types, self.seed)

    def setup(self, stage: str) -> None:
        """Map the file."""
        self.features = self.held_out_features = open_array(self.path, "counts")

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return all held-out cells in order: normalised counts (n, genes) and labels (n,)."""
        counts, labels = super().held_out()
        return log_normalised(counts), labels


class CellsEncoder(MLPEncoder):
    """Normalises counts, then applies `MLPEncoder`.

    Args:
        genes: Counts of one cell.
        embedding_size: Width D of the embedding.
        hidden: Widths of the hidden layers.

    Example:
        >>> CellsEncoder(genes=20, embedding_size=4)(torch.ones(3, 20)).shape
        torch.Size([3, 4])
    """

    width_option = "genes"

    def __init__(self, genes: int, embedding_size: int = 64, hidden: tuple[int, ...] = (256,)) -> None:
        super().__init__(genes, embedding_size, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Embed counts (B, genes) as (B, D).

        Raises:
            InputError: Rows of another length.
        """
        return super().forward(log_normalised(x))


def log_normalised(counts: Tensor) -> Tensor:
    """Return ``log(1 + counts / library * 1000)`` of counts (B, genes), the expression at equal read depth."""
    library = counts.sum(1, keepdim=True).clamp(min=1)
    return torch.log1p(counts / library * 1_000)


# ---------------------------------------------------------------------- drawing


def draw_types(cells: int, types: int, seed: int) -> np.ndarray:
    """Draw the type of each cell, (cells,) int64. Some types are ten times as frequent as others."""
    random = np.random.default_rng([seed, 2])
    share = random.lognormal(0.0, 0.6, types)
    labels: np.ndarray = random.choice(types, cells, p=share / share.sum())
    return labels


def draw_profiles(genes: int, types: int, seed: int) -> np.ndarray:
    """Draw the share of each gene in the expression of each type, (types, genes). Rows add up to 1."""
    random = np.random.default_rng([seed, 3])
    # frequent and rare genes are common to all cells, some are specific to a family, and a few to a type
    common = random.normal(0.0, _GENE_SPREAD, genes)
    families = random.normal(0.0, _FAMILY_SPREAD, (-(-types // _TYPES_OF_A_FAMILY), genes))
    marked = random.random((types, genes)) < _MARKED_GENES
    own = np.where(marked, random.normal(0.0, _TYPE_SPREAD, (types, genes)), 0.0)
    level = np.exp(common + families[np.arange(types) // _TYPES_OF_A_FAMILY] + own)
    profiles: np.ndarray = level / level.sum(1, keepdims=True)
    return profiles


def draw_counts(profiles: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw one cell of each profile (n, genes): counts (n, genes) uint16."""
    library = _MOLECULES * random.lognormal(0.0, _LIBRARY_SPREAD, (len(profiles), 1)).astype(np.float32)
    noise = random.standard_gamma(_GAMMA_SHAPE, profiles.shape, dtype=np.float32) / _GAMMA_SHAPE
    rate = library * profiles * noise
    counts = random.poisson(rate)
    counts[random.random(rate.shape, dtype=np.float32) * (_HALF_LOST + rate) < _HALF_LOST] = 0
    found: np.ndarray = np.minimum(counts, np.iinfo(np.uint16).max).astype(np.uint16)
    return found


def write_counts(path: Path, labels: np.ndarray, genes: int, types: int, seed: int) -> None:
    """Write the counts of all cells, a block at a time.

    Args:
        path: Path of the ``.npy`` file. It appears when it is complete.
        labels: Type of each cell, (N,).
        genes: Number of genes of each cell.
        types: Number of types.
        seed: Determines everything. Each block has a separate seed, so larger files begin with the same cells.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    profiles = draw_profiles(genes, types, seed).astype(np.float32)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    counts = np.lib.format.open_memmap(part, "w+", np.uint16, (len(labels), genes))
    for block, start in enumerate(range(0, len(labels), _BLOCK)):
        cells = slice(start, start + _BLOCK)
        counts[cells] = draw_counts(profiles[labels[cells]], np.random.default_rng([seed, 4, block]))
    counts.flush()
    os.replace(part, path)
