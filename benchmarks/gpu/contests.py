"""What is compared: a loss of ours, plain torch that makes the whole matrix, and the formula in float64, a block at a time.

Legend: ``G`` rows, ``D`` embedding size, ``C`` classes. A formula in float64 is not differentiated as a whole, which would need the
matrix: the log-sum-exps are known from a first pass, and their gradient is that of ``sum exp(z - log-sum-exp)`` with the latter fixed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytorch_metric_learning.losses as pml
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu import peers
from lightning_ddp_losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, SigLipLoss
from lightning_ddp_losses.losses.kernels import choice
from lightning_ddp_losses.losses.kernels.choice import TileKernels
from lightning_ddp_losses.losses.tile_compiler import TileCompiler
from lightning_ddp_losses.losses.tiled import evaluator

__all__ = ["OF_PAIRS", "ArcFace", "Clip", "Contest", "SigLip", "TwoOfEachClass"]

# what the name of a way begins with
_OURS = ("ours, ", "ours, compiled, ", "ours, kernels, ")
_NAMES = {torch.bfloat16: "bf16", torch.float32: "float32"}
_BLOCK_ENTRIES = 1 << 27  # of a matrix in float64: 1 GiB
_TEMPERATURE = 0.1  # SupCon's and NTXent's
_MARGIN, _SCALE = math.radians(28.6), 64.0  # ArcFace's
_ALPHA, _BETA, _BASE = 2.0, 50.0, 0.5  # MultiSimilarity's


def _blocks(count: int, width: int) -> Iterator[slice]:
    """Yield slices of ``count`` rows (or columns), of which a block of the matrix fits the memory for it."""
    step = max(1, _BLOCK_ENTRIES // max(width, 1))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _compiled(
    device: str, loss: nn.Module, attribute: str, ways: dict[str, Callable[[], Tensor]]
) -> dict[str, Callable[[], Tensor]]:
    """Return the same ways with ``compile_tiles=True``, on the same weights. It is not compiled on a CPU."""
    if not device.startswith("cuda"):
        return {}
    compiler = TileCompiler()

    return {f"ours, compiled{name}": partial(_run_by, loss, attribute, compiler, way) for name, way in ways.items()}


def _with_kernels(
    device: str, loss: nn.Module, attribute: str, ways: dict[str, Callable[[], Tensor]]
) -> dict[str, Callable[[], Tensor]]:
    """Return the same ways with hand-written kernels, of any size: where they begin to pay is measured. None without triton."""
    if not choice.have_kernels(torch.device(device)):
        return {}
    kernels = TileKernels()

    def run(way: Callable[[], Tensor]) -> Tensor:
        with mock.patch.object(choice, "FEWEST_ENTRIES", 0):
            return _run_by(loss, attribute, kernels, way)

    return {f"ours, kernels{name}": partial(run, way) for name, way in ways.items()}


def _run_by(loss: nn.Module, attribute: str, compiler: TileCompiler, way: Callable[[], Tensor]) -> Tensor:
    """Compute in a way, with tiles that a compiler computes."""
    with mock.patch.object(loss, attribute, compiler):
        return way()


def _by_default(loss: nn.Module, attribute: str, way: Callable[[], Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Return the way in which a user who sets no option gets the loss: kernels from the size where they are expected to pay."""
    return {"ours, by default": partial(_run_by, loss, attribute, TileKernels(), way)}


def _with_margin(cosines: Tensor) -> Tensor:
    """Apply ArcFace's margin."""
    return torch.cos(torch.acos(cosines) + _MARGIN)


class Contest(ABC):
    """One loss at one size.

    Attributes:
        leaves: What gets a gradient that is compared, by name.
        ours: Ways to compute the loss with this package, by name.
        plain: The same with torch alone, likewise.
        tolerance: How far a gradient may be off, relative, by the beginning of a way's name.
    """

    leaves: dict[str, Tensor]
    ours: dict[str, Callable[[], Tensor]]
    plain: dict[str, Callable[[], Tensor]]
    tolerance: dict[str, float]

    @abstractmethod
    def truth(self) -> dict[str, Tensor]:
        """Compute the gradients of the leaves in float64."""


