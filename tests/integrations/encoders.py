"""Tiny models of the hosts, from a configuration and a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WORDS, LENGTH, DIM = 40, 5, 16
# options of transformers' trainers
QUIET: dict[str, Any] = {"use_cpu": True, "ddp_backend": "gloo", "num_train_epochs": 1, "logging_steps": 1}
QUIET |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}


def save_encoder(folder: Path) -> None:
    """Write a BERT and its tokenizer, whose tokens are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=16, **sizes, **without_dropout)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": number for number in range(2, WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def sentence_model(path: str, *, seed: int = 0) -> Any:
    """Return a SentenceTransformer in float64; another seed, another model."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    bert = Transformer(path, model_kwargs={"add_pooling_layer": False})
    model = SentenceTransformer(modules=[bert, Pooling(DIM)], device="cpu").double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    # a softmax does not know of it: its gradient is rounding
    model.get_parameter("0.model.encoder.layer.0.attention.self.key.bias").requires_grad_(False)
    return model


def columns(rows: int, number: int, part: slice = slice(None)) -> list[dict[str, Tensor]]:
    """Return some rows of a number of columns of sentences."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(number):
        tokens = torch.randint(2, WORDS, (rows, LENGTH), generator=generator)
        lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=generator)
        mask = (torch.arange(LENGTH) < lengths).long()
        found.append({"input_ids": (tokens * mask)[part], "attention_mask": mask[part]})
    return found


def sentences(number: int) -> list[str]:
    return [f"w{2 + place % 30} w{3 + (7 * place) % 30}" for place in range(number)]


def fit_in_their_trainer(model: Any, loss: Any, data: Any, folder: str, rows: int, **options: Any) -> Any:
    """Train with the trainer of sentence-transformers, by SGD at a rate that stays; returns the trainer."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    arguments = SentenceTransformerTrainingArguments(
        output_dir=folder, per_device_train_batch_size=rows, max_grad_norm=0.0, **QUIET, **options
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = SentenceTransformerTrainer(
        model, arguments, train_dataset=data, loss=loss, optimizers=(optimizer, schedule)
    )
    trainer.train()
    return trainer
