"""What `--method gptq` costs beside `weighted`: operations and memory, from shapes and the number of tokens alone."""

from kizami.formats.families import Role
from kizami.quantize.calibrated.solver import FACTORS_KEPT, LAYERS_OPEN, MLP_ROLES, PARTS
from kizami.quantize.plan import Plan, Step

HELD_OUT = 0.1  # of the tokens, as kizami calibrate holds them out by default
# Operations per second on one core of an AMD EPYC, over a whole expert of Kimi-K2: 1.8e12 in 27 s.
SOLVE_RATE = 65e9
CHUNK = 1024  # tokens at a time (calibrated/hessian.py, which needs torch to be imported)
ROUTED_BYTES = 40 * 16  # of a token: experts and gates of 16 at most, sorted once to be looked at
TORCH_BYTES = 350 << 20  # the library itself


def solve_operations(plan: Plan) -> float:
    """Over all linears whose inputs calibration keeps, if tokens spread evenly over the experts."""
    tokens = float((plan.calibration or {}).get("tokens", 0))
    text = plan.config.get("text_config")
    top_k = (text if isinstance(text, dict) else plan.config).get("num_experts_per_tok")
    experts = {(s.place.layer, s.place.expert) for s in plan.steps if s.place.role is Role.ROUTED_EXPERT}
    per_layer = len(experts) / max(1, len({layer for layer, _ in experts}))
    routed = tokens * (top_k if type(top_k) is int else 1) / max(1.0, per_layer)
    return sum(_operations(s, routed if s.place.role is Role.ROUTED_EXPERT else tokens) for s in _solved(plan))


def solve_bytes(plan: Plan) -> int:
    """At the peak of the largest solve: Hessian and Cholesky factor in FP64 with what the inversion needs beside them,
    one U in FP32 that is kept; and W, its remainder, two errors in FP32."""
    sizes = [24 * s.shape[1] ** 2 + 16 * s.weights for s in _solved(plan)]
    return TORCH_BYTES + max(sizes) if sizes else 0


def solve_peak(plan: Plan) -> int:
    """Never less than what solves take beside torch: that, two factors that are kept, gate and up in FP32 and BF16, a
    run of tokens through the widest of them in FP64, and who was routed where in the layers that are open."""
    solved = _solved(plan)
    if not solved:
        return 0
    width, rows = max(s.shape[1] for s in solved), max(s.shape[0] for s in solved)
    tokens = int((plan.calibration or {}).get("tokens", 0) / (1 - HELD_OUT))
    chunk = CHUNK * 24 * (width + rows)
    beside = FACTORS_KEPT * 4 * width**2 + 12 * max(s.weights for s in solved) + chunk
    return solve_bytes(plan) - TORCH_BYTES + beside + LAYERS_OPEN * tokens * ROUTED_BYTES


def _solved(plan: Plan) -> list[Step]:
    return [s for s in plan.steps if s.action == "quantize" and _is_seen(s)]


def _is_seen(step: Step) -> bool:
    return step.place.role in MLP_ROLES and step.place.part in PARTS and not step.place.in_mtp


def _operations(step: Step, n: float) -> float:
    """n tokens, held-out ones included, through a linear [rows, d]: its Hessian, the factor (both shared by gate and
    up), the loop over columns, the losses of two candidates; of a down_proj also the inputs that gate and up make."""
    rows, d = step.shape
    is_down = step.place.part == "down_proj"
    factor = n * 2.0 * d * d + 4 / 3 * d * d * d
    made = 4 * n * d * rows if is_down else 0.0
    return (factor if is_down else factor / 2) + rows * d * d + 4 * HELD_OUT * n * rows * d + made
