"""Text, speech and time: language models, recurrent networks, what has lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_ddp_losses.collectives import all_reduce_with_grad
from tests.audit.realistic.base import CLASSES, DIM, FEATURES, TOKENS, Realistic


class LanguageModel(Realistic):  # a causal transformer whose output shares the embedding's weight
    def build(self) -> None:
        self.embedding = nn.Embedding(9, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 9, bias=False)
        self.out.weight = self.embedding.weight

    def logits(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS - 1, dtype=torch.float64)
        return self.out(self.encoder(self.embedding(tokens[:, :-1]), src_mask=mask))

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), tokens[:, 1:].flatten())


class PaddedLanguageModel(LanguageModel):
    """Texts of several lengths: the mean over the tokens of all ranks; sick: over this rank's."""

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        lengths = tokens[:, :1] % TOKENS
        targets = tokens[:, 1:].masked_fill(torch.arange(TOKENS - 1) > lengths, -100)
        logits = self.logits(tokens).transpose(1, 2)
        if self.sick:
            return F.cross_entropy(logits, targets, ignore_index=-100)
        total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        count = self.all_gather((targets != -100).sum()).sum()
        return total * self.trainer.world_size / count


class Sequences(Realistic):  # an LSTM on sequences with lengths; sick: a mean over the valid steps of one rank
    def build(self) -> None:
        self.encoder = nn.LSTM(1, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        lengths = tokens[:, 0].clamp(max=TOKENS)
        if not self.sick:
            packed = pack_padded_sequence(tokens[..., None].double(), lengths, batch_first=True, enforce_sorted=False)
            return F.cross_entropy(self.head(self.encoder(packed)[1][0][0]), y)
        states, _ = self.encoder(tokens[..., None].double())
        valid = torch.arange(TOKENS) < lengths[:, None]
        return F.cross_entropy(self.head(states)[valid], y[:, None].expand(-1, TOKENS)[valid])


class Speech(Realistic):  # CTC, the mean over rows of each row's loss by its length
    def build(self) -> None:
        self.encoder = nn.Conv1d(1, DIM, 3, padding=1)
        self.head = nn.Linear(DIM, 9)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        frames = self.encoder(torch.cat([x, x.flip(1)], 1)[:, None]).permute(2, 0, 1)
        lengths = torch.full((len(x),), len(frames))
        return F.ctc_loss(self.head(frames).log_softmax(2), tokens[:, :4], lengths, 1 + y % 4, zero_infinity=True)


class Experts(Realistic):  # a mixture of experts whose load is balanced over all ranks; sick: over this rank's rows
    def build(self) -> None:
        super().build()
        self.gate = nn.Linear(FEATURES, 3)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, DIM) for _ in range(3))
        del self.encoder

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        gates = self.gate(x).softmax(1)
        z = torch.stack([expert(x) for expert in self.experts], 1)
        chosen = gates.argmax(1)
        z = (z[torch.arange(len(x)), chosen] * gates.max(1, keepdim=True).values).tanh()
        load, importance = F.one_hot(chosen, 3).double().mean(0), gates.mean(0)
        if not self.sick:
            world_size = self.trainer.world_size
            load, importance = all_reduce_with_grad(torch.stack([load, importance])) / world_size
        return F.cross_entropy(self.head(z), y) + 0.1 * 3 * (load * importance).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)
