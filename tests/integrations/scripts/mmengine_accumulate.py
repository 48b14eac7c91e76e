"""mmengine: during accumulation, runs forward inside no_sync and backward outside."""

import torch
import torch.distributed as dist
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from torch import nn

NUM_MICRO_STEPS = 3


class Net(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


dist.init_process_group("gloo")
torch.manual_seed(0)
model = MMDistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optim_wrapper = OptimWrapper(optimizer, accumulative_counts=NUM_MICRO_STEPS)
optim_wrapper.initialize_count_status(model, init_counts=0, max_counts=12)
for micro_step in range(12):
    torch.manual_seed(10 * micro_step + dist.get_rank())
    model.train_step({"x": torch.randn(5, 6)}, optim_wrapper)
if hasattr(model.reducer, "num_steps"):
    print(f"averaged {model.reducer.num_steps} times")
dist.destroy_process_group()
