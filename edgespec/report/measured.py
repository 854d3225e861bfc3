"""A bench and an evaluation in types: what every draft length gave, and raw counts by prompt. Derives what needs raw counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.core.errors import InputError
from edgespec.core.metrics import RawCounts, bootstrap, ratio_of_sums
from edgespec.core.output import note
from edgespec.report.fields import Fields, Interval

PLAIN, AUTO = 0, -1  # draft lengths of a plain run, and of one whose draft lengths were chosen
MOST_POSITIONS = 8  # of a draft that are shown; the chooser goes as far
MOST_LENGTHS = 64  # of one bench: plain decoding, every γ that a bench takes, and chosen ones
MOST_SETTINGS = 40  # of an evaluation that are shown
MOST_PROMPTS = 10_000  # with raw counts in an evaluation; a suite has at most as many questions
RESAMPLED = 1024  # prompts that an interval by position is made of: evenly chosen where there are more


def name_of(draft_length: int, chosen: str) -> str:
    """What a draft length is called; `chosen`: lengths that were chosen block by block."""
    return {PLAIN: "plain", AUTO: chosen}.get(draft_length, f"γ = {draft_length}")


@dataclass(frozen=True)
class Speed:
    """One draft length of a bench, as its JSON file has it; costs in plain steps."""

    draft_length: int
    mean_draft_length: float
    token_rate: Interval | None
    speedup: Interval | None
    tau: Interval | None
    alpha: float | None
    first_token_seconds: float | None
    predicted: float | None
    draft_cost: float | None
    verify_cost: float | None
    mbsu: dict[str, float | None]

    @property
    def name(self) -> str:
        return name_of(self.draft_length, f"γ chosen ({self.mean_draft_length:.1f})")

    @property
    def mbsu_kind(self) -> str:
        """By bytes where the bench has it: that is what memory moves."""
        return "bytes" if "bytes" in self.mbsu else next(iter(self.mbsu), "")


@dataclass(frozen=True)
class Bench:
    """`counts[γ]`: one sum for every prompt."""

    speeds: tuple[Speed, ...]
    counts: dict[int, list[RawCounts]]
    fields: Fields

    def at(self, draft_length: int) -> Speed | None:
        return next((one for one in self.speeds if one.draft_length == draft_length), None)

    @property
    def fixed(self) -> list[Speed]:
        return [one for one in self.speeds if one.draft_length > PLAIN]

    @property
    def drafted(self) -> list[Speed]:
        """The fixed draft lengths. A rule with a loop of its own has none, and its one way to draft stands for them."""
        return self.fixed or [one for one in self.speeds if one.draft_length == AUTO]

    @property
    def best(self) -> Speed | None:
        """The fastest of them."""
        timed = [one for one in self.drafted if one.speedup is not None]
        return max(timed, key=lambda one: one.speedup[0] if one.speedup else 0.0, default=None)

    @property
    def used(self) -> Speed | None:
        """What chat would do: draft lengths chosen block by block; where they were not run, the fastest."""
        return self.at(AUTO) or self.best

    @property
    def longest(self) -> int:
        return max((one.draft_length for one in self.drafted), default=0)


@dataclass(frozen=True)
class Setting:
    """One setting of an evaluation: τ and α with intervals, and counts by prompt where the file has them.

    `by_rule`: α on the target's own text, by the rule that an engine is known by.
    """

    drafter: str
    temperature: float
    top_p: float
    draft_length: int
    tau: Interval | None
    alpha: Interval | None
    by_rule: dict[str, Interval | None]
    counts: tuple[RawCounts, ...]

    @property
    def where(self) -> str:
        words = "greedy" if self.temperature == 0 else f"T = {self.temperature:g}"
        return words + (f", top-p {self.top_p:g}" if self.temperature and self.top_p < 1 else "")


def bench_of(found: Fields) -> Bench:
    """A bench file in types. Raises InputError: a field of another kind, no plain run, draft lengths without end."""
    speeds = tuple(_speed(one) for one in found.objects("summaries", MOST_LENGTHS))
    lengths = [one.draft_length for one in speeds]
    if PLAIN not in lengths or set(lengths) == {PLAIN}:
        raise InputError(
            f"{found.where}: 'summaries' has the draft lengths {lengths}; plain decoding (0) and another one "
            "are wanted: measure it again"
        )
    summed: dict[int, dict[int, RawCounts]] = {}
    for run in found.objects("runs"):
        length, prompt = run.whole("draft_length"), run.whole("prompt")
        if length is None or prompt is None:
            raise InputError(f"{run.where} has no 'draft_length' or no 'prompt'; measure it again")
        summed.setdefault(length, {}).setdefault(prompt, RawCounts()).add(run.object("counts").counts())
    counts = {length: [one for _, one in sorted(prompts.items())] for length, prompts in summed.items()}
    return Bench(speeds, counts, found)


def _speed(one: Fields) -> Speed:
    length = one.whole("draft_length")
    if length is None or length < AUTO:
        raise InputError(
            f"{one.where}: 'draft_length' is {length}; {AUTO} or more is wanted: measure it again"
        )
    kinds = one.object("mbsu")
    return Speed(
        draft_length=length,
        mean_draft_length=one.number("mean_draft_length") or 0.0,
        token_rate=one.interval("token_rate"),
        speedup=one.interval("speedup"),
        tau=one.interval("block_efficiency"),
        alpha=one.number("acceptance_rate"),
        first_token_seconds=one.number("first_token_seconds"),
        predicted=one.number("predicted"),
        draft_cost=one.number("draft_cost"),
        verify_cost=one.number("verify_cost"),
        mbsu={kind: kinds.number(kind) for kind in one.keys("mbsu", 2)},
    )


def settings_of(found: Fields) -> list[Setting]:
    """The distilled drafter's settings (else those of the last drafter listed), by temperature and γ."""
    read = [_setting(one) for one in found.objects("settings")]
    names = [one.drafter for one in read]
    name = "distilled" if "distilled" in names else (names or [""])[-1]
    chosen = [one for one in read if one.drafter == name]
    if len(chosen) > MOST_SETTINGS:
        note(
            f"{found.where} has {len(chosen):,} settings of one drafter; the first {MOST_SETTINGS} are shown"
        )
    return sorted(chosen, key=lambda one: (one.temperature, one.top_p, one.draft_length))[:MOST_SETTINGS]


