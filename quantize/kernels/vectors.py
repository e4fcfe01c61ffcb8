"""One operation that numba's own vectoriser gets wrong: summing table rows (0.05 to 0.5 weights per ns, here 0.7).

It has to assume that a sum kept in an array overlaps the table, and it packs no named scalars. So the sums are
written as LLVM vectors, which every target lowers to its own width; integers, hence the same result everywhere.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kizami.quantize.kernels.jit import config

WIDTH = 16
VECTORS = 3
COUNT = WIDTH * VECTORS  # sums per group: one per candidate of `search`


def _python(table: Any, offsets: Any, begin: int, end: int, sums: Any, at: int) -> None:
    for j in range(COUNT):
        sums[at + j] = 0
    for i in range(begin, end):
        for j in range(COUNT):
            sums[at + j] += table[offsets[i] + j]


def _llvm(typing: Any, table: Any, offsets: Any, begin: Any, end: Any, sums: Any, at: Any) -> tuple[Any, Any]:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow, wide = (ir.VectorType(ir.IntType(bits), WIDTH) for bits in (16, 32))

        def pointer(argument: int, index: Any, kind: Any) -> Any:
            data = context.make_array(signature.args[argument])(context, builder, args[argument]).data
            return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())

        def constant(value: int) -> Any:
            return ir.Constant(args[2].type, value)

        totals = [cgutils.alloca_once_value(builder, ir.Constant(wide, [0] * WIDTH)) for _ in range(VECTORS)]
        with cgutils.for_range_slice(builder, args[2], args[3], constant(1)) as (i, _):
            offset = builder.sext(builder.load(pointer(1, i, ir.IntType(32))), args[2].type)
            for k, total in enumerate(totals):
                cells = builder.load(pointer(0, builder.add(offset, constant(k * WIDTH)), narrow), align=2)
                builder.store(builder.add(builder.load(total), builder.zext(cells, wide)), total)
        for k, total in enumerate(totals):
            builder.store(builder.load(total), pointer(4, builder.add(args[5], constant(k * WIDTH)), wide), align=4)
        return context.get_dummy_value()

    return types.void(table, offsets, types.int64, types.int64, sums, types.int64), build


# (table uint16, offsets int32, begin, end, sums int32, at): sums[at : at + COUNT] = sum of the table's COUNT cells at
# each of offsets[begin:end]
sum_table_rows: Any = _python if config.DISABLE_JIT else intrinsic(_llvm)