class _Towers(Contest):
    """Images and texts in bf16, as an encoder under autocast gives them; the gradients come back in bf16."""

    def __init__(self, loss: nn.Module, rows: int, width: int, device: str) -> None:
        torch.manual_seed(0)
        images = torch.randn(rows, width, device=device)
        texts = images + 2 * torch.randn(rows, width, device=device)  # pairs agree, others do not
        self.images, self.texts = images.bfloat16().requires_grad_(), texts.bfloat16().requires_grad_()
        self.loss: Any = loss.to(device)
        self.leaves = {"images": self.images, "texts": self.texts, "scale": self.loss.logit_scale}
        ways = {
            "": lambda: self._ours("float32"),
            ", products='auto'": lambda: self._ours("auto"),
            ", products='bf16x2'": lambda: self._ours("bf16x2"),
        }
        self.ours = _by_default(self.loss, "_compiler", lambda: self._ours("auto"))
        self.ours |= {f"ours{name}": way for name, way in ways.items()}
        for compiled in (_compiled, _with_kernels):
            self.ours |= compiled(device, self.loss, "_compiler", ways)
        plain = {
            "torch, bf16": lambda: self._plain(torch.bfloat16),
            "torch, float32": lambda: self._plain(torch.float32),
        }
        self.plain = plain | peers.compiled(device, plain) | self._libraries()
        # a gradient in bf16 is rounded by 2^-9; a matrix in bf16 loses as much in each entry
        self.tolerance = {"ours": 1e-2, "torch, float32": 1e-2, "torch, compiled, float32": 1e-2, "": 0.3}

    def _ours(self, products: str) -> Tensor:
        self.loss.products = products
        value: Tensor = self.loss(self.images, self.texts)
        return value

    @abstractmethod
    def _libraries(self) -> dict[str, Callable[[], Tensor]]:
        """Return the ways of other libraries."""

    def _unit(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return functional.normalize(self.images.to(dtype), dim=1), functional.normalize(self.texts.to(dtype), dim=1)

    def _leaves64(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies of the leaves in float64, which get the gradient."""
        images, texts, log_scale = (leaf.detach().double().requires_grad_() for leaf in self.leaves.values())
        return images, texts, log_scale

    @abstractmethod
    def _plain(self, dtype: torch.dtype) -> Tensor:
        """Compute the loss from the whole matrix in a dtype."""


class Clip(_Towers):
    """CLIP's symmetric cross entropy."""

    def __init__(self, rows: int, width: int, device: str) -> None:
        super().__init__(ClipLoss(compile_tiles=False), rows, width, device)

    def _libraries(self) -> dict[str, Callable[[], Tensor]]:
        return {"Inf-CL, bf16": lambda: peers.inf_cl(self.images, self.texts, self.loss.logit_scale)}

    def _plain(self, dtype: torch.dtype) -> Tensor:
        images, texts = self._unit(dtype)
        logits = (self.loss.logit_scale.exp().to(dtype) * images) @ texts.t()
        target = torch.arange(len(images), device=images.device)
        return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.t(), target)) / 2

    def truth(self) -> dict[str, Tensor]:
        """Compute the gradients in float64: first the log-sum-exps of rows and columns, then block by block."""
        images, texts, log_scale = self._leaves64()
        count = len(images)
        with torch.no_grad():
            x, y = log_scale.exp() * functional.normalize(images, dim=1), functional.normalize(texts, dim=1)
            columns = [(x[rows] @ y.t()).logsumexp(0) for rows in _blocks(count, count)]
            column_lse = torch.stack(columns).logsumexp(0)
        for rows in _blocks(count, count):
            x, y = functional.normalize(images[rows], dim=1), functional.normalize(texts, dim=1)
            logits = log_scale.exp() * x @ y.t()
            own = log_scale.exp() * (x * y[rows]).sum(1)
            of_columns = (logits - column_lse).exp().sum()  # whose gradient is the columns' softmax
            ((logits.logsumexp(1).sum() + of_columns - 2 * own.sum()) / (2 * count)).backward()
        return {name: leaf.grad for name, leaf in zip(self.leaves, (images, texts, log_scale), strict=True)}