def _setting(one: Fields) -> Setting:
    metrics = one.object("metrics")
    temperature = one.number("temperature") or 0.0
    forced = metrics.interval("alpha_teacher_forced")
    same = forced if temperature == 0 else None  # there every rule is the agreement of two argmaxes
    return Setting(
        drafter=one.text("drafter"),
        temperature=temperature,
        top_p=1.0 if (top_p := one.number("top_p")) is None else top_p,
        draft_length=one.whole("draft_length") or 0,
        tau=metrics.interval("tau"),
        alpha=metrics.interval("alpha_empirical"),
        by_rule={
            "lossless": forced,
            "match_greedy": metrics.interval("alpha_match_greedy") or same,
            "match_sampled": metrics.interval("alpha_match_sampled") or same,
        },
        counts=tuple(raw.counts() for raw in one.objects("counts", MOST_PROMPTS)),
    )


def by_position(counts: Sequence[RawCounts]) -> list[Interval]:
    """α at every position of a draft, of those that were tested there; 95 % bootstrap intervals over prompts."""
    found = []
    for place in range(min(MOST_POSITIONS, max((len(one.tested) for one in counts), default=0))):
        tried = [
            (one.accepted[place], one.tested[place])
            for one in counts
            if place < len(one.tested) and one.tested[place]
        ]
        if not tried:  # nothing got so far
            break
        share = ratio_of_sums(lambda pair: pair[0], lambda pair: pair[1])
        _, low, high = bootstrap(tried[:: -(-len(tried) // RESAMPLED)], share)
        found.append((share(tried), low, high))
    return found
