"""A packed tensor is read in bands, into memory that is used again."""

import json
from pathlib import Path

import numpy as np
import pytest

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.reader import TensorReader
from kizami.quantize import linear
from kizami.quantize.buffers import Buffers
from kizami.quantize.linear import quantize_linear
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy
from kizami.quantize.source_rows import SourceRows, read_scales
from kizami.quantize.tensor import pieces, produce


def first_packed(source: Path) -> tuple:
    checkpoint = Checkpoint.open(source)
    return checkpoint, build_plan(checkpoint, Policy(), Method()).packed[0]


def test_rows_are_those_of_the_file_and_a_run_is_not_read_twice(tiny_checkpoint, monkeypatch) -> None:
    checkpoint, step = first_packed(tiny_checkpoint)
    reads = []
    read = TensorReader.read
    monkeypatch.setattr(TensorReader, "read", lambda *a, **options: reads.append(options) or read(*a, **options))
    with TensorReader(checkpoint) as reader:
        whole = reader.read(step.weight).reshape(step.weight.shape)
        reads.clear()
        rows = SourceRows(step, reader, Buffers(2))
        assert rows.shape == whole.shape
        memory = rows[0:7]
        np.testing.assert_array_equal(memory, whole[0:7])
        assert rows[0:7] is memory
        assert len(reads) == 1
        np.testing.assert_array_equal(rows[7:12], whole[7:12])
        np.testing.assert_array_equal(memory[:5], whole[7:12])  # in the memory of the run before
        np.testing.assert_array_equal(rows[3:20], whole[3:20])
        rows.close()


@pytest.mark.parametrize("method", [Method(), Method("minmax")], ids=str)
def test_bands_give_the_bytes_of_the_whole_tensor(tiny_checkpoint, monkeypatch, method) -> None:
    checkpoint, step = first_packed(tiny_checkpoint)
    monkeypatch.setattr(linear, "BAND_BYTES", 3 * step.weight.shape[1])
    with TensorReader(checkpoint) as reader:
        [piece] = pieces(step)
        made = produce(piece, reader, Policy(), method, Buffers(2))
        codes, scale = reader.read(step.weight).reshape(step.weight.shape), read_scales(step.encoding, reader)
    expected = quantize_linear(codes, scale, step.encoding.block, 32, method, band=step.weight.shape[0])
    packed, shape, scales = (data for _, data in made.chunks)
    np.testing.assert_array_equal(packed, expected.packed)
    np.testing.assert_array_equal(scales, expected.scale)
    assert shape.tolist() == list(step.weight.shape)
    assert json.dumps(made.sums.figures()) == json.dumps(expected.sums.figures())
