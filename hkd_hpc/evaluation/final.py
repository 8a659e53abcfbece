"""Once, with the final global model: the clients' local tests, fine-tuning, BatchNorm measured anew by all, summary."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from hkd_hpc.analysis.metrics import SUMMARISED, summarise
from hkd_hpc.analysis.milestones import TARGETS, reached
from hkd_hpc.averaging import with_statistics_of_all
from hkd_hpc.common.errors import RunError
from hkd_hpc.console import messages
from hkd_hpc.evaluation.by_architecture import Table, by_architecture
from hkd_hpc.models.evaluate import Tested
from hkd_hpc.quarantine import INVALID_TEST, NONFINITE, STATUS
from hkd_hpc.rank_run import RankRun
from hkd_hpc.rounds import in_client_order
from hkd_hpc.server import Server
from hkd_hpc.state.checkpoint import RoundState
from hkd_hpc.store.tree import Leaf
from hkd_hpc.worker import counter_size, unpack_counters

PHASE = "final evaluation"
CONFUSION = {"unit": "images", "axes": "true class, predicted class"}
ROW = np.dtype([("client", np.int64), ("test_n", np.int64), ("correct", np.int64), ("nonfinite", np.int64)])
Rows = dict[str, np.ndarray]  # "global" and "finetuned": (clients, 4) as Worker.test_global makes them


def final_evaluation(run: RankRun) -> None:
    """All ranks, after the last round; rank 0 writes the summary and prints it.

    Args:
        run: the rank's part of the run, all rounds done.

    Raises:
        RunError: The final global model's logits are not finite (unless fed.max_bad_fraction=1: then the summary has
            NaN), or too many fine-tuned clients' are not.
    """
    comm, worker = run.comm, run.worker
    comm.at(run.done, PHASE)
    found = dict(rows_of(run, "global", worker.test_global(run.weights_V, run.counters)))
    reestimated_V = with_statistics_of_all(run, PHASE)
    if run.config.fed.finetune_epochs and not run.trainer.scheme.pools_data:  # else there are no clients to tune it on
        found |= rows_of(run, "finetuned", worker.finetune(run.weights_V, run.counters, run.done + 1))
    if run.server:
        state = RoundState(run.done, run.weights_V, run.counters, run.message, {})
        if not run.server.last_test.n:  # it was done before a resume, and no file has its confusion matrix
            run.server.last_test = run.server.test(state.weights_V, state.counters, run.server.test_images)
        finish(run.server, found, reestimated_V, by_architecture(run.server, state))


def rows_of(run: RankRun, name: str, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(name, all ranks' rows) on rank 0, in client order: (clients, 4) int64, id, test_n, correct, nonfinite. Nothing
    elsewhere."""
    run.comm.at(run.done, PHASE)
    blocks = run.comm.gather(rows.reshape(-1).view(np.uint8), PHASE)
    if blocks is not None:
        yield name, in_client_order(blocks, ROW).view(np.int64).reshape(-1, 4)


def finish(server: Server, found: Rows, reestimated_V: torch.Tensor, architectures: Table) -> None:
    """Rank 0: the summary, in metrics.h5 and on the screen."""
    flat = server.trainer.flat
    counters = unpack_counters(np.zeros(counter_size(flat.counters), np.int64), flat.counters)
    tested = server.test(reestimated_V, counters, server.test_images)
    if "finetuned" in found:
        found["finetuned"] = accepted(server, found["finetuned"])
    nonfinite = where_nonfinite(server, tested, found["global"])
    summary = summary_of(server, found, tested, nonfinite)
    summary |= {"architectures": architectures} if architectures else {}
    ledger = server.ledger
    summary |= {"privacy": ledger.said()} if ledger else {}
    has_result = not nonfinite or server.config.fed.max_bad_fraction >= 1
    if has_result:
        server.write_complete_metrics(summary)
    else:
        server.write_metrics()
    messages.answer(
        messages.summary_table(
            server.history, summary, server.static["baselines"], server.folder, server.config.model.members[0]
        ),
        messages.summary_essentials(server.history, summary, server.folder),
    )
    if ledger:
        messages.say("\n".join(["", *ledger.lines()]))
    if not has_result:
        raise RunError(
            f"the final global model has {nonfinite}: the run has no result. All its rounds are saved; "
            "--resume --allow-change fed.max_bad_fraction=1 ends it without these accuracies"
        )


