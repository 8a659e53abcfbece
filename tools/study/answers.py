"""Each claim of the paper, what the finished runs say of it, and how many seeds would tell it where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cache

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.analysis import statistics
from hkd_hpc.analysis.tables import NOTHING
from hkd_hpc.config import load_toml
from hkd_hpc.report.paper import TABLES
from hkd_hpc.results.differences import GOALS

from .tables import ASKED, Asked, Results

OURS, STAR, REFERENCE = "fedhkd", "fedhkd_star", schemes.REFERENCE
LAST = {goal: f"{goal}_test_accuracy_last" for goal in GOALS}
POINT = 0.01
MAIN = ("table1", "small", "smoke")  # tables at beta .5, the paper's own setting first
MOST_TIME, MOST_PAYLOAD = 1.10, 1.01  # of FedAvg's: what is still "low cost" here
NOT_RUN = "not run yet"
HOLDS, FAILS = "holds", "does not hold"


@dataclass(frozen=True)
class Answer:
    """One claim in one table.

    Attributes:
        claim: in a few words.
        table: its title.
        measured: differences with half of their 95 % intervals.
        papers: what the paper has for it.
        verdict: HOLDS, FAILS or that it cannot be told, and why.
        needed: about how many seeds would tell an effect of the paper's size, and one point.
    """

    claim: str
    table: str
    measured: str
    papers: str
    verdict: str
    needed: str


def answers(results: Mapping[str, Results]) -> list[Answer]:
    """All claims in all tables that speak of them."""
    main = [(asked, results[asked.name]) for asked in ASKED if asked.name in MAIN]
    return [
        *(best(goal, asked.title, own, missing(asked, own)) for goal in GOALS for asked, own in main),
        *(between(goal, asked.title, own) for goal in GOALS for asked, own in main),
        *(low_cost(asked.title, own) for asked, own in main),
        *(less_affected(goal, results["beta02"], results["beta5"]) for goal in GOALS),
    ]


# ---------------------------------------------------------------------------------------------- the claims


def missing(asked: Asked, results: Results) -> list[str]:
    """Schemes of a table without any finished run."""
    rows = {row for row, _ in asked.places} - set(results.rows) - set(schemes.CONTROLS)
    return sorted(map(named, rows))


def best(goal: str, title: str, results: Results, missing: Sequence[str] = ()) -> Answer:
    """FedHKD has the best accuracy: it is better than each other scheme of the table."""
    claim, papers = f"FedHKD has the best {goal} accuracy", gain(OURS, REFERENCE, goal)
    own = without_controls(results)
    if not own.seeds or {OURS, REFERENCE} - set(own.rows):
        return Answer(claim, title, NOT_RUN, f"{papers:+.3f}", NOT_RUN, NOTHING)
    beside = {row: difference(own, OURS, row, goal) for row in own.rows if row != OURS}
    return Answer(
        claim,
        title,
        f"FedHKD – FedAvg {interval_text(beside[REFERENCE])}; {rank_text(own, goal)}",
        f"{papers:+.3f}: {size_text(beside[REFERENCE], papers, len(beside))}",
        f"cannot be told before there are runs of {', '.join(missing)}" if missing else all_better(beside),
        needed_text([(beside[REFERENCE], papers)], len(beside)),
    )


def between(goal: str, title: str, results: Results) -> Answer:
    """FedHKD* is better than FedAvg, and FedHKD better than FedHKD*."""
    claim, pairs = f"FedHKD\\* is between FedAvg and FedHKD, {goal}", ((STAR, REFERENCE), (OURS, STAR))
    papers = [gain(*pair, goal) for pair in pairs]
    told = "; ".join(f"{value:+.3f}" for value in papers)
    if not results.seeds or {OURS, STAR, REFERENCE} - set(results.rows):
        return Answer(claim, title, NOT_RUN, told, NOT_RUN, NOTHING)
    steps = {f"{named(one)} – {named(other)}": difference(results, one, other, goal) for one, other in pairs}
    return Answer(
        claim,
        title,
        "; ".join(f"{name} {interval_text(values)}" for name, values in steps.items()),
        told,
        all_better(steps, "above 0:", "below 0:"),
        needed_text(list(zip(steps.values(), papers)), len(steps)),
    )


def low_cost(title: str, results: Results) -> Answer:
    """FedHKD takes at most MOST_TIME of FedAvg's seconds of a client, and MOST_PAYLOAD of its bytes."""
    claim, papers = "FedHKD costs little more than FedAvg", f"{papers_time():.2f} of its time"
    if not results.seeds or {OURS, REFERENCE} - set(results.rows):
        return Answer(claim, title, NOT_RUN, papers, NOT_RUN, NOTHING)
    time_S = np.array([seconds(results, OURS, seed) / seconds(results, REFERENCE, seed) for seed in results.seeds])
    payload = max(payload_ratio(results, seed) for seed in results.seeds)
    mean, half = statistics.interval(time_S)
    is_cheap = mean + half <= MOST_TIME and payload <= MOST_PAYLOAD
    is_dear = mean - half > MOST_TIME or payload > MOST_PAYLOAD
    verdict = HOLDS if is_cheap else FAILS if is_dear else untold(results.seeds)
    measured = f"time {interval_text(time_S, '.2f')}, bytes {shown(payload, '.4f')} of FedAvg's"
    return Answer(claim, title, measured, papers, verdict, NOTHING)


