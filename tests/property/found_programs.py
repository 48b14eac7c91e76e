"""Programs that the search has found, and shrunk. Each failed once.

``KNOWN`` in ``known.py`` has the faults that are not yet mended.
"""

from __future__ import annotations

import torch
from programs import Act, Fail, Freeze, Hook, Layer, Program, Step

FOUND: dict[str, Program] = {
    "conj": Program(actions=(Step(),), layers=(Layer(kind="complex", gradient="conj"),)),
    "conj neg": Program(actions=(Step(),), layers=(Layer(kind="complex", gradient="conj neg"),)),
    "neg": Program(actions=(Step(),), layers=(Layer(gradient="neg"),)),
    "neg, unused": Program(actions=(Step(),), layers=(Layer(gradient="neg"),), mode="unused"),
    "neg, float16 summed in float32": Program(
        actions=(Step(), Step()),
        layers=(Layer(gradient="neg", dtype="float16"),),
        options=(("reduce_dtype", torch.float32),),
    ),
    "decay in gradients": Program(actions=(Step(), Act("decay in gradients"), Step()), views=True),
    "zero tensor": Program(actions=(Step(),), layers=(Layer(gradient="zero tensor"),)),
    "functional, local": Program(actions=(Step(usage="functional", local="forward"),)),
    "functional, buffers": Program(
        actions=(Step(usage="functional"), Step(usage="functional")),
        layers=(Layer(kind="norm"), Layer()),
    ),
    "frozen on one rank, unused": Program(
        actions=(Freeze(layer=1, ranks=(0,)), Step()), layers=(Layer(), Layer()), mode="unused"
    ),
    "frozen on one rank, default": Program(
        actions=(Freeze(layer=1, ranks=(0,)), Step()), layers=(Layer(), Layer())
    ),
    "frozen on one rank, static": Program(
        actions=(Freeze(layer=1, ranks=(0,)), Step()), layers=(Layer(), Layer()), mode="static"
    ),
    "float16 and bfloat16 in one sum": Program(
        actions=(Step(), Step(), Step(), Step(usage="sum of two")),
        layers=(Layer(), Layer(dtype="bfloat16")),
        mixed="float16",
    ),
    "frozen after a local step": Program(
        actions=(Step(local="both"), Freeze(layer=1), Step()),
        layers=(Layer(), Layer()),
        mode="unused",
    ),
    "hook of the first wrapper": Program(
        actions=(Hook(), Act(name="wrap again"), Act(name="drop newest wrapper"), Step())
    ),
    "post-sync hook of the first wrapper": Program(
        actions=(
            Act(name="post-sync hook"),
            Act(name="wrap again"),
            Act(name="drop newest wrapper"),
            Step(),
        )
    ),
    "frozen after a local micro-step": Program(
        actions=(Step(local="both"), Freeze(layer=1), Step(zero="keep")),
        layers=(Layer(), Layer(kind="0-d")),
        mode="unused",
    ),
    "hidden output over a reentrant checkpoint": Program(
        actions=(Step(reverse=(0,)), Step()),
        layers=(Layer(), Layer(), Layer(checkpoint="reentrant")),
        mode="unused",
        output="hidden",
    ),
    "post-sync hook beside a parameter that one rank froze": Program(
        actions=(
            Step(),
            Act(name="post-sync hook"),
            Step(),
            Freeze(layer=1, ranks=(0,)),
            Step(),
        ),
        layers=(Layer(), Layer()),
    ),
    "no gradient in a backward that bypasses the wrapper": Program(
        actions=(Step(usage="bypass"),),
        layers=(Layer(gradient="none"),),
    ),
    "left out in a backward that bypasses the wrapper": Program(
        actions=(Step(usage="bypass", left_out=((3,), (3,))), Step(), Step()),
        layers=(Layer(), Layer(), Layer(), Layer(optional=True)),
    ),
    "a kept view that no rank uses, cleared on one rank": Program(
        actions=(
            Step(),
            Act(name="clear one gradient"),
            Step(usage="outputs apart, in reverse", zero="keep"),
        ),
        layers=(Layer(), Layer(), Layer()),
        mode="unused",
        views=True,
    ),
    "failure before the first gradient, mixed": Program(
        actions=(Step(local="both"), Fail(), Step(left_out=((1,), (1,))), Step()),
        layers=(Layer(), Layer(optional=True), Layer()),
        mode="unused",
        mixed="bfloat16",
    ),
    "failure in the first backward of a static graph": Program(
        actions=(Fail(), Step()),
        layers=(Layer(kind="no bias"), Layer(kind="no bias", checkpoint="reentrant", tied=True)),
        mode="static",
    ),
}
