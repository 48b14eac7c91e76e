"""Says how a wrapper chooses its buckets."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(nn.Linear(2, 2), bucket_cap_mb=5)
if dist.get_rank() == 0:
    print(f"auto_buckets: {model._ddpx.options.auto_buckets}, cap: {model.bucket_bytes_cap}")
dist.destroy_process_group()
