"""Turns any program into a valid program: a program whose every step has a correct result.

The search draws and shrinks freely. This pure function then drops or replaces what has no meaning,
so a program stays valid when actions or layers are removed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradient_forms import forms_of
from programs import (
    EVERY_RANK,
    Act,
    Action,
    Fail,
    Freeze,
    Hook,
    Layer,
    Program,
    Step,
    Uneven,
    original,
)
from usages import APART, SIMPLE, TWO_BACKWARDS

# torch refuses, or the number of parts of a gradient would differ from that of the first backward.
NOT_WITH_REENTRANT = ("sum of two", "gradient of an input", "outputs apart, in reverse")
FUNCTIONAL = ("functional", "functional in part")
# torch supports no other dtypes for these kinds.
DTYPES_OF_KIND = {
    "norm": ("float64", "float32"),
    "complex": ("float64",),
    "sparse": ("float64", "float32", "bfloat16"),
}


def valid(program: Program) -> Program:
    """Returns the nearest valid program. A valid program is returned as it is."""
    program = replace(program, layers=_layers(program))
    program = replace(program, options=_options(program), mixed=_mixed(program))
    return replace(program, actions=tuple(_Actions(program).valid()))


def _accumulates(program: Program) -> bool:
    """Whether a gradient may be added to another one. torch refuses this for a zero tensor."""
    plain = Step()
    return any(layer.tied or layer.checkpoint != "none" for layer in program.layers) or any(
        isinstance(action, Fail)
        or (
            isinstance(action, Step)
            and (action.usage, action.local, action.zero) != (plain.usage, plain.local, plain.zero)
        )
        for action in program.actions
    )


def _layers(program: Program) -> tuple[Layer, ...]:
    layers: list[Layer] = []
    accumulates = _accumulates(program)
    checkpoint = next((x.checkpoint for x in program.layers if x.checkpoint != "none"), "none")
    for index, layer in enumerate(program.layers):
        refused = layer.gradient == "zero tensor" and accumulates
        if refused or layer.gradient not in forms_of(layer.kind):
            layer = replace(layer, gradient="plain")
        dtypes = DTYPES_OF_KIND.get(layer.kind, ())
        if dtypes and layer.dtype not in dtypes:
            layer = replace(layer, dtype=dtypes[0])
        if layer.checkpoint != "none":
            layer = replace(layer, checkpoint=checkpoint)
        same = [x for x in layers if (x.kind, x.dtype) == (layer.kind, layer.dtype)]
        if not same or layer.kind not in ("linear", "no bias"):
            layer = replace(layer, tied=False)
        if layer.tied or index == 0:
            layer = replace(layer, frozen=False, ignored=False)
        if any(x.tied and (x.kind, x.dtype) == (layer.kind, layer.dtype) for x in program.layers):
            layer = replace(layer, ignored=False)
        layers.append(layer)
    made = tuple(layers)
    if checkpoint == "reentrant":
        # An error would be correct if the number of parts of a gradient grew after the first step.
        fixed = _weights_in_checkpoints(made)
        made = tuple(
            replace(x, optional=x.optional and original(made, i) not in fixed)
            for i, x in enumerate(made)
        )
    return (replace(made[0], optional=False), *made[1:])


def _weights_in_checkpoints(layers: tuple[Layer, ...]) -> set[int]:
    return {original(layers, i) for i, x in enumerate(layers) if x.checkpoint == "reentrant"}


def _options(program: Program) -> tuple[tuple[str, Any], ...]:
    kinds = {layer.kind for layer in program.layers}
    dropped = set()
    if program.mixed and program.mixed == _mixed(program):
        dropped.add("reduce_dtype")
    if {"sparse", "complex"} & kinds:
        dropped.add("reduce_dtype")
    return tuple(sorted((k, v) for k, v in program.options if k not in dropped))


def _mixed(program: Program) -> str:
    """The hand-made average casts only outside checkpoints, and only params."""
    kinds = {layer.kind for layer in program.layers}
    checkpointed = any(layer.checkpoint != "none" for layer in program.layers)
    return "" if checkpointed or {"norm", "complex", "sparse"} & kinds else program.mixed


class _Actions:
    """Goes through the actions of a program, and keeps the state that validity depends on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.layers = program.layers
        self.frozen: set[tuple[int, int]] = set()  # pairs of layer and rank
        self.learned = False  # whether an averaged backward came on each rank
        self.learned_apart = False  # whether one came on one rank only
        self.has_hook = self.has_post_sync = False
        self.has_wrapped_again = False
        self.must_clear = False  # gradients may be an average, or may have lost their weights
        self.has_history = False  # gradients may have a history
        steps = (action for action in program.actions if isinstance(action, Step))
        self.first_step = next(steps, Step())

    def valid(self) -> list[Action]:
        found = [self._action(action) for action in self.program.actions]
        return [action for action in found if action is not None]

    def _action(self, action: Action) -> Action | None:
        if isinstance(action, Step):
            return self._step(action)
        if isinstance(action, Freeze):
            return self._freeze(action)
        if isinstance(action, Hook):
            return self._hook(action)
        if isinstance(action, Uneven):
            return self._uneven(action)
        return self._act(action) if isinstance(action, Act) else self._fail(action)

    def _step(self, step: Step) -> Step:
        step = replace(step, left_out=self._left_out(step))
        usage = step.usage
        checkpoints = {layer.checkpoint for layer in self.layers}
        if "reentrant" in checkpoints and usage in NOT_WITH_REENTRANT:
            usage = "plain"
        # A recomputed forward would use the params, and not the tensors in their places.
        if usage in FUNCTIONAL and (len(checkpoints) > 1 or self.program.mixed):
            usage = "plain"
        if usage in FUNCTIONAL and checkpoints != {"none"}:
            usage = "plain"
        if usage in APART and not self._may_be_apart(step):
            usage = "plain"
        if usage == "gradient penalty" and not self._has_second_gradients():
            usage = "plain"
        if usage == "to params" and "reentrant" in checkpoints:
            usage = "plain"
        # Of two forwards in one backward, the one that bypasses the wrapper has no own weight.
        if usage == "sum of two" and self.program.average == "weights":
            usage = "plain"
        # A second average would count the first one once for each rank.
        counts_averages = self.program.average != "mean"
        if counts_averages and usage in TWO_BACKWARDS and step.local != "both":
            usage = "plain"
        # An output that hides its tensors, and a usage with several forwards, leave open which
        # backward is local, if forward or backward alone is in no_sync().
        is_clear = usage in SIMPLE and self.program.output != "hidden"
        local = step.local if is_clear or not step.local else "both"
        self.learned = self.learned or not local
        self.learned_apart = self.learned_apart and not self.learned
        # torch zeroes no view in place that has a history.
        zero = "none" if self.has_history and step.zero == "zeros" else step.zero
        if counts_averages and self.must_clear and zero == "keep":
            zero = "none"
        self.must_clear = not local or (self.must_clear and zero == "keep")
        return replace(step, usage=usage, local=local, zero=zero)

    def _has_second_gradients(self) -> bool:
        return not self.program.mixed and all(
            layer.gradient == "plain" and layer.checkpoint == "none" and layer.kind != "sparse"
            for layer in self.layers
        )

    def _left_out(self, step: Step) -> tuple[tuple[int, ...], ...]:
        if self.program.mode == "static":
            step = self.first_step
        optional = {i for i, layer in enumerate(self.layers) if layer.optional}
        return tuple(tuple(sorted(optional & set(out))) for out in step.left_out)

    def _may_be_apart(self, step: Step) -> bool:
        """Default mode knows which outputs may still have a backward only if it sees them.

        With zeros from one rank, or with a hook that doubles, a second average differs from the
        first. The hand-made average calls no post-sync hook after a backward that misses params.
        """
        if self.program.mode == "static" or self.has_hook:
            return False
        if self.program.mode != "default":
            return True
        if self.has_post_sync or self.frozen or any(step.left_out):
            return False
        return self.program.output != "hidden"

    def _freeze(self, action: Freeze) -> Freeze | None:
        index = action.layer % len(self.layers)
        layer = self.layers[index]
        ranks = tuple(sorted(set(action.ranks)))
        pairs = {(index, rank) for rank in ranks}
        if not action.frozen:
            self.frozen -= pairs
            return replace(action, layer=index, ranks=ranks) if not layer.frozen else None
        # The loss must reach a param. A static graph does not check again who uses a param, and a
        # param that is frozen when the parts of its gradient are counted must be frozen later, too.
        if index == 0 or layer.tied or layer.frozen or not ranks:
            return None
        if not self.learned and (layer.optional or index in _weights_in_checkpoints(self.layers)):
            return None
        if layer.optional and self.program.mode == "static":
            return None
        self.frozen |= pairs
        return replace(action, layer=index, ranks=ranks)

    def _fail(self, action: Fail) -> Fail | None:
        """Ranks that fail in backward must have launched the same buckets."""
        if self.must_clear and self.program.average != "mean":
            return None  # the kept average would raise another error
        self.must_clear = False
        differ = self.program.mode == "static" and len(set(self._left_out(Step()))) > 1
        of_ranks = [{i for i, r in self.frozen if r == rank} for rank in EVERY_RANK]
        # The first averaged backward of a rank launches all buckets at its end.
        same = not differ and not self.learned_apart and of_ranks[0] == of_ranks[1]
        return action if same else replace(action, place="forward")

    def _uneven(self, action: Uneven) -> Uneven | None:
        if self.program.manual or self.has_post_sync or self.frozen:
            return None
        # A static graph does not check again who uses a param.
        if self.program.mode == "static" and len(set(self._left_out(Step()))) > 1:
            return None
        self.must_clear = True
        self.learned = self.learned or all(action.counts)
        self.learned_apart = not self.learned
        return action

    def _hook(self, action: Hook) -> Hook | None:
        sparse = any(layer.kind == "sparse" for layer in self.layers)
        if sparse or self.program.mixed or "reduce_dtype" in dict(self.program.options):
            return None
        if self.program.average != "mean":
            action = replace(action, kind="allreduce")
        self.has_hook = True
        return action

    def _act(self, action: Act) -> Act | None:
        if action.name in ("wrap again", "copy") and not self._is_plain_wrapper():
            return None
        if action.name == "wrap again":
            if self.frozen:  # a wrapper does not average params that are frozen when it is made
                return None
            self.has_wrapped_again = True
        if action.name == "drop newest wrapper" and not self.has_wrapped_again:
            return None
        if action.name == "copy" and (self.has_hook or self.has_post_sync):
            return None
        if action.name == "post-sync hook":
            self.has_post_sync = True
        # The weights of local gradients are forgotten, so these gradients must not be kept.
        if action.name == "reset" and self.program.average == "weights":
            self.must_clear = True
        if action.name == "decay in gradients":
            self.has_history = True
        return action

    def _is_plain_wrapper(self) -> bool:
        """A second front takes over no weights. A copy of a replicated module has no front."""
        return (self.program.front, self.program.average) == ("wrapper", "mean")
