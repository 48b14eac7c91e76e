"""Average gradients over the tokens of all ranks and micro-steps, not over ranks.

Sequences have different lengths, so each rank has another number of tokens in each step. DDP's mean
of the ranks' means gives the tokens of a rank with short sequences a larger weight. With
``average="weights"`` each token has the same weight, as in one process with the whole batch.

    python examples/token_average.py --world-size 2
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.multiprocessing as mp
from _common import device_ids_for, expect, pick_device, positive_int, process_group, ranks_agree
from torch import nn

import ddpx

VOCABULARY, WIDTH, LONGEST, SEQUENCES, MICRO_STEPS = 20, 16, 12, 4, 2
PADDING = -100  # the label of a token that does not count


def make_module(device: torch.device) -> nn.Module:
    """Return a small model that predicts the next token."""
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY)]
    return nn.Sequential(*layers).double().to(device)


def make_batch(step: int, micro_step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a micro-batch and their labels. Sequences of rank 0 are the shortest."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_step + rank)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LONGEST), generator=generator)
    labels = (3 * tokens + 1) % VOCABULARY
    lengths = torch.randint(1, 4 + 4 * rank, (SEQUENCES, 1), generator=generator)
    labels[torch.arange(LONGEST) >= lengths] = PADDING
    return tokens, labels


def sum_of_losses(
    model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return the sum of the losses of all tokens that count."""
    logits = model(tokens.to(device)).flatten(0, 1)
    return nn.functional.cross_entropy(
        logits, labels.to(device).flatten(), ignore_index=PADDING, reduction="sum"
    )


def train_alone(world_size: int, device: torch.device, steps: int) -> nn.Module:
    """Train one process with the batches of all ranks and micro-steps together."""
    module = make_module(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for step in range(steps):
        parts = [make_batch(step, m, r) for r in range(world_size) for m in range(MICRO_STEPS)]
        tokens, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = sum_of_losses(module, tokens, labels, device)
        (loss / (labels != PADDING).sum().to(device)).backward()
        optimizer.step()
    return module


def train(rank: int, device: torch.device, steps: int) -> ddpx.ReducerDDP:
    """Train this rank with its own batches."""
    model = ddpx.ReducerDDP(
        make_module(device), device_ids=device_ids_for(device), average="weights"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for micro_step in range(MICRO_STEPS):
            tokens, labels = make_batch(step, micro_step, rank)
            is_last = micro_step == MICRO_STEPS - 1
            with nullcontext() if is_last else model.no_sync():
                ddpx.set_weight(model, (labels != PADDING).sum())
                sum_of_losses(model, tokens, labels, device).backward()
        optimizer.step()
    return model


def compare(rank: int, world_size: int, device: torch.device, steps: int) -> None:
    """Train on all ranks and in one process, and compare the weights."""
    model = train(rank, device, steps)
    alone = train_alone(world_size, device, steps)
    differences = [
        ((ours - theirs).abs().max() / theirs.abs().max()).item()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True)
    ]
    expect(ranks_agree(model), "ranks hold different weights")
    expect(max(differences) < 1e-12, f"weights differ from those of one process: {differences}")
    if rank == 0:
        print(
            f"OK: {world_size} ranks on {device.type} have the weights of one process after "
            f"{steps} steps",
            flush=True,
        )


def run(rank: int, world_size: int, folder: str, steps: int) -> None:
    """Run one rank. ``mp.spawn`` passes the rank as the first argument."""
    device = pick_device(rank, world_size)
    init_method = f"file://{folder}/rendezvous"
    with process_group(device, init_method=init_method, rank=rank, world_size=world_size):
        compare(rank, world_size, device, steps)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="average gradients over tokens")
    parser.add_argument("--world-size", type=positive_int, default=2, help="processes to start")
    parser.add_argument("--steps", type=positive_int, default=10, help="optimizer steps")
    return parser.parse_args(argv)


def main() -> None:
    """Start one process per rank."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:  # has the rendezvous file
        mp.spawn(run, args=(args.world_size, folder, args.steps), nprocs=args.world_size)


if __name__ == "__main__":
    main()