def accepted(server: Server, rows: np.ndarray) -> np.ndarray:
    """The rows of fine-tuned clients that predict finite numbers; the others are told and recorded."""
    bad, round = rows[rows[:, 3] > 0], int(server.history.rounds["round"][-1])
    for client, _, _, nonfinite in bad.tolist():
        messages.warn(
            f"{server.client_text(client)}, fine-tuned, rejected: local test has {nonfinite} {NONFINITE}; it does not "
            "count"
        )
        server.history.add_event(
            round=round,
            client=client,
            what=STATUS[INVALID_TEST],
            tensor="local test, fine-tuned",
            value=float(nonfinite),
        )
    server.stop_if_too_many("fine-tuning", len(bad), int((rows[:, 1] > 0).sum()))
    return rows[rows[:, 3] == 0]


def where_nonfinite(server: Server, reestimated: Tested, rows: np.ndarray) -> str:
    """Where the logits of the final global model are not finite; `rows`: on the clients' own tests."""
    row = server.history.last()
    return messages.nonfinite_text(
        {
            "the test split": Tested(row["global_test_n"], nonfinite=row["global_test_nonfinite"]),
            "the validation images": Tested(len(server.val_images.y_N), nonfinite=row["global_val_nonfinite"]),
            "the test split with BatchNorm re-estimated": reestimated,
            "the clients' own tests": Tested(int(rows[:, 1].sum()), nonfinite=int(rows[:, 3].sum())),
        }
    )


def summary_of(server: Server, found: Rows, reestimated: Tested, nonfinite: str) -> dict[str, Any]:
    """What metrics.h5 keeps as /summary."""
    history = server.history
    summarised = {
        metric.name: summarise(history.column(metric.name), history.nonfinite(metric.name)) for metric in SUMMARISED
    }
    warnings = (
        messages.warnings_text(history.rounds["warning"]),
        messages.nonfinite_rounds_text(history),
        nonfinite and f"the final global model has {nonfinite}",
    )
    return {
        "global_test_accuracy_batchnorm_reestimated": reestimated.accuracy,
        **{f"{name}_on_local_test_accuracy": accuracy_of_rows(rows) for name, rows in found.items()},
        **{f"{name}_on_local_test": rows for name, rows in found.items()},
        "global_test_confusion": Leaf(server.last_test.confusion_CC, CONFUSION),
        **{f"{name}_{kind}": value for name, values in summarised.items() for kind, value in values.items()},
        **targets(server),
        "stopped_early": stopped_early(server),
        "warnings": "; ".join(filter(None, warnings)),
        "remark": server.trainer.scheme.about.remark,
        "batchnorm": server.config.train.batchnorm,
        "reproducible": irreproducible(server),
        "changes": messages.changes_text(server.static.get("changes_json", "[]")),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def targets(server: Server) -> dict[str, float]:
    """When the accuracies reached run.target_accuracy; NaN where they did not; 0 alone where none was asked for."""
    target = server.config.run.target_accuracy
    found = {kind: reached(server.history.rounds, column, target) for kind, column in TARGETS.items() if target}
    told = {f"target_{kind}_{name}": value for kind, each in found.items() for name, value in asdict(each).items()}
    return {"target_accuracy": target, **told}


def stopped_early(server: Server) -> str:
    """Why the last round is earlier than fed.rounds; empty where it is not."""
    done, rounds = len(server.history), server.config.fed.rounds
    return f"stopped early after round {done} of {rounds}: {server.why_early()}" if done < rounds else ""


def accuracy_of_rows(rows: np.ndarray) -> float:
    """Over all images of the rows (Worker.test_global); NaN without any, and where one has no finite prediction."""
    _, n, correct, nonfinite = map(int, rows.sum(0))
    return Tested(n, correct, nonfinite=nonfinite).accuracy


def irreproducible(server: Server) -> str:
    """Empty where another run of these settings gives the same bits."""
    is_free = server.trainer.flat.values_V.is_cuda and not server.config.run.deterministic
    return "not bit-reproducible: on a GPU without run.deterministic=true" if is_free else ""
