"""Compiles what a plan needs, or loads it from the cache, before the clock of a run starts."""

import numpy as np

from kizami.formats.packed_source import PackedWeight
from kizami.quantize import linear
from kizami.quantize.fp8 import to_fp8_blocks
from kizami.quantize.kernels import unpack
from kizami.quantize.plan import Plan
from kizami.quantize.settings import GIVEN, Method
from kizami.quantize.unpack import to_bf16


def warm_up(plan: Plan) -> None:
    actions = {step.action for step in plan.steps}
    if actions & {"quantize", "dequantize"}:
        # An engine's codes need no kernel; what it does not see is packed by search
        method = Method("search", plan.method.scale_sign) if plan.method.name in GIVEN else plan.method
        linear.warm_up(method, plan.policy.group_size)
    if "to_fp8" in actions:
        to_fp8_blocks(np.ones((1, 128), np.float32))
    if any(isinstance(step.encoding, PackedWeight) for step in plan.steps):
        values = np.empty((1, 32), np.float32)
        unpack.unpack_rows(np.zeros((1, 4), np.uint32), np.ones((1, 1), np.float32), values)
        to_bf16(values)
