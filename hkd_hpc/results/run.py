"""One run, as a folder or a bare metrics file shows it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hkd_hpc.analysis.milestones import TARGETS, Reached, reached
from hkd_hpc.analysis.tables import Table
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.common.words import counted
from hkd_hpc.config import Config, from_file
from hkd_hpc.config.values import DAMAGED, stored_values
from hkd_hpc.privacy.ledger import Ledger, Terms, ledger_of
from hkd_hpc.results.frames import classes_table, clients_table, rounds_table
from hkd_hpc.results.models import make_model
from hkd_hpc.results.parts import ClientColumns, Columns, Parts, parts_in, read
from hkd_hpc.results.plot import Plot, plot
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import is_held
from hkd_hpc.store.tree import BadFile

if TYPE_CHECKING:
    from hkd_hpc.models.predictor import Predictor
    from hkd_hpc.results.frames import Frame

ACCURACIES = ("local_test_accuracy", "global_test_accuracy")
SHOWN = {"scheme": "scheme.name", "data": "data.name", "clients": "fed.clients", "seed": "run.seed"}
STATES = ("complete", "running", "stopped", "broken")


class Run:
    """A run as it is when it is first looked at: all is read when it is asked for, once, and then kept.

    No lock is taken and nothing is written, so that a run may be looked at while it trains. What a run of an older
    version has not recorded is empty. Of a broken run everything is empty that cannot be read, and nothing raises;
    `state` and `problem` say so.

    Args:
        path: The run's folder, or a metrics file by itself.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.state}, {counted(len(self), 'round')}>"

    def _repr_html_(self) -> str:
        """As notebooks show it: what it is, how it stands, and the accuracies of its last round."""
        settings, columns = self.settings, self.round_columns
        facts = {name: str(settings.get(key, "")) for name, key in SHOWN.items()}
        last = {name: f"{columns[name][-1]:.3f}" for name in ACCURACIES if len(columns.get(name, ()))}
        state = f"{self.state}, {len(self)} of {settings.get('fed.rounds', '?')} rounds"
        rows = {"run": str(self.path), "state": self.problem or state, **facts, **last}
        return Table(["", ""], list(rows.items()))._repr_html_()

    def __len__(self) -> int:
        """Rounds that are recorded."""
        return len(self.round_columns.get("round", ()))

    # --- how it stands

    @property
    def state(self) -> str:
        """One of STATES: "running" while a living process, here or on another host, holds the folder; "stopped": it
        can be resumed.
        """
        if self.problem:
            return "broken"
        if self.summary:
            return "complete"
        return "running" if self._is_held else "stopped"

    @cached_property
    def problem(self) -> str:
        """Why nothing can be told of a broken run, in one line; empty of every other."""
        return self._looked[1] or self._stored[1]

    @cached_property
    def _is_held(self) -> bool:
        return self.path.is_dir() and is_held(self.path)

    @property
    def metrics_path(self) -> Path:
        """Of the metrics file, which need not be there yet."""
        return self.path if self.path.is_file() else RunFolder(self.path).metrics_path

    # --- what it was asked to do

    @cached_property
    def config(self) -> Config:
        """The settings.

        Raises:
            UsageError: They cannot be read, or do not fit this version: a scheme of one's own may not be found here.
        """
        text = self._stored_text()
        if not text:
            raise UsageError(f"{self.path}: has no settings")
        return from_file(text, str(self.path))

    @property
    def settings(self) -> Mapping[str, Any]:
        """{"section.key": value}, also where the code of the run's own scheme is not here."""
        return self._stored[0]

    @cached_property
    def _stored(self) -> tuple[dict[str, Any], str]:
        """(the settings as they are stored, why there are none)."""
        try:
            text = self._stored_text()
            return (stored_values(text) if text else {}), ""
        except UsageError as error:
            return {}, str(error)
        except DAMAGED as error:
            return {}, f"{self.path}: its settings are damaged ({error})"

    def _stored_text(self) -> str:
        """As JSON: those that the rows come from, else those of the folder."""
        return self._parts.small.get("config_json") or (self.path.is_dir() and RunFolder(self.path).read_config()) or ""

    # --- what it found

    @cached_property
    def round_columns(self) -> Columns:
        """Column to an array (rounds,), as in /rounds of metrics.h5; a column of classes is (rounds, classes)."""
        return self._parts.rounds

    @cached_property
    def client_columns(self) -> Columns:
        """Column to an array (rounds, clients), as in /clients; NaN where a client did not take part. A column of
        classes is (rounds, clients, classes). Each is read when it is asked for.
        """
        return ClientColumns(self.metrics_path, self._parts)

    def attributes(self, column: str) -> dict[str, Any]:
        """What the file says of a column of rounds or clients: unit, meaning, model, data, moment."""
        table = "rounds" if column in self.round_columns else "clients"
        if column not in self.round_columns and column not in self.client_columns:
            return {}
        return read(self.metrics_path, lambda file: file.attributes(f"{table}/{column}"))

    @cached_property
    def events(self) -> Columns:
        """Of rejected clients: round, client, what, tensor, value; empty where none was."""
        return self._large("events")

    @cached_property
    def partition(self) -> Mapping[str, Any]:
        """Which images each client has (/partition); train_count is (clients, classes)."""
        return self._large("partition")

    @cached_property
    def client_names(self) -> list[str]:
        """Of natural clients, by their numbers; empty where these are their names."""
        return self._load("clients/name").tolist() if "clients/name" in self._parts.shapes else []

    @cached_property
    def client_ranks(self) -> list[int]:
        """The rank of each client in the last process of the run."""
        return self._load("clients/rank").tolist() if "clients/rank" in self._parts.shapes else []

    @property
    def summary(self) -> Mapping[str, Any]:
        """Of a complete run; empty of every other."""
        return self.part("summary")

    @property
    def confusion(self) -> np.ndarray:
        """(classes, classes) images of the official test split by true and predicted class, of the global model after
        the last round, of unequal models once for each architecture; (0, 0) of a run that is not complete, or of an
        older version.
        """
        return np.asarray(self.summary.get("global_test_confusion", np.zeros((0, 0), np.int64)))

    @property
    def classes(self) -> Frame:
        """What `confusion` says of each class, as a table: class, name, n (as in `confusion`), accuracy, f1,
        undefined (why these are NaN).

        Raises:
            RunError: The run is broken.
        """
        self.require()
        return classes_table(self.confusion, self.partition.get("class_name", ()))

    def reached(self, target: float) -> Mapping[str, Reached]:
        """When the "local" and the "global" test accuracy were first not below a target: round, payload_bytes and
        wall_s up to its end, NaN where they never were.

        Args:
            target: An accuracy, such as 0.6.
        """
        return {kind: reached(self.round_columns, column, target) for kind, column in TARGETS.items()}

    @cached_property
    def privacy(self) -> Ledger | None:
        """What each client released in which round: `run.privacy.epsilon()` of the whole release by client,
        `run.privacy.table` by kind. None where there was no noise and no setting of section `privacy`.
        """
        terms = self.part("privacy")
        if not terms:
            return None
        begun = RunFolder(self.metrics_path.parent).rounds_begun()  # none but of a release
        return ledger_of(Terms.from_tree(terms), self.client_columns, begun, self.round_columns.get("begun"))

    def part(self, name: str) -> Mapping[str, Any]:
        """A small group of the file, such as baselines, parameters or world; empty where there is none."""
        return self._parts.small.get(name, {})

    @cached_property
    def rounds(self) -> Frame:
        """A pandas frame, or without pandas a structured array: one row a round, columns as in /rounds.

        Raises:
            RunError: The run is broken.
        """
        self.require()
        return rounds_table(self.round_columns)

    @cached_property
    def clients(self) -> Frame:
        """The same with one row for each client that was sampled in a round: round, client, columns as in /clients.

        Raises:
            RunError: The run is broken.
        """
        self.require()
        return clients_table(self.round_columns.get("round", np.array([])), self.client_columns, self.client_names)

    def plot(self, name: str = "accuracy") -> Plot:
        """A figure of this run, which a notebook shows: `run.plot("accuracy")`.

        Args:
            name: A figure's name, or how it begins; docs/figures.md has all of them.

        Returns:
            The figure, as data (`figure`) and drawn by matplotlib (`canvas`).

        Raises:
            UsageError: There is no such figure, the run has not its numbers, or matplotlib is not installed.
            RunError: The run is broken.
        """
        self.require()
        return plot(self, name)

    def model(self, client: int | None = None, architecture: str = "") -> Predictor:
        """The trained network, ready to predict: `run.model()(x_BCHW).argmax(1)`, see Predictor for what it takes.

        Args:
            client: Its number, for its own model after the last local training; None: the global model, of the newest
                checkpoint.
            architecture: Of unequal models (model.names), which global one.

        Returns:
            A torch module on the CPU, in eval mode, from inputs as they lie in the data, as a rule uint8 images
            (B, channels, height, width), to logits (B, classes). It normalises them itself.

        Raises:
            UsageError: The run does not hold this model.
        """
        self.require()
        if not self.path.is_dir():
            raise UsageError(
                f"{self.path}: is a metrics file by itself; models are in the checkpoints of a run's folder"
            )
        return make_model(self.path, client, self.partition["train_count"].shape[1], architecture)

    # --- what it comes from

    @property
    def versions(self) -> Mapping[str, str]:
        """Of code, Python and packages."""
        return self._json("versions_json", {})

    @property
    def identity(self) -> Mapping[str, str]:
        """SHA-256 of code and data, packages, threads."""
        return self._json("identity_json", {})

    @property
    def changes(self) -> list[dict[str, Any]]:
        """What changed on the way: after_round, and {setting or fact: [before, after]}."""
        return self._json("changes_json", [])

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """One entry for each process of the run; empty where an older version kept none."""
        return self._json("sessions_json", [])

    def _json(self, name: str, nothing: Any) -> Any:
        try:
            return json.loads(self._parts.small.get(name) or "null") or nothing
        except ValueError:
            return nothing

    # --- reading

    @property
    def _parts(self) -> Parts:
        return self._looked[0]

    @cached_property
    def _looked(self) -> tuple[Parts, str]:
        """(what the metrics file holds, why it cannot be read); nothing, and no problem, before it is there."""
        try:
            return read(self.metrics_path, parts_in), ""
        except BadFile as bad:
            return Parts(), str(bad) if self.metrics_path.exists() else ""

    def _large(self, name: str) -> dict[str, Any]:
        """A large part; empty where there is none."""
        found = any(path.startswith(f"{name}/") for path in self._parts.shapes)
        return self._load(name) if found else {}

    def _load(self, key: str) -> Any:
        return read(self.metrics_path, lambda file: file.load(key))

    def require(self) -> None:
        """Raises RunError, with the one line of `problem`, of a broken run."""
        if self.problem:
            raise RunError(self.problem)
