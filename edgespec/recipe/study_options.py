"""What a study is: a base recipe, tasks, arms that change the recipe, claims to check the outcome against. Types and checks only.

A study file is YAML with the knobs of `StudyOptions` and five mappings:

    recipe:  the base, keys of edgespec/recipe/schema.py
    tasks:   name -> TaskOptions
    groups:  letter -> title of a part of the report
    arms:    name -> ArmOptions, with `recipe`: what this arm changes of drafter, pretrain, distill and reference
    claims:  a list of ClaimOptions

Files named in it are looked up in the data folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError, did_you_mean
from edgespec.core.options import from_mapping, knob, merge, to_mapping, underscored
from edgespec.recipe.data_sources import BuildData, is_local
from edgespec.recipe.read import resolve
from edgespec.recipe.sampling import Sampling
from edgespec.recipe.schema import MOST_SEED, SELF, InferenceOptions, Recipe

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]*")
_SECTIONS = ("recipe", "tasks", "groups", "arms", "claims")
_BUDGET = ("steps", "batch_size", "context")
_OF_AN_ARM = ("drafter", "pretrain", "distill", "reference")
"""The sections of a recipe that arms may differ in; a study reads the others of its base."""


@dataclass(frozen=True)
class TaskOptions:
    held_out: str = knob(help="held-out prompts, in any known format")
    instructions: str = knob(
        "", "seed instructions the target answers for the distillation ('' where the task is out of domain)"
    )
    prompts: int | None = knob(None, "held-out prompts instead of evaluate.prompts", at_least=2)

    @property
    def domain(self) -> str:
        return "in" if self.instructions else "out"


@dataclass(frozen=True)
class ArmOptions:
    groups: tuple[str, ...] = knob(help="the parts of the report it belongs to")
    shows: str = knob(help="one line of what it shows")


@dataclass(frozen=True)
class ClaimOptions:
    """`better` has more of `metric` than each arm of `than`; or, with `depends`, none of these arms is best everywhere."""

    claim: str = knob(help="what is claimed")
    source: str = knob(help="who claims it, and where")
    better: str = knob("", "the arm that is said to have more")
    than: tuple[str, ...] = knob((), "the arms it is compared with")
    depends: tuple[str, ...] = knob((), "arms of which each is said to win somewhere")
    metric: str = knob(
        "tau", "block efficiency or empirical acceptance rate, at the first γ", choices=("tau", "alpha")
    )
    domain: str = knob("in", "over the tasks in or out of domain", choices=("in", "out"))
    differs: str = knob("", "what is different here from where the claim was made")


@dataclass(frozen=True)
class StudyOptions:
    seeds: tuple[int, ...] = knob((0, 1, 2), "seeds of every arm", at_least=0, at_most=MOST_SEED)
    samplings: tuple[str, ...] = knob(
        ("0", "0.6/0.9", "1"), "temperatures, or temperature/top-p, of the held-out responses"
    )
    baseline: str = knob("pretrained", "the arm all others are compared with")
    wanted_gain: float = knob(
        0.15,
        "gain in τ over the baseline that the best arm should have on every task in domain",
        at_least=0.0,
    )


@dataclass(frozen=True)
class Arm:
    """One arm: its whole recipe, and of it what differs from the base."""

    options: ArmOptions
    recipe: Recipe
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    name: str
    options: StudyOptions
    recipe: Recipe
    tasks: dict[str, TaskOptions]
    groups: dict[str, str]
    arms: dict[str, Arm]
    claims: tuple[ClaimOptions, ...]

    @property
    def data(self) -> BuildData:
        """What its tasks and arms read, each source once and under its own name."""
        asked = [name for task in self.tasks.values() for name in (task.instructions, task.held_out) if name]
        recipes = [arm.recipe for arm in self.arms.values()]
        return BuildData(
            texts={name: name for recipe in recipes for name in recipe.pretrain.text},
            prompts={name: name for name in asked},
            replies={one.distill.fixed: one.distill.fixed for one in recipes if one.distill.fixed_fraction},
        )

    @property
    def files(self) -> list[str]:
        """What of its data lies on the disk, each once."""
        data = self.data
        return [name for name in {**data.prompts, **data.texts, **data.replies} if is_local(name)]

    def only(self, arms: Iterable[str] | None, seeds: Iterable[int] | None) -> Study:
        """Some arms (and the baseline) and some seeds of it. Raises InputError for an unknown arm."""
        wanted = set(self.arms) if arms is None else {*arms, self.options.baseline}
        for name in wanted - set(self.arms):
            raise InputError(f"study {self.name} has no arm {name!r}{did_you_mean(name, self.arms)}")
        chosen = {name: arm for name, arm in self.arms.items() if name in wanted}
        given = {} if seeds is None else {"seeds": list(seeds)}
        options = from_mapping(StudyOptions, {**to_mapping(self.options), **given})
        _check_seeds(options.seeds)
        return replace(self, arms=chosen, options=options)


def parse_sampling(text: str) -> Sampling:
    """'0.6/0.9' -> temperature 0.6, top-p 0.9; '1' -> temperature 1, top-p 1. Raises InputError."""
    heat, _, mass = text.partition("/")
    try:
        temperature, top_p = float(heat), float(mass or 1.0)
    except ValueError as error:
        raise InputError(
            f"sampling {text!r} is not valid; give a temperature, or temperature/top-p as in 0.6/0.9"
        ) from error
    if not (temperature >= 0 and 0 < top_p <= 1):
        raise InputError(f"sampling {text!r} is out of bounds; temperature is at least 0 and top-p in (0, 1]")
    return Sampling(temperature, top_p)


def read_study(name: str, values: Mapping[str, Any], *, target: str = "", data: str = "") -> Study:
    """A study from the mapping in its file. `target` beats recipe.target, `data` is where its files lie.

    Raises InputError: unknown keys, arms or groups that do not exist, arms of unequal training budget.
    """
    known = [*_SECTIONS, *(field.name for field in fields(StudyOptions))]
    for key in values:
        if key not in known:
            raise InputError(f"unknown option {key!r} in study {name}{did_you_mean(str(key), known)}")
    options = from_mapping(StudyOptions, {key: values[key] for key in values if key not in _SECTIONS})
    tasks = {}
    for task, entry in _named(values, "tasks"):
        one = from_mapping(TaskOptions, entry or {}, f"tasks.{task}")
        asked, held_out = _located(one.instructions, data), _located(one.held_out, data)
        tasks[task] = replace(one, instructions=asked, held_out=held_out)
    groups = {letter: str(title) for letter, title in _named(values, "groups")}
    base = merge(_mapping(values.get("recipe") or {}, "recipe"), {"target": target} if target else {})
    recipe = _recipe(base, data, "recipe")
    arms = {arm: _arm(base, entry or {}, groups, data, arm) for arm, entry in _named(values, "arms")}
    listed = values.get("claims") or []
    if not isinstance(listed, list):
        raise InputError(f"claims is {listed!r}; it must be a list")
    claims = tuple(from_mapping(ClaimOptions, entry, f"claims[{i}]") for i, entry in enumerate(listed))
    if any(SELF in arm.recipe.pretrain.text for arm in arms.values()) or any(
        SELF in (task.instructions, task.held_out) for task in tasks.values()
    ):
        raise InputError(
            f"study {name} names the source {SELF!r}, which is build-drafter's; give files, so that all arms read the same"
        )
    study = Study(name, options, recipe, tasks, groups, arms, claims)
    _check(study)
    return study


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where} is {value!r}; it must be a mapping of options")
    return underscored(value, where)


def _named(values: Mapping[str, Any], section: str) -> list[tuple[str, Any]]:
    entries = values.get(section)
    if not isinstance(entries, Mapping) or not entries:
        raise InputError(f"the study has no {section}; give a mapping of names")
    for name in entries:
        if not _NAME.fullmatch(str(name)):
            raise InputError(
                f"{section} has the name {name!r}; it becomes the name of a folder: use letters, digits, + . _ -"
            )
    return [(str(name), entry) for name, entry in entries.items()]


def _located(name: str, data: str) -> str:
    """A file's name as the data folder has it; names that are no files stay."""
    if not data or not is_local(name):
        return name
    return str(Path(data) / Path(name).expanduser())  # an absolute name stays itself


