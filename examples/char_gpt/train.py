"""Train a small character-level GPT on several ranks with ddpx.

    torchrun --nproc-per-node=2 examples/char_gpt/train.py

Every rank holds the whole model and reads its own share of each batch. ReducerDDP averages the
gradients over the ranks while backward still runs, so that all ranks make the same step. At the end
the run checks that the weights agree bit for bit.
"""

import math
import sys
import time
from typing import NamedTuple

import data
import torch
import torch.distributed as dist
from data import ALPHABET, Corpus, CorpusError, load_corpus
from model import GPT, generate, next_character_loss
from options import Options, parse_options
from ranks import LaunchError, Rank, gather_digests, process_group, rank_from_environment
from report import Metrics, plot_losses, write_metrics
from torch import Tensor, nn
from tqdm import tqdm

from ddpx import ReducerDDP

PROMPT = "def "
TEMPERATURE = 0.8
MAX_GRADIENT_NORM = 1.0
BAR_SECONDS_TERMINAL, BAR_SECONDS_LOG = 0.2, 10.0  # seconds between two updates of the bar


class History(NamedTuple):
    """The results of a training run. Losses are in nats per character, averaged over the ranks."""

    train_loss: list[float]  # one per step
    held_out_steps: list[int]  # number of steps before each evaluation
    held_out_loss: list[float]  # one per evaluation
    seconds: float  # time of the whole loop with its evaluations


