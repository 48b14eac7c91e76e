"""ddpx: data-parallel training for PyTorch with its own gradient reducer.

``ReducerDDP`` drops into any script that uses ``torch.nn.parallel.DistributedDataParallel``.
"""

import torch  # noqa: F401  (loads the libraries that the extension links to)

from ddpx.module import ReducerDDP

__all__ = ["ReducerDDP", "__version__"]
__version__ = "0.1.0"
