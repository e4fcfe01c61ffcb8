"""Numbers of config.json, and sizes of weights against them: engines allocate by these numbers, and copy what is there.

Of known families, and of modules whose shape the headers give: GPTQ, AWQ and packed bytes are left out.
"""

from collections.abc import Callable, Iterator, Mapping

from kizami.formats.engines.context import Context, Model
from kizami.formats.engines.finding import ENGINES, EngineName, Hit, Rule
from kizami.formats.engines.naming import leaf_of
from kizami.formats.engines.parts import Part
from kizami.formats.errors import printable
from kizami.formats.families import Role

_SIZED = ("plain", "fp8", "packed")
_MLP = (Role.DENSE_MLP, Role.SHARED_EXPERT, Role.ROUTED_EXPERT)
Size = int | None
_NUMBERS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "moe_intermediate_size",
    "num_key_value_heads", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
    "head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "first_k_dense_replace", "n_group",
    "topk_group",
)  # fmt: skip
_MAY_BE_NULL = ("num_key_value_heads", "q_lora_rank", "head_dim", "n_shared_experts")


def _numbers(context: Context) -> Iterator[Hit]:
    """transformers' config classes check their types, and both servers read config.json with them."""
    if not context.family.known:
        return
    text = context.family.text_config
    for key in _NUMBERS:
        value = text.get(key, 0)
        if type(value) is not int and (value is not None or key not in _MAY_BE_NULL):
            yield Hit(
                f"{key} is {printable(repr(value), 40)}, expected a whole number",
                "take config.json from the publisher of these files",
            )


def _dimensions(context: Context) -> Iterator[Hit]:
    model = context.model
    if not model.family.known:
        return
    expected = _Expected(model)
    bits = {group.weights.bits for group in model.quant.groups if group.is_packed_int} if model.quant else set()

    def differs(part: Part) -> bool:
        if part.form not in _SIZED or (part.form == "packed" and bits != {4}):
            return False
        if context.engine == "transformers" and part.place.in_mtp:
            return False  # never loaded there
        found, wanted = part.shape(), expected.shape(part)
        if found is None or wanted is None:
            return False
        return any(size not in (None, there) for there, size in zip(found, wanted, strict=True))

    for part in model.suspects(differs):
        sizes = ", ".join("any" if size is None else str(size) for size in expected.shape(part) or ())
        yield Hit(
            f"{leaf_of(part)} is {list(part.shape() or ())}, config.json makes it [{sizes}]",
            "take config.json and weights from the same publisher",
            part.name,
        )


class _Expected:
    """(rows, columns) by role and name; None for a size that the config does not give."""

    def __init__(self, model: Model) -> None:
        number = model.number
        self._hidden, self._vocab = number("hidden_size"), number("vocab_size")
        self._experts = number("n_routed_experts", "num_local_experts", "num_experts")
        moe, shared = number("moe_intermediate_size"), number("n_shared_experts")
        inner = (number("intermediate_size"), _times(moe, shared), moe)
        self._mlp = {role: self._sides(size) for role, size in zip(_MLP, inner, strict=True)}
        self._attention = _mla(model) if model.attention == "mla" else _gqa(model)

    def _sides(self, inner: Size) -> dict[str, tuple[Size, Size]]:
        hidden = self._hidden
        return {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}

    def shape(self, part: Part) -> tuple[Size, Size] | None:
        role, leaf = part.place.role, part.name.rpartition(".")[2]
        if role is Role.ATTENTION:
            return self._attention.get(leaf)
        if role in self._mlp:
            return self._mlp[role].get(leaf)
        if role is Role.ROUTER and leaf == "gate":
            return self._experts, self._hidden
        if leaf in ("embed_tokens", "lm_head"):
            return self._vocab, self._hidden
        return None


def _mla(model: Model) -> dict[str, tuple[Size, Size]]:
    number = model.number
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    q, kv, rope = number("q_lora_rank"), number("kv_lora_rank"), number("qk_rope_head_dim")
    nope, v = number("qk_nope_head_dim"), number("v_head_dim")
    head = _plus(nope, rope)
    return {
        "q_proj": (_times(heads, head), hidden),
        "q_a_proj": (q, hidden),
        "q_b_proj": (_times(heads, head), q),
        "kv_a_proj_with_mqa": (_plus(kv, rope), hidden),
        "kv_b_proj": (_times(heads, _plus(nope, v)), kv),
        "o_proj": (hidden, _times(heads, v)),
    }


def _gqa(model: Model) -> dict[str, tuple[Size, Size]]:
    number = model.number
    hidden, heads, head = number("hidden_size"), number("num_attention_heads"), number("head_dim")
    if head is None and hidden and heads:
        head = hidden // heads
    kv = _times(number("num_key_value_heads"), head)
    return {
        "q_proj": (_times(heads, head), hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, _times(heads, head)),
    }


def _of_two(operate: Callable[[int, int], int]) -> Callable[[Size, Size], Size]:
    return lambda a, b: None if a is None or b is None else operate(a, b)


_times, _plus = _of_two(int.__mul__), _of_two(int.__add__)

_SOURCES: Mapping[EngineName, str] = {
    "sglang": "SGLang srt/models/deepseek_v2.py, srt/models/glm4_moe.py; srt/layers/linear.py weight_loader",
    "vllm": "vLLM model_executor/models/deepseek_v2.py, glm4_moe.py; model_executor/layers/linear.py weight_loader",
    "transformers": "transformers models/deepseek_v3/modeling_deepseek_v3.py, core_model_loading.py",
}

_CONFIG_CLASS = "transformers models/deepseek_v3/configuration_deepseek_v3.py, glm4_moe/configuration_glm4_moe.py"

RULES = (
    Rule("dimensions", "error", _SOURCES, _dimensions),
    Rule("bad_number", "error", dict.fromkeys(ENGINES, _CONFIG_CLASS), _numbers),
)