def _recipe(values: dict[str, Any], data: str, where: str) -> Recipe:
    try:
        recipe = resolve(values, {})
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    return replace(
        recipe,
        pretrain=replace(recipe.pretrain, text=tuple(_located(name, data) for name in recipe.pretrain.text)),
        distill=replace(recipe.distill, fixed=_located(recipe.distill.fixed, data)),
    )


def _arm(
    base: dict[str, Any], entry: Mapping[str, Any], groups: Mapping[str, str], data: str, name: str
) -> Arm:
    where = f"arms.{name}"
    rest = dict(_mapping(entry, where))
    changes = _mapping(rest.pop("recipe", None) or {}, f"{where}.recipe")
    unknown = [key for key in rest if key not in ("groups", "shows")]
    if unknown:
        raise InputError(
            f"unknown option '{where}.{unknown[0]}'{did_you_mean(unknown[0], ['groups', 'shows', 'recipe'])}"
        )
    options = from_mapping(ArmOptions, rest, where)
    for group in options.groups:
        if group not in groups:
            raise InputError(f"{where}.groups names {group!r}{did_you_mean(group, groups)}")
    return Arm(options, _recipe(merge(base, changes), data, f"{where}.recipe"), changes)


def _check(study: Study) -> None:
    for name, arm in study.arms.items():
        if arm.recipe.drafter.kind != "model":
            raise InputError(
                f"arm {name} has drafter.kind {arm.recipe.drafter.kind!r}, and a study trains models; build a head with "
                "build-drafter"
            )
    _check_read(study)
    for text in study.options.samplings:
        parse_sampling(text)
    _check_seeds(study.options.seeds)
    if not any(task.domain == "in" for task in study.tasks.values()):
        raise InputError(f"study {study.name} has no task with instructions; the target needs some to answer")
    if study.options.baseline not in study.arms:
        raise InputError(
            f"baseline is {study.options.baseline!r}, which is no arm{did_you_mean(study.options.baseline, study.arms)}"
        )
    for number, claim in enumerate(study.claims):
        named = [*((claim.better,) if claim.better else ()), *claim.than, *claim.depends]
        for arm in named:
            if arm not in study.arms:
                raise InputError(
                    f"claims[{number}] names {arm!r}, which is no arm{did_you_mean(arm, study.arms)}"
                )
        if bool(claim.better and claim.than) == bool(claim.depends):
            raise InputError(
                f"claims[{number}] ({claim.claim}) needs either better and than, or only depends"
            )
    _check_budgets(study)


