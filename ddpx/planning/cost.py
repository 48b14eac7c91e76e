"""The time of an all-reduce, by its size."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class ReduceCost:
    """Interpolates measured times of all-reduces.

    Between two sizes the time is linear in the size. Beyond the largest size, the last slope
    continues. Below the smallest size, the time is that of the smallest size.

    Args:
        points: Pairs of a size in bytes and a time in seconds. Sizes differ.

    Raises:
        ValueError: There are fewer than two points, two points have the same size, or a size or a
            time is not positive.

    Example:
        >>> from ddpx.planning import ReduceCost
        >>> cost = ReduceCost([(1_000, 0.001), (3_000, 0.002)])
        >>> cost(2_000), cost(5_000), cost(1)
        (0.0015, 0.003, 0.001)
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        points = sorted(points)
        sizes = {size for size, _ in points}
        if len(sizes) < max(2, len(points)) or any(s <= 0 or t <= 0 for s, t in points):
            raise ValueError(
                "the cost of all-reduces needs two positive sizes and times, and one time for each "
                f"size, but got {points}"
            )
        values = torch.tensor(points, dtype=torch.float64, device="cpu")
        self._sizes, self._times = values.T.contiguous()
        # A noisy measurement must not make a larger all-reduce the faster one.
        self._times = self._times.cummax(0).values
        self._slopes = self._times.diff() / self._sizes.diff()

    def scaled(self, factor: float) -> ReduceCost:
        """Returns the same costs, each multiplied by ``factor``.

        Args:
            factor: A positive number.

        Example:
            >>> from ddpx.planning import ReduceCost
            >>> ReduceCost([(1_000, 0.001), (3_000, 0.002)]).scaled(3)(3_000)
            0.006
        """
        points = zip(self._sizes.tolist(), self._times.tolist(), strict=True)
        return ReduceCost([(size, factor * time) for size, time in points])

    def of(self, num_bytes: torch.Tensor) -> torch.Tensor:
        """Returns the times of several all-reduces, as a float64 tensor in seconds.

        Args:
            num_bytes: The sizes, as a tensor.

        Example:
            >>> from ddpx.planning import ReduceCost
            >>> cost = ReduceCost([(1_000, 0.001), (3_000, 0.002)])
            >>> cost.of(torch.tensor([2_000, 5_000])).tolist()
            [0.0015, 0.003]
        """
        sizes = num_bytes.to(torch.float64).clamp(min=float(self._sizes[0]))
        left = (torch.searchsorted(self._sizes, sizes, right=True) - 1).clamp(
            max=len(self._slopes) - 1
        )
        return self._times[left] + (sizes - self._sizes[left]) * self._slopes[left]

    def __call__(self, num_bytes: float) -> float:
        """The time in seconds of one all-reduce."""
        return float(self.of(torch.tensor([num_bytes], device="cpu"))[0])
