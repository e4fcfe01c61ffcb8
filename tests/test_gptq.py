"""GPTQ's arithmetic against a plain loop in NumPy; what becomes of inputs that are few, dead or broken."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from gptq_fixtures import by_the_book, correlated

from kizami.quantize import reference
from kizami.quantize.calibrated.gptq import DAMPING, factorize, shrink, solve
from kizami.quantize.calibrated.hessian import SwiGlu
from kizami.quantize.calibrated.solver import pack
from kizami.quantize.linear import quantize_linear
from kizami.quantize.settings import Method


def weight(rows: int, d: int, g: int = 32, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """w float32 [N, d], the scales of `search` [N, d/g] and its codes, which are the nearest."""
    w = (np.random.RandomState(seed).standard_t(6, (rows, d)) * 0.02).astype(np.float32)
    made = quantize_linear(w, None, None, g, Method())
    return w, reference.from_bf16(made.scale), reference.unpack(made.packed)


def solved(w: np.ndarray, scale: np.ndarray, h: np.ndarray, share: float = 1.0) -> np.ndarray:
    factor = factorize(shrink(torch.from_numpy(h.copy()), share))
    assert factor is not None
    return solve(torch.from_numpy(w), torch.from_numpy(scale), factor).numpy()


def second_moments(n: int, d: int, seed: int = 1) -> np.ndarray:
    x = correlated(np.random.RandomState(seed), n, d).astype(np.float64)
    return x.T @ x


def loss(w: np.ndarray, codes: np.ndarray, scale: np.ndarray, h: np.ndarray) -> float:
    error = w.astype(np.float64) - codes * np.repeat(scale, w.shape[1] // scale.shape[1], axis=1)
    return float(np.einsum("ij,jk,ik->", error, h, error))


@pytest.mark.parametrize(("d", "g"), [(32, 32), (128, 64), (160, 32), pytest.param(384, 128, marks=pytest.mark.long)])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_codes_are_those_of_the_plain_loop(d: int, g: int, share: float) -> None:
    """One block, several, and a last one that is not whole. FP32 and FP64 may part where a weight is near a half."""
    w, scale, nearest = weight(48, d, g)
    h = second_moments(2 * d, d)
    codes, expected = solved(w, scale, h, share), by_the_book(w, scale, h, share)
    assert (codes != expected).sum() <= 2
    assert (codes != nearest).mean() > 0.1  # there was something to make good
    assert loss(w, codes, scale, h) < loss(w, nearest, scale, h)


def test_the_largest_diagonal_goes_first_and_equal_ones_in_their_order() -> None:
    h = np.diag([1.0, 3.0, 2.0, 3.0, 1.0])
    factor = factorize(torch.from_numpy(h))
    assert factor is not None
    assert factor.order.tolist() == [1, 3, 2, 0, 4]


def test_the_factor_is_the_one_of_the_inverse() -> None:
    h = second_moments(400, 300)
    factor = factorize(torch.from_numpy(h.copy()))
    assert factor is not None
    upper, order = factor.upper.double().numpy(), factor.order.numpy()
    damped = h + DAMPING * np.diag(h).mean() * np.eye(300)
    assert np.array_equal(upper, np.triu(upper))
    np.testing.assert_allclose(upper.T @ upper, np.linalg.inv(damped[np.ix_(order, order)]), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("h", ["identity", "diagonal"])
def test_columns_that_are_not_coupled_are_rounded_to_the_nearest(h: str) -> None:
    w, scale, nearest = weight(16, 160)
    diagonal = np.ones(160) if h == "identity" else np.random.RandomState(3).random_sample(160) * 100
    assert np.array_equal(solved(w, scale, np.diag(diagonal)), nearest)


def test_a_hessian_of_no_tokens_gives_the_nearest_codes() -> None:
    """Shrunk all the way: whatever stands beside the diagonal is gone; and so it is for one of zeros."""
    w, scale, nearest = weight(16, 160)
    assert np.array_equal(solved(w, scale, second_moments(100, 160), share=0.0), nearest)
    assert np.array_equal(solved(w, scale, np.zeros((160, 160)), share=0.0), nearest)


def test_weights_of_dead_inputs_are_kept() -> None:
    w, scale, nearest = weight(16, 160)
    h = second_moments(300, 160)
    dead = [0, 31, 64, 159]
    h[dead] = 0
    h[:, dead] = 0
    codes = solved(w, scale, h, 0.5)
    assert np.array_equal(codes[:, dead], nearest[:, dead])
    assert (codes[:, dead] != 0).mean() > 0.8
    assert (codes != nearest).any()


def test_shrinking_keeps_the_diagonal() -> None:
    h = second_moments(50, 40)
    shrunk = shrink(torch.from_numpy(h.copy()), 0.25).numpy()
    assert np.array_equal(np.diag(shrunk), np.diag(h))
    away = ~np.eye(40, dtype=bool)
    assert np.array_equal(shrunk[away], 0.25 * h[away])


@pytest.mark.parametrize("bad", ["indefinite", "nan", "inf"])
def test_a_hessian_without_a_factor_is_told(bad: str) -> None:
    h = second_moments(80, 40)
    if bad == "indefinite":
        h[3, 4] = h[4, 3] = 10 * h.max()
    else:
        h[3, 4] = h[4, 3] = float(bad)
    assert factorize(torch.from_numpy(h)) is None


def test_a_hessian_of_rank_one_has_a_factor() -> None:
    x = np.random.RandomState(0).standard_normal((1, 96))
    w, scale, _ = weight(8, 96)
    codes = solved(w, scale, x.T @ x, share=1 / 97)
    assert ((codes >= -8) & (codes <= 7)).all()


def test_negative_scales_are_used_as_they_are() -> None:
    w, scale, nearest = weight(16, 64)
    assert (scale < 0).any()
    assert np.array_equal(solved(w, scale, np.eye(64)), nearest)
    assert np.array_equal(solved(-w, -scale, np.eye(64)), nearest)


def test_packing_is_the_oracles() -> None:
    codes = np.random.RandomState(0).randint(-8, 8, (37, 128)).astype(np.int8)
    assert np.array_equal(pack(codes), reference.pack(codes))
    assert np.array_equal(reference.unpack(pack(codes)), codes)


def test_the_input_of_down_is_what_a_forward_pass_has_there() -> None:
    glm = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
    mlp = glm.GlmMoeDsaMLP(glm.GlmMoeDsaConfig(hidden_size=64, hidden_act="silu"), intermediate_size=24).float()
    seen: list[torch.Tensor] = []
    mlp.down_proj.register_forward_hook(lambda module, given, made: seen.append(given[0]))
    x = torch.from_numpy(np.random.RandomState(0).standard_normal((9, 64)).astype(np.float32))
    with torch.inference_mode():
        mlp(x)
        made = SwiGlu(mlp.gate_proj.weight, mlp.up_proj.weight)(x)
    torch.testing.assert_close(made, seen[0], rtol=1e-6, atol=1e-7)
