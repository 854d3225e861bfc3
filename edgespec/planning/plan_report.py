"""A plan in words and tables, and as JSON. Says what was measured, what was published, and what is assumed; computes little."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edgespec.core.metrics import acceptance_rate_of, predicted_block_efficiency
from edgespec.core.options import shell_line
from edgespec.core.table import byte_size, count, duration, table
from edgespec.planning.estimate import PROMPT_TOKENS
from edgespec.planning.hardware import THIS_MACHINE
from edgespec.planning.plan import Plan, recipes_for
from edgespec.planning.plan_device import PAPER_GAMMA, PAPER_TAU, PAPER_TOKENS, Way, fastest
from edgespec.planning.plan_stages import TRAININGS, own_bytes
from edgespec.recipe.drafter import cost_ratios, derive, describe
from edgespec.recipe.precisions import beside_own
from edgespec.recipe.schema import DrafterOptions

LENGTHS = (1, 2, 3, 4, 5, 7)
QUIET = 0.85
"""Share of the processors from which a measurement is one of the machine."""
WORTH, HARDLY = 1.3, 1.05
"""Speed-ups from which a drafter is called worth it, and below which it is called not worth it."""
DAY, YEAR = 86400.0, 365.25 * 86400.0


def span(seconds: float) -> str:
    """`duration`, in days and years where hours are too many to picture."""
    if seconds >= 2 * YEAR:
        return f"{count(seconds / YEAR)} years"
    return f"{seconds / DAY:.1f} days" if seconds >= 3 * DAY else duration(seconds)


def text(plan: Plan) -> str:
    """The whole report."""
    parts = [
        describe(plan.target, plan.drafter),
        _cost_of_drafting(plan),
        _stages(plan),
        _storage(plan),
        *([f"Memory on {plan.device}:\n{plan.fit.text()}"] if plan.fit else []),
        *(_way(plan, way) for way in plan.ways),
        "\n".join(verdict(plan)),
    ]
    return "\n\n".join(parts)


def _cost_of_drafting(plan: Plan) -> str:
    ratios = cost_ratios(plan.target, plan.drafter)
    lines = [
        f"A drafter step costs c = {ratios['parameters']:.2%} of the target's by parameters (the paper's c) and "
        f"{ratios['streamed']:.2%} by weights streamed.",
        f"Recipe: {plan.options.recipe or 'the defaults'}.",
    ]
    others = [name for name in recipes_for(plan.recipe.target) if name != plan.options.recipe]
    if others:
        lines.append(f"Recipes made for this target: {', '.join(others)} (--recipe NAME).")
    return "\n".join(lines)


def _stages(plan: Plan) -> str:
    rows: list[tuple[str, ...]] = []
    for stage in plan.stages:
        cost = stage.cost
        memory = byte_size(stage.memory) + ("" if stage.fits else " (!)")
        work = (cost.stage, count(cost.tokens), f"{cost.flops:.2e}", memory, str(stage.devices))
        rows.append((*work, byte_size(cost.disk), span(stage.seconds), stage.binds))
    flops = sum(stage.cost.flops for stage in plan.stages)
    disk = sum(stage.cost.disk for stage in plan.stages)
    seconds = sum(stage.seconds for stage in plan.stages)
    rows.append(("in all", "", f"{flops:.2e}", "", "", byte_size(disk), span(seconds), ""))
    headers = ("stage", "tokens", "FLOPs", "memory each", "on", "disk", "time", "binds")
    return "\n".join([_rates(plan), table(headers, rows), *_assumptions(plan)])


def _rates(plan: Plan) -> str:
    """What the time is reckoned with."""
    one = plan.hardware
    kind = f"published peaks, {'bf16' if one.bf16 else 'float32: it has no bf16 units'}"
    memory = f", {byte_size(one.memory)} each" if one.memory else ""  # Windows does not tell it
    if one.measured:
        kind = f"measured with numpy in float32, {'memory that is free now' if memory else 'free memory not known'}"
    return f"On {one} ({one.flops / 1e12:.3g} TFLOP/s, {one.bandwidth / 1e9:.0f} GB/s{memory}; {kind}):"


def _assumptions(plan: Plan) -> list[str]:
    lines = [
        f"At most: every response has its full length, prompts of {PROMPT_TOKENS} tokens, no draft token is accepted; disk with "
        "checkpoints."
    ]
    one = plan.hardware
    if not one.measured:
        lines.append(
            f"Assumed: training reaches {plan.options.mfu:.0%} of those FLOP/s (--mfu), decoding "
            f"{plan.options.bandwidth_share:.0%} of the bandwidth (--bandwidth-share)."
        )
        if plan.drafter.joins:
            lines.append(
                "A head is measured on the processor, whose rates are not known here: evaluate is timed as on one GPU, and takes "
                "longer."
            )
    elif one.free < QUIET:
        lines.append(
            f"Other programs held {1 - one.free:.0%} of the processors while this was measured: on a quiet machine it is faster."
        )
    if plan.offered > one.count:
        lines.append(
            f"{plan.offered} were given and {one.count} can share the work: every batch size must be a multiple of their number "
            "(--pretrain.batch-size, --distill.batch-size)."
        )
    return lines


def _storage(plan: Plan) -> str:
    stored = plan.storage
    export = plan.recipe.export
    gguf = export.gguf
    if gguf and own_bytes(plan.recipe) is not None:
        beside = () if plan.drafter.joins else (f"{beside_own(gguf)} of the drafter",)
        gguf = ("the target's own GGUF file", *beside)
    precisions = ", ".join((*export.onnx, *gguf, *export.npu))
    download = f"{byte_size(stored.download)} of it the target's download, " if stored.download else ""
    passing = f"{byte_size(stored.passing)} temporary files, " if stored.passing else ""
    return (
        f"Storage: {byte_size(stored.total)} in all, {download}{passing}{byte_size(stored.bundle)} the bundle's models "
        f"({precisions})."
    )


def _way(plan: Plan, way: Way) -> str:
    """One engine and precision on the device: what each γ costs and gives."""
    at, rates = way.at, plan.options.alphas
    rows: list[tuple[str, ...]] = []
    for length in [length for length in LENGTHS if length <= at.most]:
        alpha = at.break_even(length)
        cells = [f"{at.speedup(rate, length):.2f} ({way.memory_bound(rate, length):.2f})" for rate in rates]
        pays = "never" if alpha is None else f"{alpha:.2f}"
        rows.append((f"γ = {length}", f"{at.v(length + 1):.2f}", pays, *cells))
    best = [at.best(rate) for rate in rates]
    rows.append(("best", "", "", *(f"{gain:.2f} at γ = {length}" for length, gain in best)))
    headers = ("", "v(γ+1)", "break-even α", *(f"α = {rate:g}" for rate in rates))
    kind = "Measured:" if way.measured else "A budget, what an ideal engine reaches with"
    return (
        f"On {plan.device}, {way.name}: {at.plain_rate:.3g} plain tokens a second, a drafter step costs {at.c_t:.3f} of one.\n"
        f"{kind} {way.where}.\n"
        f"Speed-up over plain decoding; in brackets MBSU, what memory alone would allow (c by bytes {way.byte_ratio:.2%}):\n"
        f"{table(headers, rows)}"
    )


def verdict(plan: Plan) -> list[str]:
    """Whether it is worth it, in sentences: the device, its room, the cost, and what would make the answer surer."""
    rate = acceptance_rate_of(PAPER_TAU, PAPER_GAMMA)
    assert rate is not None
    way = fastest(plan.ways, rate)
    at = way.at
    length, gain = at.best(rate)
    least = at.least(LENGTHS)
    worth = "worth it" if gain >= WORTH else "hardly worth it" if gain >= HARDLY else "not worth it"
    answer = f"{'is' if plan.measured else 'looks'} {worth}"
    speed = (
        f"at γ = {length} ({gain * at.plain_rate:.3g} tokens a second)" if length else "with no draft at all"
    )
    lines = [
        f"Speculation {answer} on {plan.device}: at the acceptance of the paper's drafter (τ {PAPER_TAU} at γ = {PAPER_GAMMA}, "
        f"so α = {rate:.2f}) {way.name} would run {gain:.2f}x as fast as plain decoding, {speed}."
    ]
    read = sum(stage.cost.tokens for stage in plan.stages if stage.cost.stage in ("pretrain", "distill"))
    if read < PAPER_TOKENS / 10:
        lines.append(
            f"That drafter had read {count(PAPER_TOKENS)} tokens, and this recipe's reads {count(read)}: expect a lower α."
        )
    if least is None:
        lines.append("No acceptance rate makes a draft pay there.")
    else:
        lines.append(f"Speculation pays from α = {least[0]:.2f} on (γ = {least[1]}).")
    if not plan.measured:
        lines.append(f"That is a budget and no measurement{_how_to_measure(plan)}.")
    return [*_room(plan), *lines, *_cost_of_building(plan)]


def _how_to_measure(plan: Plan) -> str:
    """What to run before this plan, so that it is measured; nothing where the synthetic pair has another drafter."""
    if plan.drafter != derive(plan.target, DrafterOptions()):
        return ""
    there, again = ("", "") if plan.device == THIS_MACHINE else (" on the device", " there, without --device")
    bench = shell_line("edgespec", "bench", "--synthetic", plan.recipe.target)
    return (
        f": run `{bench}`{there} before you pay for the training, and then this plan "
        f"again{again}, which uses what was measured"
    )


def _room(plan: Plan) -> list[str]:
    if plan.fit is None or plan.fit.fits:
        return []
    there = byte_size(plan.fit.profile.memory_bytes)
    return [
        f"The pair does not fit on {plan.device}: it takes {byte_size(plan.fit.needed)} and the profile has {there} for it; were "
        "there room:"
    ]


def _cost_of_building(plan: Plan) -> list[str]:
    seconds = sum(stage.seconds for stage in plan.stages)
    busy = sum(stage.seconds * stage.devices for stage in plan.stages) / 3600
    longest = max(plan.stages, key=lambda stage: stage.seconds)
    hours = "" if plan.hardware.measured or busy < 1.5 else f" ({busy:,.0f} GPU hours)"
    name = longest.cost.stage
    cure = f": fewer --{name}.steps cost less and give less" if name in TRAININGS else ""
    share = f"{longest.seconds / seconds:.0%} of it {name}"
    lines = [f"The build takes about {span(seconds)} on {plan.hardware}{hours}, {share}{cure}."]
    tight = [stage.cost.stage for stage in plan.stages if not stage.fits]
    if tight:
        lines.append(
            f"Memory does not suffice for {', '.join(tight)} (!): try a smaller micro_batch_size or generate.batch_size, "
            "--inference.dtype bfloat16, --parallel fsdp, or devices with more memory."
        )
    return lines


def as_json(plan: Plan) -> dict[str, Any]:
    """Every figure of the report, in base units (seconds, bytes, FLOPs)."""
    return {
        "target": {"name": plan.recipe.target, **asdict(plan.target), "parameters": plan.target.parameters},
        "drafter": {**asdict(plan.drafter), "parameters": plan.drafter.parameters},
        "cost_ratios": cost_ratios(plan.target, plan.drafter),
        "recipe": plan.options.recipe,
        "hardware": asdict(plan.hardware) | {"offered": plan.offered},
        "assumed": {"mfu": plan.options.mfu, "bandwidth": plan.options.bandwidth_share},
        "stages": [asdict(stage) for stage in plan.stages],
        "storage": asdict(plan.storage) | {"total": plan.storage.total},
        "device": {
            "name": plan.device,
            "fits": None if plan.fit is None else plan.fit.fits,
            "needed_bytes": None if plan.fit is None else plan.fit.needed,
            "ways": [_way_json(plan, way) for way in plan.ways],
        },
        "verdict": verdict(plan),
    }


def _way_json(plan: Plan, way: Way) -> dict[str, Any]:
    at, rates = way.at, plan.options.alphas
    return {
        "name": way.name,
        "measured": way.measured,
        "where": way.where,
        "context": at.context,
        "c_by_bytes": way.byte_ratio,
        "c_t": at.c_t,
        "plain_tokens_per_second": at.plain_rate,
        "lengths": [
            {
                "gamma": length,
                "v": at.v(length + 1),
                "break_even_alpha": at.break_even(length),
                "tau": {str(rate): predicted_block_efficiency(rate, length) for rate in rates},
                "speedup": {str(rate): at.speedup(rate, length) for rate in rates},
                "mbsu": {str(rate): way.memory_bound(rate, length) for rate in rates},
            }
            for length in LENGTHS
            if length <= at.most
        ],
        "best": {str(rate): dict(zip(("gamma", "speedup"), at.best(rate), strict=True)) for rate in rates},
    }
