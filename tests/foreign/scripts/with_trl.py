"""TRL: supervised fine-tuning of adapters (LoRA), preferences (DPO), and rewards (GRPO)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import leave, report
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

NUM_WORDS = 60
SPECIAL = ("<pad>", "<eos>", "<unk>")
SHARED = {
    "output_dir": "out",
    "use_cpu": True,
    "bf16": False,
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = [*(f"w{number}" for number in range(NUM_WORDS)), *SPECIAL]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    pad, end, _ = range(NUM_WORDS, NUM_WORDS + len(SPECIAL))
    config = LlamaConfig(
        vocab_size=NUM_WORDS + len(SPECIAL),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=pad,
        bos_token_id=end,
        eos_token_id=end,
    )
    return LlamaForCausalLM(config)


def text(number: int) -> str:
    return " ".join(f"w{(number * 7 + word * 3) % NUM_WORDS}" for word in range(5))


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(len(completion) % 5) for completion in completions]


def trainers() -> list[Trainer]:
    tokenizer = make_tokenizer()
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    texts = [{"text": text(n)} for n in range(32)]
    choices = [
        {"prompt": text(n), "chosen": text(n + 1), "rejected": text(n + 2)} for n in range(32)
    ]
    prompts = [{"prompt": text(n)} for n in range(32)]
    return [
        SFTTrainer(
            make_model(),
            SFTConfig(gradient_accumulation_steps=2, gradient_checkpointing=True, **SHARED),
            train_dataset=Dataset.from_list(texts),
            processing_class=tokenizer,
            peft_config=lora,
        ),
        DPOTrainer(
            make_model(),
            args=DPOConfig(**SHARED),
            train_dataset=Dataset.from_list(choices),
            processing_class=tokenizer,
            peft_config=lora,
        ),
        GRPOTrainer(
            make_model(),
            reward,
            GRPOConfig(num_generations=2, max_completion_length=5, **SHARED),
            train_dataset=Dataset.from_list(prompts),
            processing_class=tokenizer,
        ),
    ]


def trained(trainer: Trainer) -> nn.Module:
    trainer.train()
    return trainer.model


for each in trainers():
    report(trained(each))
dist.barrier()
leave()
