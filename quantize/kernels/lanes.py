"""LLVM vectors for the inner loops: every target lowers them to registers of its own width.

numba leaves vectors to LLVM's loop vectoriser, which has to prove that arrays do not overlap, meets 64-bit integers
wherever two int32 are added, and stores what the next pass loads again: one chunk took three to eight times as long.
Everything here is one IEEE operation per lane, or sums integers, or adds floats in a written order, so results depend
neither on the width nor on the CPU. Nothing is marked as contractible: no fused multiply-add.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

CHUNK = 32  # columns that are handled at a time; every group size is a multiple
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
_SIZES = {I8: 1, I16: 2, I32: 4, I64: 8, F32: 4, F64: 8}


def constant(kind: Any, value: Any, lanes: int = CHUNK) -> Any:
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


class Lanes:
    """The body of an intrinsic: loads and stores of its array arguments, and operations on vectors."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.build, self._context, self._signature, self.args = builder, context, signature, args

    def _pointer(self, argument: int, index: Any, kind: Any) -> Any:
        array = self._context.make_array(self._signature.args[argument])(self._context, self.build, self.args[argument])
        return self.build.bitcast(self.build.gep(array.data, [index]), kind.as_pointer())

    def load(self, argument: int, index: Any, kind: Any, lanes: int = CHUNK) -> Any:
        """lanes elements of the array `argument`, of LLVM type `kind`, from the flat `index` on."""
        pointer = self._pointer(argument, index, ir.VectorType(kind, lanes))
        return self.build.load(pointer, align=_SIZES[kind])

    def scalar(self, argument: int, index: Any, kind: Any) -> Any:
        return self.build.load(self._pointer(argument, index, kind), align=_SIZES[kind])

    def store(self, value: Any, argument: int, index: Any) -> None:
        """A vector or a scalar."""
        element = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        self.build.store(value, self._pointer(argument, index, value.type), align=_SIZES[element])

    def plus(self, index: Any, value: int) -> Any:
        return self.build.add(index, I64(value))

    def add_to(self, argument: int, index: Any, value: Any) -> None:
        """Adds a vector (float64) or a scalar (int64) to what the array holds."""
        if isinstance(value.type, ir.VectorType):
            old = self.load(argument, index, value.type.element, value.type.count)
            self.store(self.build.fadd(old, value), argument, index)
        else:
            self.store(self.build.add(self.scalar(argument, index, value.type), value), argument, index)

    def splat(self, scalar: Any, lanes: int = CHUNK) -> Any:
        kind = ir.VectorType(scalar.type, lanes)
        first = self.build.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.build.shuffle_vector(first, first, constant(I32, 0, lanes))

    def cast(self, how: str, vector: Any, kind: Any) -> Any:
        return getattr(self.build, how)(vector, ir.VectorType(kind, vector.type.count))

    def call(self, name: str, *vectors: Any) -> Any:
        kind = vectors[0].type
        suffix = f"v{kind.count}i{kind.element.width}"
        result = kind.element if name.startswith("vector.reduce") else kind
        function_type = ir.FunctionType(result, [kind] * len(vectors))
        return self.build.call(
            cgutils.get_or_insert_function(self.build.module, function_type, f"llvm.{name}.{suffix}"), vectors
        )

    def larger(self, a: Any, b: Any) -> Any:
        floats = isinstance(a.type.element, (ir.FloatType, ir.DoubleType))
        greater = self.build.fcmp_ordered if floats else self.build.icmp_signed
        return self.build.select(greater(">", a, b), a, b)

    def fold(self, vector: Any, lanes: int, combine: Any = None) -> Any:
        """To `lanes` lanes, 1 gives a scalar: the halves are combined (default: added), then the halves of that."""
        floats = isinstance(vector.type.element, (ir.FloatType, ir.DoubleType))
        combine = combine or (self.build.fadd if floats else self.build.add)
        while vector.type.count > lanes:
            half = vector.type.count // 2
            picks = [ir.Constant(ir.VectorType(I32, half), list(range(at, at + half))) for at in (0, half)]
            vector = combine(*(self.build.shuffle_vector(vector, vector, pick) for pick in picks))
        return self.build.extract_element(vector, ir.Constant(I32, 0)) if lanes == 1 else vector