def less_affected(goal: str, severe: Results, even: Results) -> Answer:
    """From beta 5 to .2 FedHKD loses less accuracy, or gains more, than FedAvg."""
    claim, title = f"FedHKD is less affected by beta, {goal}", "Beta .2 and 5, small net"
    papers = gain(OURS, REFERENCE, goal, beta=0.2) - gain(OURS, REFERENCE, goal, beta=5.0)
    seeds = sorted(set(severe.seeds) & set(even.seeds))
    if not seeds or {OURS, REFERENCE} - (set(severe.rows) & set(even.rows)):
        return Answer(claim, title, NOT_RUN, shown(papers, "+.3f"), NOT_RUN, NOTHING)
    change_S = difference(severe, OURS, REFERENCE, goal, seeds) - difference(even, OURS, REFERENCE, goal, seeds)
    measured = f"(FedHKD – FedAvg at .2) – (at 5) {interval_text(change_S)}"
    told = f"{shown(papers, '+.3f')}: {size_text(change_S, papers, 1)}"
    return Answer(claim, title, measured, told, all_better({REFERENCE: change_S}), needed_text([(change_S, papers)], 1))


# ---------------------------------------------------------------------------------------------- how it is told


def all_better(
    difference_S_by_name: Mapping[str, np.ndarray], above: str = "better than", below: str = "worse than"
) -> str:
    """HOLDS where every difference is called better, FAILS where any is called worse; `above`, `below`: in words."""
    found = statistics.verdicts(dict(difference_S_by_name))
    listed = lambda verdict: ", ".join(named(name) for name, own in found.items() if own == verdict)
    if worse := listed("worse"):
        return f"{FAILS}: {below} {worse}"
    if set(found.values()) == {"better"}:
        return HOLDS
    seeds = next(iter(difference_S_by_name.values()))
    return untold(seeds) + (f"; {above} {better}" if (better := listed("better")) else "")


def size_text(difference_S: np.ndarray, effect: float, family: int) -> str:
    """Whether the paper's effect is more than is found, by the same test at the same level."""
    interval_of = statistics.interval(difference_S)
    is_outside = abs(effect - interval_of[0]) > interval_of[1]
    if statistics.seeds_needed(family) > len(difference_S):
        return "outside the interval" if is_outside else "within the interval" if interval_of[1] >= 0 else NOTHING
    p = min(1.0, family * statistics.sign_flip_p(difference_S - effect))
    if p > statistics.LEVEL:
        return "not separated from what is found"
    return "more than is found" if effect > interval_of[0] else "less than is found"


