"""Which form each linear gets: what the user chose by pattern or by role, and what follows from the defaults."""

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from kizami.formats.errors import KizamiError, printable
from kizami.formats.families import EMBEDDINGS, Place, Role
from kizami.formats.patterns import runs_away
from kizami.quantize.settings import SETTABLE_ROLES, WHOLE_MTP, Form, Policy

# --targets and --ignore together: each is tried on every module, and `verify` takes them from somebody's kizami.json.
MAX_PATTERNS = 200
LINEAR = "Linear"  # as a target: every linear, as in compressed-tensors and llm-compressor


@dataclass(frozen=True, slots=True)
class Wish:
    """form: None for what --rest says of a linear. reason: for the plan's reader."""

    form: Form | None
    reason: str


@dataclass(frozen=True)
class Selection:
    """Patterns have compressed-tensors' syntax: an exact name, `re:` + re.match, or the class name `Linear`."""

    policy: Policy

    def __post_init__(self) -> None:
        patterns = (*self.policy.targets, *self.policy.ignore)
        if len(patterns) > MAX_PATTERNS:
            raise KizamiError(
                f"{len(patterns)} patterns, expected at most {MAX_PATTERNS}",
                code="bad_pattern",
                hint="let one re: pattern stand for many modules",
            )
        for pattern in patterns:
            _compiled(pattern)
        _check_roles(self.policy)

    def wish(self, module: str, place: Place) -> Wish:
        if self.policy.targets or self.policy.ignore:
            return self._wish(module, place)
        by_role = self._by_role  # without patterns the name says nothing
        key = place.role, place.in_mtp
        if key not in by_role:
            by_role[key] = self._wish(module, place)
        return by_role[key]

    @cached_property
    def _by_role(self) -> dict[tuple[Role, bool], Wish]:
        return {}

    def _wish(self, module: str, place: Place) -> Wish:
        what = place.role.value.replace("_", " ")
        target = self._target(module, place)
        ignored = next((p for p in self.policy.ignore if matches(p, module, place)), None)
        if place.in_mtp and self.policy.mtp != "quantize":
            return Wish(None, f"{what}, MTP layer, --mtp keep" if target else what)
        if ignored is not None:
            return Wish(None, f"{what}, matches --ignore {ignored}" if target else what)
        if target is not None:
            return Wish(self.policy.to, target)
        role, form = self._role(place)
        return Wish(form, f"{what}, --set {role}={form}" if form else what)

    def _target(self, module: str, place: Place) -> str | None:
        """Why the module is one of those that the policy is about."""
        if self.policy.targets:
            hit = next((p for p in self.policy.targets if matches(p, module, place)), None)
            return f"matches --targets {hit}" if hit else None
        is_default = place.role is Role.ROUTED_EXPERT and self._role(place)[1] is None
        return "routed expert" if is_default else None

    def _role(self, place: Place) -> tuple[str, Form | None]:
        chosen = dict(self.policy.roles)
        if place.in_mtp and WHOLE_MTP in chosen:
            return WHOLE_MTP, chosen[WHOLE_MTP]
        return place.role.value, chosen.get(place.role.value)


def _check_roles(policy: Policy) -> None:
    words = [role.value for role in SETTABLE_ROLES]
    for role, form in policy.roles:
        if role not in words:
            raise KizamiError(
                f"--set {printable(role, 40)}={form}: no such role; expected one of {', '.join(words)}",
                code="bad_option",
                hint="embeddings, heads, routers and norms are plain weights to the engines",
            )
        if role == WHOLE_MTP and form == "int4":
            raise KizamiError(
                "--set mtp=int4 would pack eh_proj, which engines read as a plain weight",
                code="bad_option",
                hint="--mtp quantize, the default, packs the MTP layer's experts; --targets picks modules one by one",
            )
    if len({role for role, _ in policy.roles}) != len(policy.roles):
        raise KizamiError("--set gives a role two forms", code="bad_option")
    if policy.mtp != "quantize" and any(role == WHOLE_MTP for role, _ in policy.roles):
        raise KizamiError(f"--set mtp=... and --mtp {policy.mtp} say two things", code="bad_option")


@lru_cache(maxsize=512)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    if not pattern.startswith("re:"):
        return None
    try:
        problem: object = runs_away(pattern[3:])  # `verify` tries patterns that stand in somebody's kizami.json
        if problem is None:
            return re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as e:
        problem = e
    raise KizamiError(
        f"pattern {printable(pattern, 200)} cannot be used: {problem}",
        code="bad_pattern",
        hint="write an exact module name, or re: and a simple Python regular expression (README, Security)",
    )


def matches(pattern: str, module: str, place: Place) -> bool:
    regex = _compiled(pattern)
    if pattern == LINEAR:
        return place.role not in (Role.EMBEDDING, Role.ROUTER) and module.rpartition(".")[2] not in EMBEDDINGS
    return module == pattern if regex is None else regex.match(module) is not None
