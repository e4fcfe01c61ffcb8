"""What a piece of work takes of memory, from shapes and dtypes alone: never less than what it really takes.

Each formula follows the code that it names. A figure in it is bytes per element of arrays that exist at one time."""

from math import prod

from kizami.formats.dialects import ScaledWeight
from kizami.formats.packed_source import PackedWeight
from kizami.quantize.admission import Need
from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.survey import top_count
from kizami.quantize.linear import BAND_BYTES, TILE
from kizami.quantize.plan import Shard, Step
from kizami.quantize.settings import Policy
from kizami.quantize.tensor import BYTE_FOR_BYTE, Piece

OVERHEAD = 1 << 19  # Python's objects, rounding to whole pages (Buffers), small arrays
GRID = 24  # read_scales and quantize_linear: raw, float32, a copy without -0.0, what is finite
FOUND = 12  # of a weight among the largest: its magnitude, its error, the magnitude again to find the threshold
BY_COLUMN = 96  # quantize_linear's span, and `weighted`'s float64 and int64 of each column


def need_of(piece: Piece, policy: Policy) -> Need:
    """Bytes of `piece`: what it works in, and what it hands to the writer."""
    step = piece.step
    if not step.sources:
        return Need(OVERHEAD, 0)
    match step.action:
        case "quantize":
            work, result = _quantize(step, policy), step.nbytes
        case "repack":
            work, result = _repack(step, policy), step.nbytes
        case "dequantize":
            work, result = _dequantize(piece), 2 * piece.count * prod(step.shape[1:])
        case "to_fp8":
            n = piece.count * prod(step.shape[1:])
            work, result = 16 * n, n + step.outputs[1].nbytes  # raw, two widened, and PackedRows' scales
        case _:
            work, result = _pass_on(piece)
    return Need(work + OVERHEAD, result)


def _quantize(step: Step, policy: Policy) -> int:
    """linear.quantize_linear, and arrange.arrange where the layout is another one."""
    n, columns = prod(step.shape), step.shape[1]
    survey = (2 if isinstance(step.encoding, ScaledWeight) else 8) * n // CHUNK
    if isinstance(step.encoding, ScaledWeight) and step.encoding.block[1] % policy.group_size:
        survey = 8 * n // CHUNK
    found = FOUND * CHUNK * (top_count(n) + 1)  # chunks above the floor, were every weight of them above it
    bands = 4 * max(BAND_BYTES, 4 * TILE, 8 * columns)
    return survey + found + bands + _grid(step) + BY_COLUMN * columns + _other_layout(step, policy)


def _repack(step: Step, policy: Policy) -> int:
    encoding = step.encoding
    assert isinstance(encoding, PackedWeight)
    n = prod(step.shape)
    return n // 8 + GRID * prod(encoding.grid) + _other_layout(step, policy)


def _other_layout(step: Step, policy: Policy) -> int:
    """The form that arrange.arrange makes the output's of: codes, a scale in BF16, and that in float32 and F16 twice
    while it is looked whether F16 holds it."""
    n = prod(step.shape)
    return 0 if policy.format == "pack-quantized" else n // 2 + n // policy.group_size * (2 + GRID)


def _dequantize(piece: Piece) -> int:
    step = piece.step
    n = piece.count * prod(step.shape[1:])
    if isinstance(step.encoding, ScaledWeight):
        return n + _grid(step)
    return 5 * n + GRID * n // (step.encoding.group_size if isinstance(step.encoding, PackedWeight) else 1)


def _pass_on(piece: Piece) -> tuple[int, int]:
    step = piece.step
    kept = step.action == "keep_fp8"
    scales = step.outputs[1].nbytes if kept and piece.last else 0
    nbytes = piece.count if step.action in BYTE_FOR_BYTE else step.nbytes
    return (3 * nbytes + GRID * scales // 4 if kept else 0), nbytes + scales


def _grid(step: Step) -> int:
    return GRID * prod(step.encoding.grid) if isinstance(step.encoding, ScaledWeight) else 0


def held_bytes(shard: Shard) -> int:
    """What ShardWriter holds of tensors that are made before it is their turn, at most."""
    order = [spec.name for spec in shard.tensors if spec.nbytes]
    held: dict[str, int] = {}
    most = due = 0
    for step in shard.steps:
        for spec in (spec for spec in step.outputs if spec.nbytes):
            held[spec.name] = spec.nbytes
            while due < len(order) and order[due] in held:
                del held[order[due]]
                due += 1
        waiting = step.outputs[1].nbytes if step.action == "to_fp8" else 0  # scales of a piece, for the last codes
        most = max(most, sum(held.values()) + waiting if held or waiting else 0)
    return most
