"""Plans of buckets: files, costs of all-reduces, and the search for the best plan."""

from ddpx.planning.bucket_plan import BucketPlan, indices_of, plan_of
from ddpx.planning.cost import ReduceCost
from ddpx.planning.partition import Gradient, best_partition
from ddpx.planning.report import MeasuredPlan, PlanReport

__all__ = [
    "BucketPlan",
    "Gradient",
    "MeasuredPlan",
    "PlanReport",
    "ReduceCost",
    "best_partition",
    "indices_of",
    "plan_of",
]
