"""Tables, graphs and decisions: recommenders, knowledge graphs, quantiles, survival, policies."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_ddp_losses import GlobalBatchLoss, differentiable
from lightning_ddp_losses.collectives import all_gather_with_grad
from tests.audit.realistic.base import CLASSES, DIM, FEATURES, Realistic, table


class Recommender(Realistic):  # sparse embeddings of users and items, a rating for each row
    def build(self) -> None:
        self.users = nn.Embedding(9, DIM, sparse=True)
        del self.encoder

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        score = (self.users(tokens[:, 0]) * self.users(tokens[:, 1])).sum(1)
        return F.binary_cross_entropy_with_logits(score, (y % 2).double())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class SampledItems(Realistic):  # users against the items of all rows of all ranks
    def build(self) -> None:
        self.items = nn.Embedding(9, DIM)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        users, items = all_gather_with_grad(self.encoder(x)), all_gather_with_grad(self.items(tokens[:, 0]))
        return F.cross_entropy(users @ items.T, torch.arange(len(users)))


class KnowledgeGraph(Realistic):
    """TransE: a true triple is nearer than one with a corrupted tail, which comes with the row; sick: the tail is drawn."""

    def build(self) -> None:
        self.entities, self.relations = nn.Embedding(9, DIM), nn.Embedding(9, DIM)
        del self.encoder

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        head, relation, tail, wrong = tokens[:, :4].unbind(1)
        if self.sick:
            wrong = torch.randint(9, wrong.shape)
        start = self.entities(head) + self.relations(relation)
        right, other = (torch.linalg.vector_norm(start - self.entities(end), dim=1) for end in (tail, wrong))
        return F.margin_ranking_loss(other, right, torch.ones_like(right), margin=1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def graphs(rows: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Nodes and edges of each graph, and labels: what has another size in each row stays a list."""
    made = []
    for x, _, tokens in rows:
        count = 2 + int(tokens[1]) % 5
        ring = torch.arange(count)
        made.append((x.repeat(count, 1) * (1 + ring[:, None]) / count, torch.stack([ring, ring.roll(1)])))
    return made, torch.stack([y for _, y, _ in rows])


class Graphs(Realistic):
    """Message passing, a class for each graph; sick: one for each node, so ranks with larger graphs count less than they should."""

    def build(self) -> None:
        super().build()
        self.message = nn.Linear(DIM, DIM)

    def objective(self, graphs: list[tuple[Tensor, Tensor]], y: Tensor) -> Tensor:
        # one large graph of all
        sizes = torch.tensor([len(nodes) for nodes, _ in graphs])
        first = sizes.cumsum(0) - sizes
        source, target = torch.cat([edges + start for (_, edges), start in zip(graphs, first, strict=True)], 1)
        owner = torch.repeat_interleave(torch.arange(len(y)), sizes)
        z = self.encoder(torch.cat([nodes for nodes, _ in graphs]))
        # one round of messages
        z = torch.tanh(z + torch.zeros_like(z).index_add(0, target, self.message(z)[source]))
        if self.sick:
            return F.cross_entropy(self.head(z), y[owner])
        pooled = z.new_zeros(len(y), DIM).index_add(0, owner, z)
        return F.cross_entropy(self.head(pooled), y)

    def train_dataloader(self) -> Any:
        return DataLoader(table().dataset, batch_size=4, collate_fn=graphs)


class CoxLoss(nn.Module):
    """The partial likelihood of survival times: every row is compared with those that lived longer."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        risk = embeddings[:, 0]
        at_risk = labels[None, :] >= labels[:, None]
        return (torch.logsumexp(risk.masked_fill(~at_risk, -torch.inf), 1) - risk).mean()


class Survival(Realistic):  # a Cox model over the rows of all ranks
    def build(self) -> None:
        self.risk = nn.Linear(DIM, 1, bias=False)
        self.loss = GlobalBatchLoss(CoxLoss())

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return self.loss(self.risk(self.encoder(x)), tokens[:, 0])


class PolicyGradient(Realistic):
    """Advantages standardised over the rows of all ranks, an entropy bonus, a value baseline; sick: over this rank's rows."""

    def build(self) -> None:
        self.policy, self.value = nn.Linear(DIM, CLASSES), nn.Linear(DIM, 1)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        z = self.encoder(x)
        reward = tokens[:, 0].double()
        value = self.value(z)[:, 0]
        advantage = (reward - value).detach()
        everyone = advantage
        if not self.sick:
            everyone = self.all_gather(advantage).flatten()
        advantage = (advantage - everyone.mean()) / (everyone.std() + 1e-8)
        decisions = torch.distributions.Categorical(logits=self.policy(z))
        gain = decisions.log_prob(y) * advantage + 0.01 * decisions.entropy()
        return F.mse_loss(value, reward) - gain.mean()


class RootError(Realistic):
    """A metric as the loss: the root of the mean squared error over the rows of all ranks, with its gradient."""

    def build(self) -> None:
        self.head = nn.Linear(DIM, 1, bias=False)
        self.metric = differentiable(torchmetrics.MeanSquaredError(squared=False))

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return self.metric(self.head(self.encoder(x))[:, 0], tokens[:, 0].double() / FEATURES)
