"""The search of the best plan as pure logic: states, decisions and collective calls."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from fake_training import FakeTraining

from ddpx.planning import PlanReport, ReduceCost
from ddpx.planning.candidates import (
    DEFAULT,
    Buckets,
    ReadyGradient,
    candidates,
    decoded,
    encoded,
    predicted_end_s,
)
from ddpx.planning.gain import Gain, gain_of
from ddpx.planning.search import MOST_STEPS, PlanSearch
from ddpx.planning.training import Schedule

COST = ReduceCost([(1_000, 0.001), (1_000_000, 0.011)])
GRADIENTS = [ReadyGradient(100_000, ready_s=0.001 * (10 - index)) for index in range(10)]
DEFAULT_PLAN: Buckets = (tuple(range(10)),)


def _run(training: FakeTraining, search: PlanSearch, most: int = 2 * MOST_STEPS) -> PlanReport:
    """Trains until the search has ended."""
    for _ in range(most):
        if search.advance(training.step):
            return search.report
        training.run_step()
    raise AssertionError(search.report)


def test_the_faster_plan_is_chosen_and_used() -> None:
    training = FakeTraining(GRADIENTS, DEFAULT_PLAN, COST)
    report = _run(training, PlanSearch(training))
    assert report.final and report.chosen != DEFAULT
    assert report.chosen_plan is not None and report.default_plan is not None
    assert training.plan == report.chosen_plan.buckets
    assert report.chosen_plan.predicted_end_s < report.default_plan.predicted_end_s
    assert report.gain is not None and report.gain.is_certain
    assert not training.recording
    assert report.num_steps <= Schedule().most_steps <= MOST_STEPS
    assert str(report).startswith("plan: best")
    assert PlanReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_ready_times_are_those_of_the_slowest_rank() -> None:
    training = FakeTraining(GRADIENTS, DEFAULT_PLAN, COST, slower=(1.0, 2.0))
    report = _run(training, PlanSearch(training))
    assert [g.ready_s for g in report.gradients] == [2 * g.ready_s for g in GRADIENTS]


def test_a_gain_within_its_error_is_no_gain() -> None:
    noise = random.Random(1)
    training = FakeTraining(
        GRADIENTS, DEFAULT_PLAN, COST, step_time=lambda *_: 1 + noise.random() / 10
    )
    report = _run(training, PlanSearch(training))
    assert report.chosen == DEFAULT and training.plan == DEFAULT_PLAN
    assert "no" in report.reason


def test_the_model_does_not_decide() -> None:
    """Communication slows computation: each bucket costs more than the model predicts."""
    training = FakeTraining(
        GRADIENTS, DEFAULT_PLAN, COST, step_time=lambda plan, *_: 0.1 + 0.01 * len(plan)
    )
    report = _run(training, PlanSearch(training))
    assert report.chosen == DEFAULT and report.reason == "no other plan was faster"
    assert len(report.plans) > 2
    assert str(report).startswith(f"the default plan was kept, after {report.num_steps} steps: no ")


def test_a_drift_of_the_machine_is_no_gain() -> None:
    training = FakeTraining(
        GRADIENTS, DEFAULT_PLAN, COST, step_time=lambda plan, step, rank: 1 - step / 1000
    )
    assert _run(training, PlanSearch(training)).chosen == DEFAULT


def test_a_drift_within_pairs_is_no_gain() -> None:
    """The other plans are faster until pairs of steps are compared. Then all steps get faster."""
    pairs_begin = Schedule().most_steps - 2 * Schedule().pairs * 4

    def step_time(plan: Buckets, step: int, rank: int) -> float:
        return 1 - step / 1000 - 0.1 * (plan != DEFAULT_PLAN and step < pairs_begin)

    training = FakeTraining(GRADIENTS, DEFAULT_PLAN, COST, step_time=step_time)
    report = _run(training, PlanSearch(training))
    assert report.chosen == DEFAULT and report.reason.endswith("which is not certain")


def test_other_plans_that_cannot_be_timed() -> None:
    training = FakeTraining(
        GRADIENTS, DEFAULT_PLAN, COST, step_time=lambda plan, *_: float(plan == DEFAULT_PLAN)
    )
    report = _run(training, PlanSearch(training))
    assert (report.chosen, report.reason) == (DEFAULT, "the times of steps could not be measured")


def test_collective_calls_come_at_few_steps() -> None:
    training = FakeTraining(GRADIENTS, DEFAULT_PLAN, COST)
    _run(training, PlanSearch(training))
    steps = {step for step, call in training.calls if call != "use"}
    assert len(steps) == 4  # the ends of arrivals, costs, screening and comparing
    # A block that has the plan of the block before changes nothing. Of two pairs, one pair does.
    num_blocks = Schedule().screening_rounds * 6 + 2 * Schedule().pairs
    assert [call for _, call in training.calls].count("use") < num_blocks - Schedule().pairs + 3


def test_a_rank_may_make_more_forwards() -> None:
    """A second call after a step finds nothing to do."""
    one, other = (FakeTraining(GRADIENTS, DEFAULT_PLAN, COST) for _ in range(2))
    _run(one, PlanSearch(one))
    search = PlanSearch(other)
    while not search.advance(other.step):
        for _ in range(other.step % 3):
            assert not search.advance(other.step)
        other.run_step()
    assert other.calls == one.calls


@pytest.mark.parametrize("begin", [3, 9, 16, 60, 200])
def test_steps_in_a_join_context_do_not_count(begin: int) -> None:
    """A measurement is repeated after the context."""
    training = FakeTraining(GRADIENTS, DEFAULT_PLAN, COST)
    search = PlanSearch(training)
    for _ in range(begin):
        assert not search.advance(training.step)
        training.run_step()
    search.suspend()
    assert training.plan == DEFAULT_PLAN
    before = len(training.calls)
    for number in range(5):  # a rank without inputs does not call the search
        training.run_step()
        assert number % 2 or not search.advance(training.step)
    assert len(training.calls) == before
    search.resume(training.step)
    report = _run(training, search)
    assert report.final and report.chosen != DEFAULT


def test_a_repeated_block_has_its_plan() -> None:
    """A suspended search uses the default plan. The repeated block uses the plan of the block."""

    def step_time(plan: Buckets, step: int, rank: int) -> float:
        return 0.1 + 0.01 * len(plan)

    training = FakeTraining(GRADIENTS, DEFAULT_PLAN, COST, step_time=step_time)
    search = PlanSearch(training)
    while training.plan == DEFAULT_PLAN:
        search.advance(training.step)
        training.run_step()
    plan = training.plan
    search.suspend()
    training.run_step()
    search.resume(training.step)
    assert training.plan == plan
    while not search.advance(training.step):
        training.run_step()
    for measured in search.report.plans:
        assert measured.step_s == step_time(measured.buckets, 0, 0)


def test_the_search_ends() -> None:
    training = FakeTraining(GRADIENTS, DEFAULT_PLAN, COST)
    search = PlanSearch(training)
    while training.step < 400:
        if search.advance(training.step):
            break
        search.suspend()  # always a new context
        training.run_step()
    report = _run(training, search)
    assert report.chosen == DEFAULT and "did not suffice" in report.reason


def test_a_search_that_ends_while_it_is_suspended_changes_no_plan() -> None:
    """Ranks without inputs could not take part in the change."""
    training = FakeTraining(GRADIENTS, DEFAULT_PLAN, COST)
    search = PlanSearch(training)
    while training.plan == DEFAULT_PLAN:
        search.advance(training.step)
        training.run_step()
    search.suspend()
    before = len(training.calls)
    while not search.advance(training.step):
        training.run_step()
    assert training.plan == DEFAULT_PLAN and len(training.calls) == before


def test_giving_up_restores_the_default_plan() -> None:
    training = FakeTraining(GRADIENTS, DEFAULT_PLAN, COST)
    search = PlanSearch(training)
    while training.plan == DEFAULT_PLAN:
        search.advance(training.step)
        training.run_step()
    search.give_up("a reason")
    assert training.plan == DEFAULT_PLAN and not training.recording
    assert search.report.chosen == DEFAULT and search.report.reason == "a reason"


def test_equal_plans_need_no_steps() -> None:
    gradients = [ReadyGradient(1, ready_s=0.001), ReadyGradient(1, ready_s=0.001)]
    training = FakeTraining(gradients, ((0, 1),), ReduceCost([(1, 1.0), (1 << 30, 1.1)]))
    report = _run(training, PlanSearch(training))
    assert report.chosen == DEFAULT and "equal" in report.reason


def test_missing_arrivals_end_the_search() -> None:
    training = FakeTraining([replace(g, ready_s=0) for g in GRADIENTS], DEFAULT_PLAN, COST)
    assert "no arrival" in _run(training, PlanSearch(training)).reason


# ---- plans ---------------------------------------------------------------------------------------


def test_candidates_are_partitions_and_differ() -> None:
    draw = random.Random(0)
    for _ in range(30):
        count = draw.randrange(1, 12)
        gradients = [
            ReadyGradient(
                draw.randrange(1, 10**6), draw.randrange(2), draw.random() < 0.1, draw.random()
            )
            for _ in range(count)
        ]
        plans = candidates(gradients, tuple((index,) for index in range(count)), COST)
        assert next(iter(plans)) == DEFAULT
        assert len(set(plans.values())) == len(plans)
        for buckets in plans.values():
            assert sorted(index for bucket in buckets for index in bucket) == list(range(count))
            for bucket in buckets:
                assert len({gradients[index].kind for index in bucket}) == 1
                assert len(bucket) == 1 or not any(gradients[index].alone for index in bucket)
        assert decoded(encoded(plans, count), count) == plans


def test_the_best_plan_is_predicted_to_end_first() -> None:
    plans = candidates(GRADIENTS, DEFAULT_PLAN, COST)
    ends = {name: predicted_end_s(GRADIENTS, plan, COST) for name, plan in plans.items()}
    assert min(ends, key=lambda name: ends[name]) == "best"


def test_a_large_model_is_planned_in_parts() -> None:
    gradients = [ReadyGradient(1000, ready_s=0.0001 * index) for index in range(5000)]
    plans = candidates(gradients, (tuple(range(5000)),), COST)
    assert sum(map(len, plans["best"])) == 5000
    assert predicted_end_s(gradients, plans["best"], COST) < predicted_end_s(
        gradients, plans[DEFAULT], COST
    )


# ---- gains ---------------------------------------------------------------------------------------


def test_a_gain_is_certain_beyond_twice_its_error() -> None:
    assert not Gain(step_s=1, saved_s=0.0199, error_s=0.01).is_certain
    assert Gain(step_s=1, saved_s=0.0201, error_s=0.01).is_certain
    assert not Gain(step_s=1, saved_s=0, error_s=0).is_certain


def test_outliers_count_little() -> None:
    default = [1.0 + 0.001 * (n % 3) for n in range(18)]
    other = [0.9 + 0.001 * (n % 2) for n in range(18)]
    default[4] = 40.0
    gain = gain_of(default, other)
    assert gain is not None and gain.is_certain
    assert gain.saved_s == pytest.approx(0.1, abs=0.01)


def test_steps_that_were_not_measured_are_left_out() -> None:
    assert gain_of([1.0, 0.0, 1.0], [1.0, 1.0, 0.0]) is None


def test_the_error_of_equal_plans_is_right() -> None:
    """Of many comparisons of equal plans, about one in 40 may find a certain gain."""
    draw = random.Random(0)
    found = 0
    for _ in range(1000):
        times = [[1 + draw.gauss(0, 0.1) for _ in range(18)] for _ in range(2)]
        gain = gain_of(*times)
        assert gain is not None
        found += gain.is_certain
    assert found < 60
