"""Trainings with features of torch and with common recipes. Each works with either wrapper.

A usage takes a function that wraps a module, trains, and returns the tensors to compare.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn.utils import parametrizations, prune, rnn
from torch.nn.utils.parametrize import cached
from torch.utils.checkpoint import checkpoint_sequential

State = list[torch.Tensor]
Wrap = Callable[[nn.Module], nn.Module]
NUM_STEPS = 3


def _layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def _input() -> torch.Tensor:
    return torch.randn(5, 8)


def _backward(output: torch.Tensor) -> None:
    output.square().mean().backward()


def _state(model: nn.Module) -> State:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(
    model: nn.Module,
    make_input: Callable[[], torch.Tensor] = _input,
    optimizer: torch.optim.Optimizer | None = None,
) -> State:
    optimizer = optimizer or _sgd(model)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        _backward(model(make_input()))
        optimizer.step()
    optimizer.zero_grad()
    return _state(model)


# ---- recipes ------------------------------------------------------------------------------------


def sharpness_aware_minimization(wrap: Wrap) -> State:
    """The second backward of a step is at other parameters, which the first one gives."""
    model = wrap(_layers())
    optimizer = _sgd(model)
    for _ in range(NUM_STEPS):
        x = _input()
        _backward(model(x))
        with torch.no_grad():
            ascent = [0.05 * param.grad / param.grad.norm() for param in model.parameters()]
            torch._foreach_add_(list(model.parameters()), ascent)
        model.zero_grad()
        _backward(model(x))
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), ascent)
        optimizer.step()
        optimizer.zero_grad()
    return _state(model)


def adversarial_training(wrap: Wrap) -> State:
    """The generator's backward also gives gradients to the discriminator, which nobody uses."""
    generator, discriminator = wrap(_layers()), wrap(nn.Linear(4, 1))
    optimizers = [_sgd(model) for model in (generator, discriminator)]
    for _ in range(NUM_STEPS):
        fake = generator(_input())
        optimizers[1].zero_grad()
        discriminator(fake.detach()).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-discriminator(fake).mean()).backward()
        optimizers[0].step()
    return _state(generator) + _state(discriminator)


class _MomentumContrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = _layers()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.queue: torch.Tensor
        self.register_buffer("queue", torch.randn(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.query(x)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.key.parameters()), list(self.query.parameters()), 0.1)
            self.queue.copy_(torch.cat([self.queue, self.key(x)])[-6:])
        return queries @ self.queue.clone().T


def momentum_contrast(wrap: Wrap) -> State:
    return _train(wrap(_MomentumContrast()))


def averaged_weights(wrap: Wrap) -> State:
    model = wrap(_layers())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = _sgd(model)
    for _ in range(NUM_STEPS):
        _train(model, optimizer=optimizer)
        averaged.update_parameters(model)
    return _state(model) + _state(averaged) + [averaged(torch.ones(2, 8)).detach()]


def swapped_weights(wrap: Wrap) -> State:
    """Evaluates with other tensors in ``param.data``."""
    model = wrap(_layers())
    averages = [param.detach() / 2 for param in model.parameters()]
    _train(model)
    trained = [param.data for param in model.parameters()]
    for param, average in zip(model.parameters(), averages, strict=True):
        param.data = average
    with torch.no_grad():
        output = model(_input())
    for param, own in zip(model.parameters(), trained, strict=True):
        param.data = own
    return [output, *_train(model)]


def second_order_optimizer(wrap: Wrap) -> State:
    """Each step evaluates the loss several times."""
    model = wrap(_layers())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        _backward(model(_input()))
        return 1.0  # the loss of a rank would end the ranks' iterations at different times

    for _ in range(NUM_STEPS):
        optimizer.step(closure)
    return _state(model)


def groups_with_a_schedule(wrap: Wrap) -> State:
    model = wrap(_layers())
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    for _ in range(2):
        _train(model, optimizer=optimizer)
        schedule.step()
    return _state(model)


def fused_optimizer(wrap: Wrap) -> State:
    model = wrap(_layers())
    return _train(model, optimizer=torch.optim.Adam(model.parameters(), fused=True))


# ---- changes of a module ------------------------------------------------------------------------


def pruned(wrap: Wrap) -> State:
    module = _layers()
    prune.l1_unstructured(module[0], "weight", 0.3)
    state = _train(wrap(module))
    prune.remove(module[0], "weight")
    return state + _state(module)


def parametrized(wrap: Wrap) -> State:
    module = _layers()
    parametrizations.weight_norm(module[0])
    parametrizations.spectral_norm(module[2])
    parametrizations.orthogonal(module[4])
    return _train(wrap(module))


def cached_parametrizations(wrap: Wrap) -> State:
    """Both forwards share the graph of the weight."""
    module = _layers()
    parametrizations.weight_norm(module[0])
    model = wrap(module)
    optimizer = _sgd(model)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        with cached():
            _backward(model(_input()) + model(_input()))
        optimizer.step()
    return _state(model)


def norms_in_hooks(wrap: Wrap) -> State:
    module = _layers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(module[0])
    nn.utils.spectral_norm(module[2])
    return _train(wrap(module))


