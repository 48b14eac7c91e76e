"""A complete training script, on synthetic images.

It has everything that a real script needs: arguments, a train/validation split, samplers,
SyncBatchNorm, a learning-rate schedule, a validation metric averaged over the ranks, and saving the
plain module (no wrapper) on rank 0. Each image is noise with one bright quadrant, whose number is
the label.

    torchrun --standalone --nproc-per-node=2 examples/full_training.py --output model.pt
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from _common import (
    device_ids_for,
    expect,
    path_in_folder,
    pick_device,
    positive_int,
    process_group,
    ranks_agree,
    torchrun_local_ranks,
)
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, random_split

from ddpx import ReducerDDP

Sample = tuple[torch.Tensor, ...]  # (image, label)
VALIDATION_SHARE = 0.25


class Metrics(NamedTuple):
    """Averages over a data set."""

    loss: float
    accuracy: float


def make_images(samples: int, seed: int) -> TensorDataset:
    """Return 8x8 images of noise with one brighter quadrant, labelled 0 to 3."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (samples,), generator=generator)
    images = torch.randn(samples, 1, 8, 8, generator=generator)
    quadrants = images.view(samples, 2, 4, 2, 4)  # [row half, row, column half, column]
    quadrants[torch.arange(samples), labels // 2, :, labels % 2, :] += 1.0
    return TensorDataset(images, labels)


def split(
    data: TensorDataset, world_size: int, seed: int
) -> tuple[Dataset[Sample], Dataset[Sample]]:
    """Split into training and validation data, in the same way on every rank."""
    # A sampler pads uneven shards with repeated samples, which would count twice in the metric. A
    # multiple of the world size needs no padding.
    validation = int(len(data) * VALIDATION_SHARE) // world_size * world_size
    generator = torch.Generator().manual_seed(seed)
    training_set, validation_set = random_split(
        data, [len(data) - validation, validation], generator=generator
    )
    return training_set, validation_set


def build_module() -> nn.Module:
    """Return a small convolutional classifier with batch normalization."""
    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def synchronise_batch_norm(module: nn.Module, device: torch.device) -> nn.Module:
    """Make batch normalization use the statistics of the global batch, if possible."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if dist.get_rank() == 0:
        print("SyncBatchNorm left out: PyTorch implements it for GPU tensors only", flush=True)
    return module


def train_epoch(
    model: nn.Module,
    loader: DataLoader[Sample],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Run once over this rank's shard of the training data."""
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()


@torch.no_grad()
def sum_metrics(model: nn.Module, loader: DataLoader[Sample], device: torch.device) -> torch.Tensor:
    """Return [total loss, correct predictions, samples] over the loader."""
    model.eval()
    totals = torch.zeros(3, device=device)
    for images, labels in loader:
        logits, labels = model(images.to(device)), labels.to(device)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(dim=1) == labels).sum()
        totals += torch.stack([loss, correct, torch.tensor(len(labels), device=device)])
    return totals


def to_metrics(totals: torch.Tensor) -> Metrics:
    """Turn sums over samples into averages."""
    loss, correct, samples = totals.tolist()
    return Metrics(loss / samples, correct / samples)


def validate(model: ReducerDDP, loader: DataLoader[Sample], device: torch.device) -> Metrics:
    """Evaluate each rank's shard and average over all ranks. Every rank gets the result."""
    # Calls the wrapper: its forward first broadcasts rank 0's batch-norm statistics, so that all
    # shards are evaluated with the model that rank 0 will save.
    totals = sum_metrics(model, loader, device)
    # sums instead of means, so that the average is correct for shards of any size
    dist.all_reduce(totals)
    return to_metrics(totals)


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train, validate after each epoch, save, and check the saved file."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    training_set, validation_set = split(
        make_images(args.samples, args.seed), world_size, args.seed
    )
    sampler: DistributedSampler[Sample] = DistributedSampler(training_set, seed=args.seed)
    training_loader = DataLoader(training_set, args.batch_size, sampler=sampler)
    validation_loader = DataLoader(
        validation_set,
        args.batch_size,
        sampler=DistributedSampler(validation_set, shuffle=False),
    )

    # Convert before wrapping: the wrapper must see the parameters that it averages.
    module = synchronise_batch_norm(build_module().to(device), device)
    model = ReducerDDP(module, device_ids=device_ids_for(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, training_loader, optimizer, device)
        metrics = validate(model, validation_loader, device)
        if rank == 0:
            print(
                f"epoch {epoch}: lr {scheduler.get_last_lr()[0]:.4f}, "
                f"validation loss {metrics.loss:.4f}, accuracy {metrics.accuracy:.3f}",
                flush=True,
            )
        scheduler.step()

    expect(ranks_agree(model), "ranks hold different weights")
    expect(metrics.accuracy > 0.9, f"accuracy is only {metrics.accuracy:.3f}")
    if rank == 0:
        # The inner module's names have no "module." prefix, so the file loads without a wrapper.
        torch.save(model.module.state_dict(), args.output)
        saved = check_saved(args, validation_set, device)
        expect(
            abs(saved.loss - metrics.loss) < 1e-3,
            f"saved model has validation loss {saved.loss}, in training it was {metrics.loss}",
        )
        print(
            f"OK: {world_size} ranks on {device.type} agree, accuracy {metrics.accuracy:.3f}, "
            f"reproduced by one process from {args.output}",
            flush=True,
        )


def check_saved(args: argparse.Namespace, data: Dataset[Sample], device: torch.device) -> Metrics:
    """Evaluate the saved file as a later user would: without wrapper and sampler, on all data."""
    module = build_module().to(device)
    module.load_state_dict(torch.load(args.output, map_location=device, weights_only=True))
    return to_metrics(sum_metrics(module, DataLoader(data, args.batch_size), device))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description="a complete data-parallel training script")
    parser.add_argument(
        "--output", type=path_in_folder, required=True, help="file for the trained weights"
    )
    parser.add_argument("--epochs", type=positive_int, default=4)
    parser.add_argument("--batch-size", type=positive_int, default=32, help="samples per rank")
    parser.add_argument("--samples", type=positive_int, default=1024, help="images to make")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate at the start")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not args.lr > 0:
        parser.error(f"--lr must be above 0, got {args.lr}")
    return args


def main() -> None:
    """Join the group of torchrun's ranks, and train."""
    args = parse_args()
    device = pick_device(*torchrun_local_ranks())
    with process_group(device):
        train(args, device)


if __name__ == "__main__":
    main()
