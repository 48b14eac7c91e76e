"""sentence-transformers: a cached loss, whose backward runs more forwards and backwards inside."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import leave, report
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    models,
)
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
from torch import nn

NUM_WORDS = 40


def make_model() -> SentenceTransformer:
    torch.manual_seed(0)
    words = [f"w{number}" for number in range(NUM_WORDS)]
    tokenizer = models.tokenizer.WhitespaceTokenizer(words)
    embeddings = models.WordEmbeddings(
        tokenizer, torch.randn(NUM_WORDS, 8).tolist(), update_embeddings=True
    )
    return SentenceTransformer(
        modules=[embeddings, models.Pooling(8), models.Dense(8, 4)], device="cpu"
    )


def make_data() -> Dataset:
    def sentence(number: int) -> str:
        return " ".join(f"w{(number * 7 + word * 3) % NUM_WORDS}" for word in range(5))

    pairs = [{"anchor": sentence(n), "positive": sentence(n + 1)} for n in range(48)]
    return Dataset.from_list(pairs)


def train(**options: object) -> nn.Module:
    model = make_model()
    args = SentenceTransformerTrainingArguments(
        "out",
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=2,
        learning_rate=0.05,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    trainer = SentenceTransformerTrainer(model, args, train_dataset=make_data(), loss=loss)
    trainer.train()
    return model


for options in ({}, {"ddp_find_unused_parameters": True}, {"ddp_static_graph": True}):
    report(train(**options))
dist.barrier()
leave()