class SigLip(_Towers):
    """SigLIP's sigmoid loss over all pairs."""

    def __init__(self, rows: int, width: int, device: str) -> None:
        super().__init__(SigLipLoss(compile_tiles=False), rows, width, device)

    def _libraries(self) -> dict[str, Callable[[], Tensor]]:
        numbers = self.loss.logit_scale, self.loss.logit_bias
        return {"siglip-kernel, bf16": lambda: peers.siglip_kernel(self.images, self.texts, *numbers)}

    def _plain(self, dtype: torch.dtype) -> Tensor:
        images, texts = self._unit(dtype)
        logits = (self.loss.logit_scale.exp().to(dtype) * images) @ texts.t() + self.loss.logit_bias.to(dtype)
        own = logits.diagonal()
        # -logsigmoid(-z) of all pairs, and at the own pairs -logsigmoid(z) in its place, which is less by z
        return (functional.softplus(logits).sum(dtype=torch.float32) - own.sum(dtype=torch.float32)) / len(images)

    def truth(self) -> dict[str, Tensor]:
        """Compute the gradients in float64, block by block: every pair is a term of its own."""
        images, texts, log_scale = self._leaves64()
        bias, count = self.loss.logit_bias.detach().double(), len(images)
        for rows in _blocks(count, count):
            x, y = functional.normalize(images[rows], dim=1), functional.normalize(texts, dim=1)
            logits = log_scale.exp() * x @ y.t() + bias
            own = log_scale.exp() * (x * y[rows]).sum(1) + bias
            ((functional.softplus(logits).sum() - own.sum()) / count).backward()
        return {name: leaf.grad for name, leaf in zip(self.leaves, (images, texts, log_scale), strict=True)}


def _without_itself_(matrix: Tensor, first: int) -> Tensor:
    """Overwrite the entries of rows with themselves, of which row 0 is column ``first``."""
    if len(matrix) == matrix.shape[1]:
        return matrix.fill_diagonal_(-torch.inf)
    everyone = torch.arange(matrix.shape[1], device=matrix.device)
    return matrix.masked_fill(everyone[first : first + len(matrix)].unsqueeze(1) == everyone, -torch.inf)


def _positives(count: int, first: int, device: torch.device) -> Tensor:
    return torch.arange(first, first + count, device=device) ^ 1


def softmax_of_pairs(similarities: Tensor, first: int) -> Tensor:
    """Compute SupCon or NTXent, summed over rows, of which row 0 is column ``first``: each row has one positive."""
    logits = _without_itself_(similarities / _TEMPERATURE, first)
    positives = _positives(len(logits), first, logits.device)
    return functional.cross_entropy(logits, positives, reduction="sum")


def multi_similarity(similarities: Tensor, first: int) -> Tensor:
    """Compute MultiSimilarity, summed over rows."""
    positives = _positives(len(similarities), first, similarities.device).unsqueeze(1)
    near = functional.softplus(-_ALPHA * (similarities.gather(1, positives) - _BASE)) / _ALPHA
    exponents = _without_itself_(_BETA * (similarities - _BASE), first).scatter_(1, positives, -torch.inf)
    return near.sum() + functional.softplus(exponents.logsumexp(1)).sum() / _BETA


def contrastive(similarities: Tensor, first: int) -> Tensor:
    """Compute the contrastive loss of cosines: means over pairs of positives and of negatives, times the number of rows."""
    positives = _positives(len(similarities), first, similarities.device).unsqueeze(1)
    near = (1 - similarities).gather(1, positives)
    far = _without_itself_(similarities, first).scatter_(1, positives, 0).relu()
    return near.sum() + far.sum() / (similarities.shape[1] - 2)


Formula = Callable[[Tensor, int], Tensor]
# each with the formula that it is where each class has two rows
OF_PAIRS: dict[str, tuple[Callable[[], nn.Module], Formula]] = {
    "SupCon": (partial(pml.SupConLoss, temperature=_TEMPERATURE), softmax_of_pairs),
    "NTXent": (partial(pml.NTXentLoss, temperature=_TEMPERATURE), softmax_of_pairs),
    "MultiSimilarity": (partial(pml.MultiSimilarityLoss, alpha=_ALPHA, beta=_BETA, base=_BASE), multi_similarity),
    "Contrastive": (
        lambda: pml.ContrastiveLoss(pos_margin=1, neg_margin=0, distance=CosineSimilarity(), reducer=MeanReducer()),
        contrastive,
    ),
}


