"""The comparison of trainings is by digests of every bit. The earliest difference comes first."""

import pytest
import torch

from ddpx.testing.events import Event, compare, digest


def test_digest_is_of_the_bits():
    x = torch.randn(3, 4)
    assert digest(x) == digest(x.clone())
    assert digest(x[:, ::2]) == digest(torch.empty(3, 4)[:, ::2].copy_(x[:, ::2]))
    assert digest(None) is None
    one, other = (torch.sparse_coo_tensor([[1, 1]], [x, 1 - x], (2,)) for x in (0.5, 0.25))
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    "one, other",
    [
        (torch.tensor([1j]), torch.tensor([1j]).conj()),
        (torch.tensor([1j]).imag, torch.tensor([1j]).conj().imag),
        (torch.sparse_coo_tensor(size=(2,)), torch.sparse_coo_tensor(size=(3,))),
    ],
    ids=["conjugate", "negative", "shape of sparse"],
)
def test_digest_sees_views_and_shapes(one: torch.Tensor, other: torch.Tensor) -> None:
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([[-0.0, 1.0], [2.0, 3.0]]),
        torch.tensor([[0.0, 1.0], [2.0, 3.0 + 2**-22]]),
        torch.tensor([0.0, 1.0, 2.0, 3.0]),
        torch.tensor([[0.0, 1.0], [2.0, 3.0]]).t().contiguous().t(),
        torch.tensor([[0.0, 1.0], [2.0, 3.0]]).view(torch.int32),
        torch.tensor([[0.0, 1.0], [2.0, 3.0]]).to_sparse(),
        None,
    ],
    ids=["sign of zero", "last bit", "shape", "strides", "dtype", "sparse", "missing"],
)
def test_digest_sees(other):
    assert digest(torch.tensor([[0.0, 1.0], [2.0, 3.0]])) != digest(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.complex(torch.arange(6.0), torch.ones(6)).view(2, 3).t(),
        lambda: torch.tensor(1.5, dtype=torch.bfloat16),
        lambda: torch.empty(0, 4),
        lambda: torch.tensor([True, False]),
        lambda: torch.eye(4).to_sparse(),
    ],
    ids=["complex", "scalar", "empty", "bool", "sparse"],
)
def test_digest_of_any_tensor(make):
    assert digest(make()) == digest(make())
    if make().numel():
        assert digest(make()) != digest(torch.zeros_like(make()))


def _training(loss: str = "0.5", grad: str | None = "g", weight: str = "w") -> list[Event]:
    return [
        Event("weight", 0, 0, {"a": "start", "b": "start"}),
        Event("loss", 1, -1, {"number 0": loss}),
        Event("gradient", 1, 0, {"a": grad, "b": "g"}),
        Event("weight", 1, 0, {"a": weight, "b": "w"}),
    ]


def test_the_same_is_identical():
    verdict = compare([_training()] * 2, [_training()] * 2)
    assert verdict.identical
    assert verdict.num_values == {"weight": 8, "loss": 2, "gradient": 4}


@pytest.mark.parametrize("model, kinds", [(0, ["loss", "gradient"]), (1, ["gradient"])])
def test_differences_of_one_step(model: int, kinds: list[str]) -> None:
    """They are in order of kinds. An event of another model ends the comparison."""
    plain = [Event("gradient", 2, 0, {"a": "g"}), Event("loss", 2, 0, {"a": "l"})]
    other = [Event("gradient", 2, model, {"a": "x"}), Event("loss", 2, 0, {"a": "x"})]
    assert [each.event.kind for each in compare([plain], [other]).differences] == kinds


def test_the_earliest_difference_of_all_ranks_comes_first():
    """Rank 0 differs as well, but later in the step."""
    plain = [_training()] * 2
    verdict = compare(plain, [_training(weight="x"), _training(grad=None)])
    first, second = verdict.differences
    assert (first.rank, first.event.kind, first.step, first.names) == (1, "gradient", 1, ["a"])
    assert (second.rank, second.event.kind, second.names) == (0, "weight", ["a"])
    assert first.same_course


def test_a_shorter_training_takes_another_course():
    verdict = compare([_training()], [_training()[:3]])
    (only,) = verdict.differences
    assert not only.same_course and only.actual is None and only.event.kind == "weight"


def test_other_params_are_another_course():
    renamed = [*_training()[:3], Event("weight", 1, 0, {"a": "w", "c": "w"})]
    (only,) = compare([_training()], [renamed]).differences
    assert not only.same_course and only.index == 3