def needed_text(effects: Sequence[tuple[np.ndarray, float]], family: int) -> str:
    """For effects of the paper's size, and of one point: the most that any needs. – of one seed alone."""
    if any(len(difference_S) < 2 for difference_S, _ in effects):
        return NOTHING
    needs = lambda size: max(
        statistics.seeds_to_see(size(effect), deviation(values), family) for values, effect in effects
    )
    return f"{needs(lambda effect: effect)}; {needs(lambda effect: POINT)}"


def deviation(values: np.ndarray) -> float:
    """Rounded, so that no number of seeds depends on a last bit."""
    return round(float(values.std(ddof=1)), 9)


def rank_text(results: Results, goal: str) -> str:
    """rank 4 of 9"""
    means = {row: round(float(results.values(row, LAST[goal]).mean()), 9) for row in results.rows}
    return f"rank {1 + sum(mean > means[OURS] for mean in means.values())} of {len(means)}"


def interval_text(values: np.ndarray, form: str = "+.3f") -> str:
    """+0.003 ± 0.010"""
    mean, half = statistics.interval(values)
    return shown(mean, form) + (f" ± {shown(half, form.removeprefix('+'))}" if half == half else "")


def shown(value: float, form: str) -> str:
    """Rounded twice, so that no digit depends on a last bit."""
    return format(round(value, 9), form)


def untold(seeds: Sized) -> str:
    return f"cannot be told with {len(seeds)} seed{'s' * (len(seeds) != 1)}"


def named(row: str) -> str:
    """The scheme's name as people write it."""
    names = {"fedavg": "FedAvg", "fedhkd": "FedHKD", "fedhkd_star": "FedHKD\\*", "fedprox": "FedProx", "moon": "MOON"}
    more = {"fedalign": "FedAlign", "fedgen": "FedGen", "fedmd": "FedMD", "fedproto": "FedProto"}
    return {**names, **more}.get(row, row)


# ---------------------------------------------------------------------------------------------- the numbers


def without_controls(results: Results) -> Results:
    return results.only(row for row in results.rows if row not in schemes.CONTROLS)


def difference(results: Results, one: str, other: str, goal: str, seeds: Sequence[int] | None = None) -> np.ndarray:
    """(S,) of the last round's accuracy, one row minus another, seed by seed."""
    places = [results.seeds.index(seed) for seed in (results.seeds if seeds is None else seeds)]
    return (results.values(one, LAST[goal]) - results.values(other, LAST[goal]))[places]


def seconds(results: Results, row: str, seed: int) -> float:
    """Of a client and round, median."""
    return results.rows[row][seed].made["client_s"]


def payload_ratio(results: Results, seed: int) -> float:
    """Bytes of a round, FedHKD's / FedAvg's."""
    ours, its = (sum(results.rows[row][seed].made["payload_bytes"].values()) for row in (OURS, REFERENCE))
    return ours / its


@cache
def papers_tables() -> list[dict]:
    return load_toml(str(TABLES), "")["table"]


def papers_columns(beta: float) -> Iterator[tuple[dict, int]]:
    """(table, place of the column) of CIFAR10 with 10 clients."""
    for table in papers_tables():
        for place, column in enumerate(table["columns"]):
            if table["preset"] == "cifar10" and column["fed.clients"] == 10 and column["data.beta"] == beta:
                yield table, place


def gain(one: str, other: str, goal: str, beta: float = 0.5) -> float:
    """The paper's difference between two schemes on CIFAR10 with 10 clients."""
    table, place = next(papers_columns(beta))
    return round(table[goal][one][place] - table[goal][other][place], 4)


def papers_time() -> float:
    """Of FedHKD / FedAvg."""
    table, _ = next(papers_columns(0.5))
    return table["train_s"][OURS] / table["train_s"][REFERENCE]