class TwoOfEachClass(Contest):
    """A loss over pairs of float32 rows, two of each class: row i's positive is row i ^ 1."""

    def __init__(self, name: str, rows: int, width: int, device: str) -> None:
        torch.manual_seed(0)
        centers = torch.randn(rows // 2, width, device=device).repeat_interleave(2, 0)
        self.embeddings = (centers + torch.randn(rows, width, device=device)).requires_grad_()
        self.labels = torch.arange(rows, device=device) // 2
        made, self._formula = OF_PAIRS[name]
        loss = GlobalBatchLoss(made(), mode="rows", compile_tiles=False).to(device)
        self.leaves = {"embeddings": self.embeddings}
        self.loss: Any = loss
        ways = {"": lambda: self._ours("float32")}
        for form in ("bf16", "bf16x3", "bf16x6"):
            ways[f", products='{form}'"] = partial(self._ours, form)
        self.ours = {
            **_by_default(loss, "_tile_compiler", lambda: self._ours("auto")),
            **{f"ours{name}": way for name, way in ways.items()},
            "ours, masks of all columns": lambda: self._with_pairs(masked=True),
            "ours, masks of a band": lambda: self._with_pairs(masked=False),
            **_compiled(device, loss, "_tile_compiler", ways),
            **_with_kernels(device, loss, "_tile_compiler", ways),
        }
        plain = {
            "torch, bf16": lambda: self._plain(torch.bfloat16),
            "torch, float32": lambda: self._plain(torch.float32),
        }
        self.plain = plain | peers.compiled(device, plain)
        # rows of float32 are rounded to bf16
        self.tolerance = {f"{who}products='bf16'": 0.1 for who in _OURS} | {"ours": 1e-4, "torch": 1e-4}

    def _ours(self, products: str) -> Tensor:
        self.loss.products = products
        value: Tensor = self.loss(self.embeddings, self.labels)
        return value

    def _with_pairs(self, *, masked: bool) -> Tensor:
        """Compute with masks of all columns or of a band, whatever the size of the matrix, which chooses (``evaluator.MASKED_BYTES``)."""
        most = 1 << 62 if masked else 0
        with mock.patch.object(evaluator, "MASKED_BYTES", most):
            return self._ours("float32")

    def _plain(self, dtype: torch.dtype) -> Tensor:
        unit = functional.normalize(self.embeddings.to(dtype), dim=1)
        return self._formula(unit @ unit.t(), 0) / len(unit)

    def truth(self) -> dict[str, Tensor]:
        """Compute the gradient in float64, a block of anchors at a time."""
        leaf = self.embeddings.detach().double().requires_grad_()
        count = len(leaf)
        for rows in _blocks(count, count):
            unit = functional.normalize(leaf, dim=1)
            (self._formula(unit[rows] @ unit.t(), rows.start) / count).backward()
        assert leaf.grad is not None
        return {"embeddings": leaf.grad}


class ArcFace(Contest):
    """ArcFace over many classes: the embeddings' gradient and that of the whole weight are compared."""

    def __init__(self, classes: int, rows: int, width: int, device: str) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"margin": math.degrees(_MARGIN), "scale": _SCALE, "compile_tiles": False}
        # normal numbers are drawn on the device, which takes no time: here the CPU writes zeros only
        options["weight_init_func"] = nn.init.zeros_
        loss = ClassShardedLoss.build(pml.ArcFaceLoss, num_classes=classes, embedding_size=width, seed=0, **options)
        self.loss: Any = loss.to(device)
        nn.init.normal_(self.loss.weight)
        self.embeddings = torch.randn(rows, width, device=device).requires_grad_()
        self.labels = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
        self.leaves = {"embeddings": self.embeddings, "weight": self.loss.weight}
        ways = {"": lambda: self._ours("float32")}
        for form in ("bf16", "bf16x3", "bf16x6"):
            ways[f", products='{form}'"] = partial(self._ours, form)
        self.ours = _by_default(self.loss, "_compiler", lambda: self._ours("float32"))
        self.ours |= {f"ours{name}": way for name, way in ways.items()}
        for compiled in (_compiled, _with_kernels):
            self.ours |= compiled(device, self.loss, "_compiler", ways)
        plain = {
            "torch, bf16": lambda: self._plain(torch.bfloat16),
            "torch, float32": lambda: self._plain(torch.float32),
        }
        self.plain = plain | peers.compiled(device, plain)
        for name, way in (
            ("torch, linear_cross_entropy", peers.arcface_by_linear_cross_entropy),
            ("torch, chunks of classes", peers.arcface_in_chunks),
        ):
            for dtype in (torch.bfloat16, torch.float32):
                self.plain[f"{name}, {_NAMES[dtype]}"] = partial(self._by_peer, way, dtype)
        # bf16 rounds a float32 weight by 2^-9, and bf16x3 by 2^-17, which a scale of 64 makes larger
        self.tolerance = {f"{who}products='bf16'": 0.3 for who in _OURS}
        self.tolerance |= {f"{who}products='bf16x3'": 3e-3 for who in _OURS} | {"ours": 1e-4, "torch": 1e-4}

    def _ours(self, products: str) -> Tensor:
        self.loss.products = products
        value: Tensor = self.loss(self.embeddings, self.labels)
        return value

    def _plain(self, dtype: torch.dtype) -> Tensor:
        unit = functional.normalize(self.embeddings.to(dtype), dim=1)
        weight = functional.normalize(self.loss.weight.to(dtype), dim=0)
        cosine = unit @ weight
        own = self.labels.unsqueeze(1)
        return functional.cross_entropy(
            cosine.scatter(1, own, _with_margin(cosine.gather(1, own))) * _SCALE, self.labels
        )

    def _by_peer(self, way: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        unit = functional.normalize(self.embeddings.to(dtype), dim=1)
        weight = functional.normalize(self.loss.weight.to(dtype), dim=0).t()
        return way(unit, weight, self.labels, _with_margin, _SCALE)

    def truth(self) -> dict[str, Tensor]:
        """Compute the gradients in float64, a block of classes at a time; the weight's is kept in float32."""
        weight = self.loss.weight.detach().t()  # (C, D)
        leaf = self.embeddings.detach().double().requires_grad_()
        rows = len(leaf)
        # 1. the target's logit, with its margin
        own = weight[self.labels].double().requires_grad_()
        cosine = (functional.normalize(leaf, dim=1) * functional.normalize(own, dim=1)).sum(1)
        target = _SCALE * torch.cos(torch.acos(cosine) + _MARGIN)
        # 2. log-sum-exp over all classes
        with torch.no_grad():
            parts = [self._logits(leaf, weight[part].double(), part, target).logsumexp(1) for part in self._parts()]
            lse = torch.stack(parts).logsumexp(0)
        # 3. the targets' share of the gradient: their softmax less 1
        ((target - lse).exp() - target).sum().div(rows).backward()
        grad = torch.zeros_like(weight)
        for part in self._parts():
            block = weight[part].double().requires_grad_()
            logits = self._logits(leaf, block, part, torch.full_like(lse, -torch.inf))
            ((logits - lse.unsqueeze(1)).exp().sum() / rows).backward()
            assert block.grad is not None
            grad[part] = block.grad.to(grad.dtype)
        assert leaf.grad is not None
        assert own.grad is not None
        grad.index_add_(0, self.labels, own.grad.to(grad.dtype))
        return {"embeddings": leaf.grad, "weight": grad.t()}

    def _parts(self) -> Iterator[slice]:
        return _blocks(self.loss.num_classes, len(self.embeddings))

    def _logits(self, leaf: Tensor, block: Tensor, part: slice, target: Tensor) -> Tensor:
        """Compute the logits of a block of classes, other numbers in the targets' places."""
        logits = _SCALE * functional.normalize(leaf, dim=1) @ functional.normalize(block, dim=1).t()
        is_here = (self.labels >= part.start) & (self.labels < part.stop)
        column = (self.labels - part.start).clamp(0, len(block) - 1).unsqueeze(1)
        values = torch.where(is_here.unsqueeze(1), target.detach().unsqueeze(1), logits.detach().gather(1, column))
        inside = torch.zeros_like(logits, dtype=torch.bool).scatter(1, column, is_here.unsqueeze(1))
        return torch.where(inside, values, logits)