def _check_read(study: Study) -> None:
    """A study must not say that it tried what it does not read."""
    for name, arm in study.arms.items():
        for section in arm.changes:
            if section not in _OF_AN_ARM:
                raise InputError(
                    f"arm {name} changes {section}, and arms differ only in {', '.join(_OF_AN_ARM)}; give it in the study's "
                    "recipe, for all arms"
                )
        if arm.recipe.distill.against:
            raise InputError(
                f"arm {name} has distill.against {arm.recipe.distill.against!r}, and a study distils against the target as it "
                "is; leave it out"
            )
    if study.recipe.tune.steps:
        raise InputError(
            f"recipe.tune.steps is {study.recipe.tune.steps}, and a study tunes no target; tune it with build-drafter, and give "
            "its folder tune/model with --target"
        )
    plain = to_mapping(InferenceOptions())
    for name, value in to_mapping(study.recipe.inference).items():
        if value != plain[name]:
            raise InputError(
                f"recipe.inference.{name} is {value!r}, and a study runs its target in torch with float32 weights; leave it out"
            )


def _check_seeds(seeds: tuple[int, ...]) -> None:
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError(f"seeds are {list(seeds)}; give one or more, each once")


def _check_budgets(study: Study) -> None:
    """Every arm trains on as many tokens as the others, or not at all."""
    for part in ("pretrain", "distill"):
        budgets: dict[tuple[int, ...], str] = {}
        for name, arm in study.arms.items():
            options = getattr(arm.recipe, part)
            if options.steps:
                budgets.setdefault(tuple(getattr(options, knob) for knob in _BUDGET), name)
        if len(budgets) > 1:
            (one, first), (two, second) = list(budgets.items())[:2]
            raise InputError(
                f"arms {first!r} and {second!r} have unequal budgets: {part} {' x '.join(map(str, one))} and "
                f"{' x '.join(map(str, two))} (steps x batch_size x context); arms are compared at an equal one"
            )


def dump_study(study: Study) -> dict[str, Any]:
    """The plain form of a resolved study."""
    return {
        **to_mapping(study.options),
        "recipe": to_mapping(study.recipe),
        "tasks": {name: to_mapping(task) for name, task in study.tasks.items()},
        "groups": dict(study.groups),
        "arms": {
            name: {**to_mapping(arm.options), "recipe": arm.changes} for name, arm in study.arms.items()
        },
        "claims": [to_mapping(claim) for claim in study.claims],
    }