def quantization_aware(wrap: Wrap) -> State:
    from torch.ao import quantization

    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        return _train(wrap(quantization.prepare_qat(module.train())))


def assigned_state(wrap: Wrap) -> State:
    module = _layers()
    module.load_state_dict({k: v / 2 for k, v in module.state_dict().items()}, assign=True)
    return _train(wrap(module))


def parameters_from_a_vector(wrap: Wrap) -> State:
    module = _layers()
    model = wrap(module)
    _train(model)
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, module.parameters())
    return _train(model)


def built_on_meta(wrap: Wrap) -> State:
    with torch.device("meta"):
        module = _layers()
    module.to_empty(device="cpu")
    for param in module.parameters():
        nn.init.constant_(param, 0.1)
    return _train(wrap(module))


def checkpoint_without_prefixes(wrap: Wrap) -> State:
    model = wrap(_layers())
    optimizer = torch.optim.Adam(model.parameters())
    _train(model, optimizer=optimizer)
    state = dcp.get_model_state_dict(model)
    state_of_optimizer = dcp.get_optimizer_state_dict(model, optimizer)
    for names in (state, state_of_optimizer["state"]):
        assert not any(name.startswith("module.") for name in names)
    dcp.set_model_state_dict(model, {name: value / 2 for name, value in state.items()})
    dcp.set_optimizer_state_dict(model, optimizer, state_of_optimizer)
    return _train(model, optimizer=optimizer)


# ---- autograd -----------------------------------------------------------------------------------


def anomaly_detection(wrap: Wrap) -> State:
    with torch.autograd.set_detect_anomaly(True):
        return _train(wrap(_layers()))


def activations_on_the_host(wrap: Wrap) -> State:
    model = wrap(_layers())
    with torch.autograd.graph.save_on_cpu():
        return _train(model)


def one_thread_of_autograd(wrap: Wrap) -> State:
    with torch.autograd.set_multithreading_enabled(False):
        return _train(wrap(_layers()))


def hooks_of_params(wrap: Wrap) -> State:
    module = _layers()
    sums: list[float] = []
    module[0].weight.register_hook(lambda grad: grad * 2)
    module[4].weight.register_post_accumulate_grad_hook(lambda p: sums.append(p.grad.sum().item()))
    torch.autograd.graph.register_multi_grad_hook(
        list(module.parameters()), lambda grads: sums.append(grads[0].sum().item())
    )
    model = wrap(module)
    module[2].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return [*_train(model), torch.tensor(sums)]


def hooks_of_modules(wrap: Wrap) -> State:
    module = _layers()
    module[2].register_full_backward_hook(lambda _, grads, __: (grads[0] * 1.5,))
    module[0].register_full_backward_pre_hook(lambda _, grads: (grads[0] * 0.5,))
    model = wrap(module)
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    model.register_forward_hook(lambda _, __, output: output + 1)
    return _train(model)


def recomputed_segments(wrap: Wrap) -> State:
    class Recomputed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self[0], 2, x, use_reentrant=False)

    return _train(wrap(Recomputed(_layers())))


def backward_to_chosen_inputs(wrap: Wrap) -> State:
    module = _layers()
    model = wrap(module)
    optimizer = _sgd(model)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(_input()).sum().backward(inputs=list(module.parameters()))
        optimizer.step()
    return _state(model)


# ---- layers -------------------------------------------------------------------------------------


def attention(wrap: Wrap) -> State:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = wrap(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return _train(model, lambda: torch.randn(2, 3, 8))


def packed_sequences(wrap: Wrap) -> State:
    model = wrap(nn.LSTM(8, 6, num_layers=2, bidirectional=True))
    optimizer = _sgd(model)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        output, (hidden, _) = model(rnn.pack_sequence([torch.randn(4, 8), torch.randn(2, 8)]))
        (output.data.sum() + hidden.sum()).backward()
        optimizer.step()
    return _state(model)


def recurrent_cell(wrap: Wrap) -> State:
    """Calls the wrapper several times before a backward."""
    model = wrap(nn.GRUCell(8, 8))
    optimizer = _sgd(model)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        hidden = torch.zeros(5, 8)
        for _ in range(3):
            hidden = model(_input(), hidden)
        _backward(hidden)
        optimizer.step()
    return _state(model)


def alignment_loss(wrap: Wrap) -> State:
    model = wrap(nn.Linear(8, 5))
    optimizer = _sgd(model)
    labels, lengths = torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2])
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        scores = model(torch.randn(6, 2, 8)).log_softmax(-1)
        F.ctc_loss(scores, labels, torch.tensor([6, 6]), lengths).backward()
        optimizer.step()
    return _state(model)


def sparse_bags(wrap: Wrap) -> State:
    model = wrap(nn.Sequential(nn.EmbeddingBag(10, 8, sparse=True, mode="sum"), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _train(model, lambda: torch.randint(0, 10, (3, 4)), optimizer)


USAGES: dict[str, Callable[[Wrap], State]] = {
    name.replace("_", " "): usage
    for name, usage in dict(globals()).items()
    if not name.startswith("_") and getattr(usage, "__module__", "") == __name__
}
