"""A training that continues after the loss of a rank, in one of two ways.

From its checkpoint, after torchrun has restarted all ranks:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node=3 --max-restarts=2 \
        examples/elastic/train.py --checkpoint elastic.pt

Without a restart, if the launcher keeps the survivors running:

    ddpx run --keep-survivors --nproc-per-node=3 examples/elastic/train.py --shrink

``--kill RANK:STEP`` makes a rank kill itself once, as a demonstration.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ddpx


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint", type=Path, help="read and written, every 5 steps")
    parser.add_argument("--shrink", action="store_true", help="continue without lost ranks")
    parser.add_argument("--kill", default="", metavar="RANK:STEP")
    parser.add_argument("--backend", default="gloo")
    return parser.parse_args()


class Training:
    """The training of one rank.

    Attributes:
        step: The number of the next step, and of the optimizer steps so far.
    """

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        self.model = ddpx.ReducerDDP(self.net)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.step = 0

    def make_step(self) -> float:
        # The rank and the world size may change at any step, so they are read here.
        generator = torch.Generator().manual_seed(self.step)
        batch = torch.randn(60, 16, generator=generator)
        x = batch[dist.get_rank() :: dist.get_world_size()]
        y = x.square().mean(dim=1, keepdim=True)
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def shrink(self) -> None:
        shrunk = ddpx.shrink(self.model, self.optimizer, step=self.step)
        self.step = shrunk.step
        print(
            f"rank {shrunk.survivors[shrunk.rank]} continues at step {shrunk.step} as rank "
            f"{shrunk.rank} of {shrunk.world_size}, without {list(shrunk.lost)}",
            flush=True,
        )

    def save(self, path: Path) -> None:
        """Writes the file atomically, since a rank may be killed at any time."""
        state = {
            "step": self.step,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.rename(path)

    def load(self, path: Path) -> None:
        state = torch.load(path)
        self.step = state["step"]
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    first_rank = dist.get_rank()
    training = Training()
    if arguments.checkpoint and arguments.checkpoint.exists():
        training.load(arguments.checkpoint)
        print(f"rank {first_rank} resumes at step {training.step}", flush=True)
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    loss = 0.0
    while training.step < arguments.steps:
        if arguments.kill == f"{first_rank}:{training.step}" and not restarted:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss = training.make_step()
        except (ddpx.RankFailure, ddpx.RankStalled):
            if not arguments.shrink:
                raise
            training.shrink()
            continue
        if arguments.checkpoint and training.step % 5 == 0 and dist.get_rank() == 0:
            training.save(arguments.checkpoint)

    sums = torch.stack([param.detach().double().sum() for param in training.net.parameters()])
    everywhere = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, sums)
    assert all(torch.equal(other, sums) for other in everywhere), "weights differ between ranks"
    if dist.get_rank() == 0:
        print(
            f"OK: {training.step} steps, loss {loss:.4f}, the same weights on "
            f"{dist.get_world_size()} ranks",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
