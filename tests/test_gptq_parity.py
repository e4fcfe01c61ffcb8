"""GPTQ's codes are those of llm-compressor's `quantize_weight` for the same Hessian and the same scales, where nothing
is shrunk. It wants FP32 weights and FP32 copies of the BF16 scales: on BF16 ones it rounds each quotient to BF16.

Of a few thousand codes one may differ: it inverts in FP32, kizami in FP64, and weights lie near halves.
"""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("llmcompressor")

import torch
from compressed_tensors.quantization import QuantizationArgs
from gptq_fixtures import correlated
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

from kizami.quantize import reference
from kizami.quantize.calibrated.gptq import factorize, shrink, solve
from kizami.quantize.linear import quantize_linear
from kizami.quantize.settings import Method

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(("rows", "columns", "g"), [(64, 256, 32), (64, 320, 64), (96, 384, 128)])
def test_codes_equal_those_of_llm_compressor(rows: int, columns: int, g: int) -> None:
    rng = np.random.RandomState(columns)
    w = (rng.standard_t(6, (rows, columns)) * 0.02).astype(np.float32)
    x = torch.from_numpy(correlated(rng, 4 * columns, columns)).double()
    h = x.T @ x
    made = quantize_linear(w, None, None, g, Method("search", scale_sign="positive"))
    scale = reference.from_bf16(made.scale)  # positive: the peer's range of a scale has two ends
    factor = factorize(shrink(h.clone(), 1.0))
    assert factor is not None
    ours = solve(torch.from_numpy(w), torch.from_numpy(scale), factor).numpy()
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=g, actorder="static")
    theirs, _, fell_back = quantize_weight(
        torch.from_numpy(w.copy())[None],
        h.float()[None],
        torch.from_numpy(scale)[None],
        torch.zeros(1, *scale.shape),
        None,
        args,
    )
    assert not fell_back.any()
    codes = np.rint(theirs[0].numpy() / np.repeat(scale, g, axis=1))
    assert (ours != reference.unpack(made.packed)).mean() > 0.1
    assert (ours != codes).sum() <= 1
