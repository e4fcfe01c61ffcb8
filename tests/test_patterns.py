import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kizami.formats import patterns
from kizami.formats.errors import KizamiError
from kizami.formats.ignore_rules import derive_ignore, derive_targets
from kizami.formats.patterns import MAX_PATTERN_CHARS, MAX_STEPS, Budget, Matcher, is_written, runs_away

OURS = [
    "lm_head",
    "re:.*self_attn.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*mlp\.gate$",
    r"re:.*visual\..*",
    r"re:.*\.layers\.78\..*",
    r"re:(.*\.)?layers\.(?!(1|2)\.)\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
    r"re:.*\.layers\.(?!78\.)\d+\.mlp\.experts\.\d+\.(w1|w2|w3)$",
    r"re:mtp\.0\.ffn\.experts\..*",
    r"re:.*\.self_attn\.(q|k|v|qkv)_proj$",
    r"re:a\ b\-c\(d\)\\\|é$",
]
RUNAWAYS = [
    "(a+)+$", "(.*)*$", "(x|x|x)*y", "(.|.)" * 20 + "x", ".*.*.*.*x", r"(a)\1", "(?:a|b){30}", "(?=a+)+", "((a)?)*",
    "(?x)(a+) +$", "(a+)(?#)+$", "(?s:.)*x", "(?P<n>a+)+", r"[^x]*[^y]*[^z]*\w*!", r"\d+" * 9,
    ".?" * 22 + "Q", "(?:.?)" * 30 + "Q", "(?:ab)?" * 30 + "Q", "a??" * 30 + "Q", ".*?" * 4 + "Q",
]  # fmt: skip


@pytest.mark.parametrize("entry", OURS)
def test_what_kizami_writes_is_known_as_such(entry: str) -> None:
    assert is_written(entry.removeprefix("re:"))
    assert Matcher([entry], "ignore").by_name("x") == bool(re.match(entry.removeprefix("re:") + "\\Z", "x"))


@pytest.mark.parametrize(
    "expression",
    [*RUNAWAYS, "(", "[a]", "a?", "^a", "(?i)a", ".*a.*b", r"\d+\d+\.", "(a|aa)(a|aa)b", r"(a\.|b)\.", "a|b",
     "a" * 1025, r"(a|b)\.(a|b)\.(a|b)\.c$", r"\d+", r"\w", "a+"],
)  # fmt: skip
def test_a_pattern_that_kizami_does_not_write_is_not_tried(expression: str) -> None:
    with pytest.raises(KizamiError, match="none that kizami writes") as caught:
        Matcher(["a", f"re:{expression}"], "ignore")
    assert caught.value.code == "bad_pattern"


def test_a_list_of_patterns_hits_what_one_of_them_hits() -> None:
    matcher = Matcher(["a.b", r"re:.*\.c$", r"re:.*\.(d|e)_proj$", r"re:f\..*"], "ignore")
    names = ("a.b", "a.b.c", "c", "x.d_proj", "x.dd_proj", "f.g", "x.f.g", "a.bc")
    hit = {name for name in names if matcher.by_name(name)}
    assert hit == {"a.b", "a.b.c", "x.d_proj", "f.g"}


@pytest.mark.long
def test_more_work_than_a_config_of_ours_can_make_is_refused() -> None:
    hostile = [rf"re:.*\.{'a' * 500}{i}$" for i in range(1500)]
    matcher = Matcher(hostile, "ignore")
    begin = time.process_time()
    with pytest.raises(KizamiError, match="too many patterns for so many modules"):
        list(map(matcher.by_name, ["a." * 500] * (2 * MAX_STEPS // (500 * 1500))))
    assert time.process_time() - begin < 10
    with pytest.raises(KizamiError, match="too many patterns"):
        Matcher([f"re:{'a' * 1000}{i}" for i in range(1100)], "ignore")


@pytest.mark.parametrize("expression", RUNAWAYS)
def test_an_expression_that_could_run_for_ever_is_told_why_not(expression: str) -> None:
    assert runs_away(expression)


@pytest.mark.parametrize(
    "expression",
    [
        *(entry.removeprefix("re:") for entry in OURS),
        r".*\.layers\.(3|4|5)\.mlp\.experts\.\d+\..*",
        r"model\.layers\.([0-9]|[1-5][0-9])\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
        r"(?i).*LAYERS.*(?<!x)y",
        r"(?:.*\.)?layers\.(?!6[01]\.)\d{1,2}\.[^.]+\.gate",
        r".*layers.*experts.*gate.*",
        r".*experts.0.*|.*experts.1.*|.*experts.2.*$",
        r"(a|b)?c",
        r"(?:language_model\.)?(?:model\.)?layers\.\d+?\.mlp.*?proj",
        r"[(+]+\(\)+[^\]]*)"[:-1],
    ],
)
def test_an_expression_that_a_user_may_want_is_fine(expression: str) -> None:
    assert runs_away(expression) is None
    re.compile(expression)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.text("a.*+?()|d\\[]{}1,^$:!=<>Px#i", max_size=25))
def test_whatever_passes_is_done_with_an_ordinary_name_at_once(expression: str) -> None:
    try:
        compiled = re.compile(expression)
    except (re.error, OverflowError):
        return
    if runs_away(expression) is None or is_written(expression):
        begin = time.process_time()
        for name in ("model.layers.11.mlp.experts.111.gate_proj", "a" * 60, "1.a" * 20):
            compiled.match(name)
        assert time.process_time() - begin < 1


def test_a_budget_counts_what_a_pattern_costs_on_all_names() -> None:
    budget = Budget(["a.b.c"] * 1000)
    assert budget.allows(r"re:.*\.c$")
    assert not budget.allows("re:" + "c" * MAX_PATTERN_CHARS)
    entry = r"re:.*\." + "x" * 500
    cost = len(entry) * 3000
    assert sum(budget.allows(entry) for _ in range(2 * MAX_STEPS // cost)) == (MAX_STEPS - 9 * 3000) // cost


def test_beyond_the_budget_modules_are_listed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [f"a{i}.layers.{i % 7}.b{i}.c{i}" for i in range(200)] + [f"language_model.x{i}" for i in range(200)]
    packed = ["model.layers.1.mlp.experts.0.gate_proj"]
    options = {"num_hidden_layers": 2, "mtp_dense": False, "has_mtp": False}
    full = derive_ignore(plain, packed, **options)
    assert sum(entry.startswith("re:") for entry in full) == 400
    monkeypatch.setattr(patterns, "MAX_STEPS", 1_000_000)
    short = derive_ignore(plain, packed, **options)
    assert 10 < sum(entry.startswith("re:") for entry in short) < 100
    matcher = Matcher(short, "ignore")
    assert all(map(matcher.by_name, plain))
    assert not any(map(matcher.by_name, packed))
    targets = derive_targets(plain, [name.replace("b", "d") for name in plain])
    assert 10 < sum(entry.startswith("re:") for entry in targets) < 100
    assert all(map(Matcher(targets, "targets").by_name, plain))


@pytest.mark.slow
def test_thousands_of_odd_modules_take_seconds() -> None:
    plain = [f"a{i}.layers.{i % 1000}.b{i}.c{i}" for i in range(15_000)]
    packed = [f"model.layers.1.mlp.experts.{i}.c{i}" for i in range(15_000)]
    begin = time.process_time()
    entries = derive_ignore(plain, packed, num_hidden_layers=1, mtp_dense=False, has_mtp=True)
    matcher = Matcher(entries, "ignore")
    assert all(map(matcher.by_name, plain))
    assert not any(map(matcher.by_name, packed))
    assert time.process_time() - begin < 15