def learning_rate_factor(step: int, steps: int) -> float:
    """The factor of the peak learning rate at `step`: linear warm-up, then half a cosine to 5 %."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2


def batch_loss(model: nn.Module, windows: Tensor, device: torch.device, reduction: str) -> Tensor:
    """The loss of predicting each next character in windows (B, T + 1) -> a scalar."""
    windows = windows.to(device)
    return next_character_loss(model(windows[:, :-1]), windows[:, 1:], reduction)


@torch.no_grad()
def evaluate(model: GPT, windows: Tensor, batch_size: int, rank: Rank) -> float:
    """Mean loss over all windows (N, T + 1). Each rank computes its share of them."""
    share = rank.share_of(windows)
    # Shares may differ by a window, so ranks add totals instead of averaging means.
    total = torch.zeros(2, dtype=torch.float64, device=rank.device)  # nats, characters
    for start in range(0, len(share), batch_size):
        batch = share[start : start + batch_size]
        total[0] += batch_loss(model, batch, rank.device, reduction="sum")
        total[1] += batch[:, 1:].numel()
    dist.all_reduce(total)
    nats, characters = total.tolist()
    return nats / characters


def train(model: GPT, corpus: Corpus, options: Options, rank: Rank) -> History:
    """Train `model` in place, together with the other ranks."""
    ddp_model = ReducerDDP(
        model,
        device_ids=None if rank.device.type == "cpu" else [rank.device],
        bucket_cap_mb=options.bucket_cap_mb,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.steps)
    )
    starts = data.even_starts(corpus.held_out, options.eval_windows, options.context)
    held_out = data.windows_at(corpus.held_out, starts, options.context)

    # All ranks draw the whole batch from the same generator and keep their shares. Two ranks of 16
    # windows thus make the same steps, up to rounding, as one rank of 32.
    generator = torch.Generator().manual_seed(options.seed)
    global_batch = options.batch_size * rank.world_size
    step_losses = torch.zeros(options.steps, device=rank.device)  # losses of this rank

    began = time.perf_counter()
    held_out_steps = [0]
    held_out_loss = [evaluate(model, held_out, options.batch_size, rank)]
    interval = BAR_SECONDS_TERMINAL if sys.stderr.isatty() else BAR_SECONDS_LOG
    with tqdm(
        total=options.steps * global_batch * options.context,
        unit="tok",
        unit_scale=True,
        mininterval=interval,
        maxinterval=interval,
        smoothing=0,  # shows the mean rate since the start
        disable=not rank.is_first,
    ) as bar:
        for step in range(options.steps):
            starts = data.random_starts(corpus.training, global_batch, options.context, generator)
            windows = data.windows_at(corpus.training, rank.share_of(starts), options.context)
            loss = batch_loss(ddp_model, windows, rank.device, reduction="mean")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
            schedule.step()

            step_losses[step] = loss.detach()
            steps_done = step + 1
            is_last = steps_done == options.steps
            if steps_done % options.eval_every == 0 or is_last:
                held_out_steps.append(steps_done)
                held_out_loss.append(evaluate(model, held_out, options.batch_size, rank))
            # Reading the loss makes the CPU wait for a GPU, so it is not read after every step.
            if steps_done % 10 == 0 or is_last:
                bar.set_postfix(
                    loss=f"{loss.item():.2f}", held_out=f"{held_out_loss[-1]:.2f}", refresh=False
                )
            bar.update(global_batch * options.context)
    seconds = time.perf_counter() - began

    dist.all_reduce(step_losses)
    train_loss = (step_losses / rank.world_size).tolist()
    return History(train_loss, held_out_steps, held_out_loss, seconds)


def run(corpus: Corpus, options: Options, rank: Rank) -> list[str]:
    """Train, report and check -> problems, one sentence each, the same on all ranks."""

    def say(text: str) -> None:
        if rank.is_first:
            print(text, flush=True)

    # Each rank draws different weights on purpose: ReducerDDP must broadcast those of rank 0.
    torch.manual_seed(options.seed + rank.rank)
    model = GPT(len(ALPHABET), options.context, options.layers, options.heads, options.width)
    model.to(rank.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ranks = "1 rank" if rank.world_size == 1 else f"{rank.world_size} ranks"
    say(
        f"{ranks} on {rank.device.type} with {rank.backend}; "
        f"{parameters:,} parameters, {4 * parameters / 2**20:.2f} MiB of gradients "
        f"in buckets of {options.bucket_cap_mb:g} MiB\n"
        f"text: {len(corpus.training):,} characters to train on, "
        f"{len(corpus.held_out):,} in held-out files"
    )

    history = train(model, corpus, options, rank)
    first, last = history.held_out_loss[0], history.held_out_loss[-1]
    tokens = options.steps * options.batch_size * rank.world_size * options.context
    say(
        f"held-out loss {first:.3f} -> {last:.3f} nats per character "
        f"in {history.seconds:.1f} s ({tokens / history.seconds:,.0f} tokens/s)"
    )
    if rank.is_first and math.isfinite(last):  # cannot draw from NaN
        ids = generate(model, data.encode(PROMPT), options.sample_chars, options.seed, TEMPERATURE)
        say(f"--- sample ---\n{data.decode(ids)}\n--- end of sample ---")

    digests = gather_digests(model, rank.world_size)
    if rank.is_first:
        metrics = Metrics(
            world_size=rank.world_size,
            backend=rank.backend,
            device=rank.device.type,
            parameters=parameters,
            bucket_cap_mb=options.bucket_cap_mb,
            tokens_per_second=tokens / history.seconds,
            weights_sha256=digests,
            **history._asdict(),
        )
        plot_losses(metrics, options.out / "loss.png")
        write_metrics(metrics, options.out / "metrics.json")
        say(f"wrote loss.png and metrics.json to {options.out}")

    problems = []
    different = [i for i, digest in enumerate(digests) if digest != digests[0]]
    if different:
        problems.append(f"weights differ from those of rank 0 on ranks {different}")
    else:
        say(f"weights identical on all {ranks}: sha256 {digests[0][:16]}...")
    if not last < first:  # written so that NaN counts as a failure
        problems.append(f"held-out loss did not fall: {first:.3f} -> {last:.3f}")
    if rank.is_first:
        for problem in problems:
            print(f"FAILED: {problem}", file=sys.stderr, flush=True)
    # torchrun stops all ranks as soon as one exits with an error, so rank 0 finishes first.
    dist.barrier()
    return problems


def main() -> None:
    """Set up this rank, run, and exit with status 1 if anything failed."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    try:
        rank = rank_from_environment(options.device)
        if rank.is_first:
            options.out.mkdir(parents=True, exist_ok=True)
        corpus = load_corpus(options.context)
    except (LaunchError, CorpusError, OSError) as error:
        sys.exit(f"char_gpt: {error}")
    try:
        with process_group(rank):
            problems = run(corpus, options, rank)
    except KeyboardInterrupt:
        sys.exit("char_gpt: interrupted")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
