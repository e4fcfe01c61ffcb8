"""One operation that numba's own vectoriser gets wrong: summing table rows (0.05 to 0.5 weights per ns, here 3).

It has to assume that a sum kept in an array overlaps the table, it packs no named scalars, and it has no saturating
addition, which keeps 16 bits per sum enough. So the sums of a chunk are written as LLVM vectors, which every target
lowers to its own width; integers, hence the same result everywhere.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kizami.quantize.kernels.jit import config

WIDTHS = (32, 16)  # one AVX-512 and one AVX2 register of uint16
COUNT = sum(WIDTHS)  # sums per group: one per candidate of `search`
ROWS = 32  # weights per chunk, as rows.CHUNK
SATURATED = 0xFFFF


def _python(table: Any, top: int, flip: int, codes: Any, begin: int, sums: Any, at: int) -> None:
    for j in range(COUNT):
        total = 0
        for i in range(begin, begin + ROWS):
            total = min(total + int(table[((top << 8) + (int(codes[i]) ^ flip)) * COUNT + j]), SATURATED)
        sums[at + j] += total


def _llvm(typing: Any, table: Any, top: Any, flip: Any, codes: Any, begin: Any, sums: Any, at: Any) -> tuple[Any, Any]:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pointer(argument: int, index: Any, kind: Any) -> Any:
            data = context.make_array(signature.args[argument])(context, builder, args[argument]).data
            return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())

        def plus(index: Any, value: int) -> Any:
            return builder.add(index, ir.Constant(index.type, value))

        cells = [ir.VectorType(ir.IntType(16), width) for width in WIDTHS]
        totals = [ir.Constant(kind, [0] * kind.count) for kind in cells]
        base = builder.shl(args[1], ir.Constant(args[1].type, 8))
        for i in range(ROWS):
            code = builder.zext(builder.load(pointer(3, plus(args[4], i), ir.IntType(8))), args[1].type)
            row_of = builder.add(base, builder.xor(code, args[2]))
            offset = builder.mul(row_of, ir.Constant(row_of.type, COUNT))
            for k, kind in enumerate(cells):
                row = builder.load(pointer(0, plus(offset, sum(WIDTHS[:k])), kind), align=2)
                name = f"llvm.uadd.sat.v{kind.count}i16"
                add = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind, kind]), name)
                totals[k] = builder.call(add, [totals[k], row])
        for k, total in enumerate(totals):
            wide = ir.VectorType(ir.IntType(32), WIDTHS[k])
            place = pointer(5, plus(args[6], sum(WIDTHS[:k])), wide)
            builder.store(builder.add(builder.load(place, align=4), builder.zext(total, wide)), place, align=4)
        return context.get_dummy_value()

    index = types.int64
    return types.void(table, index, index, codes, index, sums, index), build


# (table uint16, top, flip, codes uint8, begin, sums int32, at): sums[at : at + COUNT] += the sum, at most SATURATED, of
# the table's COUNT cells at [top, code ^ flip] for each of codes[begin : begin + ROWS]. Saturating sums of non-negative
# numbers do not depend on their order.
add_table_rows: Any = _python if config.DISABLE_JIT else intrinsic(_llvm)
