"""The three tensors of a packed linear."""

import pytest

from kizami.formats.errors import KizamiError
from kizami.formats.int4_layout import packed_names, packed_specs
from kizami.formats.tensors import TensorSpec


def test_kimi_k2_shapes() -> None:
    """checkpoint sizes as Kimi-K2-Thinking publishes them: gate [2048, 7168], group 32."""
    assert packed_specs("m", 2048, 7168, 32) == (
        TensorSpec("m.weight_packed", "I32", (2048, 896)),
        TensorSpec("m.weight_shape", "I32", (2,)),
        TensorSpec("m.weight_scale", "BF16", (2048, 224)),
    )


@pytest.mark.parametrize(("group", "bits"), [(32, 4.5), (64, 4.25), (128, 4.125)])
def test_bits_per_weight(group: int, bits: float) -> None:
    specs = packed_specs("m", 256, 512, group)
    assert sum(s.nbytes for s in specs) == 256 * 512 * bits / 8 + 8


@pytest.mark.parametrize(("cols", "group", "groups"), [(336, 128, "2.625"), (336, 32, "10.5"), (10944, 128, "85.5")])
def test_a_group_that_does_not_divide_is_refused_with_the_numbers(cols: int, group: int, groups: str) -> None:
    with pytest.raises(KizamiError) as error:
        packed_specs("model.layers.1.mlp.experts.0.down_proj", 8, cols, group)
    assert error.value.code == "group_does_not_divide"
    assert error.value.tensor == "model.layers.1.mlp.experts.0.down_proj.weight"
    for words in (f"K = {cols}", f"g = {group}", f"{groups} groups"):
        assert words in error.value.message


def test_columns_that_do_not_fill_words_are_refused() -> None:
    with pytest.raises(KizamiError, match="8 values per I32 word") as error:
        packed_specs("m", 8, 12, 4)
    assert error.value.code == "group_does_not_divide"


def test_names_are_in_the_order_of_the_specs() -> None:
    assert packed_names("m") == tuple(spec.name for spec in packed_specs("m", 8, 32, 32))
