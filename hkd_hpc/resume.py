"""What to do with the folder of an old run: which settings hold, from which state, and what has changed since.

Rank 0 only. Two moments: `settings`, before torch is imported, and `starting_state`, once the server is there. Imports
no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hkd_hpc import config as config_module
from hkd_hpc.analysis.metrics import SINGLE
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.words import counted
from hkd_hpc.config import DAMAGED, Config, identity
from hkd_hpc.config.command_line import Request, ResumeOptions
from hkd_hpc.console import messages
from hkd_hpc.data import sources
from hkd_hpc.models.images import Inputs
from hkd_hpc.privacy.settings import RELEASE
from hkd_hpc.runtime import provenance
from hkd_hpc.runtime.provenance import START
from hkd_hpc.state import sessions
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.history import History
from hkd_hpc.store.tree import BadFile, load_tree, open_tree
from hkd_hpc.version import __version__

if TYPE_CHECKING:
    from hkd_hpc.schemes.base import Scheme
    from hkd_hpc.server import Server
    from hkd_hpc.state.checkpoint import RoundState

Tree = dict[str, Any]  # what a checkpoint or metrics.h5 holds, by name
Changes = dict[str, list[Any]]  # {"section.key", "code.module" ...: [before, now]}
EXTENDING = ("fed.rounds", "privacy.budget", "privacy.delta")  # of what a round releases only privacy.epsilon's noise
NEEDED = ("config_json", "partition", "message", "server", "client_states", "global", "rounds", "clients")  # to resume


# --- the settings


def settings(request: Request, folder: RunFolder) -> Config | None:
    """The settings with which the run in a folder is resumed, or a new one begins there.

    Args:
        request: the command line, with `resume`.
        folder: where the run is, or, with `may_begin`, perhaps not yet.

    Returns:
        The settings; None where the run is complete already (a line has said so).

    Raises:
        UsageError: What is stored cannot be read, or is not what was asked for; or more rounds were, of a complete run.
    """
    text = stored_text(folder, request.dry_run)
    if text is None:
        config = config_module.absolute_paths(config_module.from_values(request.asked, request.soft))
        config = config_module.with_clients_of_data(config, request.asked)
        messages.say(f"{folder.path}: no run to resume; a new one starts")
        return config
    config = stored_settings(request, folder, text)
    done = len(folder.rounds().get("round", ()))
    if config.fed.rounds < done:
        raise UsageError(f"--allow-change: fed.rounds={config.fed.rounds}, but {done} rounds are done")
    summary = folder.summary() or {}
    if summary and (config.fed.rounds == done or summary.get("stopped_early")):
        stored, early = config_module.from_json(text), bool(summary.get("stopped_early"))
        check_is_its_own(folder, stored)
        complete = f"already complete ({counted(done, 'round')}{', stopped early' * early})"
        extending = [key for key in config_module.changes(stored, config) if key in EXTENDING]
        if extending:
            advice = "it does not go on, start another run" if early else "a larger fed.rounds beside it resumes it"
            raise UsageError(f"--allow-change: {', '.join(extending)}: {folder.path} is {complete}; {advice}")
        messages.say(f"{folder.path}: {complete}; nothing to do")
        return None
    return config


def stored_text(folder: RunFolder, dry_run: bool) -> str | None:
    """The run's settings as JSON, from its newest good checkpoint where config.json is gone; None: there is no run."""
    text = folder.read_config()
    if text is not None or not folder.holds_run():
        return text
    newest = folder.newest_good_path()
    if newest is None:
        raise UsageError(
            f"--resume {folder.path}: config.json is missing and no checkpoint is good; there is nothing to resume from"
        )
    with open_tree(newest[1]) as file:
        text = file.load("config_json")
    messages.warn(f"{folder.config_path} is missing: the settings are those in {newest[1].name}")
    if not dry_run:
        folder.write_config(text)
    return text


def stored_settings(request: Request, folder: RunFolder, text: str) -> Config:
    """The settings to resume with: those of the run, at the place that was asked for; with --allow-change others too.

    UsageError when others were asked for without it, or when those of the run cannot be read.
    """
    try:
        stored = config_module.from_json(text)
    except DAMAGED as error:
        raise UsageError(f"--resume: {folder.config_path} is damaged ({error})") from None
    except UsageError as error:
        raise UsageError(f"--resume: {folder.config_path} does not fit hkd_hpc {__version__}: {error}") from None
    if request.allow_change:
        return config_module.changed(stored, request.asked, request.soft)
    different = config_module.difference(stored, request.asked, request.soft)
    if different:
        raise UsageError(
            f"--resume {folder.path}: resumes with the stored settings; {different} ({advice(stored, request)})"
        )
    return config_module.moved(stored, request.asked)


def advice(stored: Config, request: Request) -> str:
    """For settings that are not the stored ones."""
    try:
        config_module.changed(stored, request.asked, request.soft)
    except UsageError:
        return "--allow-change does not help: some of these cannot change within a run; start another one"
    return "--allow-change resumes with the others"


def check_is_its_own(folder: RunFolder, config: Config) -> None:
    """UsageError for a complete metrics.h5 of other settings than config.json has: it was put there."""
    text = folder.record().get("config_json")
    other = identity.different(config_module.from_json(text), config) if text else ""
    if other:
        raise UsageError(
            f"--resume {folder.path}: metrics.h5 is that of another run ({other}); put back the one that belongs to "
            "config.json, or remove it to have it written anew from the last checkpoint"
        )


# --- the state


def starting_state(server: Server, options: ResumeOptions) -> RoundState | None:
    """The state after the newest good checkpoint, taken over by the server; None: the run begins anew.

    Args:
        server: as made for the settings of now; its record and folder are those of the run.
        options: what may differ from the run so far.

    Returns:
        What the next round starts from.

    Raises:
        UsageError: The run cannot be resumed from what is stored, or not with what has changed since.
    """
    checkpoint = server.folder.newest_good_checkpoint() if options.resume else None
    if checkpoint:
        return restored(server, *checkpoint, options)
    if server.folder.checkpoints():  # to begin anew would write over what may still be saved
        raise UsageError(
            f"--resume {server.folder.path}: no checkpoint is good, the warnings say why; `python -m hkd_hpc.check "
            "RUN --repair OUT.h5` saves the rows; without the folder checkpoints/ the run begins anew"
        )
    begin_anew(server, options)
    return None


def begin_anew(server: Server, options: ResumeOptions) -> None:
    """No checkpoint is there. Rows that a run without checkpoints has left are made again, to the same bits; with other
    settings they would be lost, and the record of the changes with them."""
    folder, text, stored = server.folder, server.static["config_json"], server.folder.read_config()
    if stored and server.restarts_by_round:  # what it released cannot be told from what is to come
        check_promise(config_module.changes(*map(config_module.from_json, (stored, text))), server.config)
    rows = len(folder.rounds().get("round", ())) if options.resume else 0
    if rows:
        check_rows_can_be_made_again(server, rows, options)
        messages.warn(
            f"no checkpoint is left in {folder.checkpoint_folder}: the run begins anew, and its {rows} rows are made "
            "again"
        )
        remember_sessions(server, {}, 0)
    folder.write_config(text)


def check_rows_can_be_made_again(server: Server, rows: int, options: ResumeOptions) -> None:
    """UsageError where settings have changed since, or on the way."""
    folder = server.folder
    stored, record = folder.read_config(), folder.record()
    if stored and config_module.changes(*map(config_module.from_json, (stored, server.static["config_json"]))):
        raise UsageError(
            f"--allow-change: {folder.path} has {rows} rows and no checkpoint after which settings could change; "
            "start another run"
        )
    if record.get("changes_json", "[]") != "[]":
        raise UsageError(
            f"--resume {folder.path}: no checkpoint is left, and its {rows} rows were made with settings that changed "
            "on the way: they cannot be made again; start another run"
        )
    other = identity.other_start(record, server.config)
    if other:
        raise UsageError(
            f"--resume {folder.path}: no checkpoint is left, and its {rows} rows began with other weights ({other}); "
            "put the file back, or start another run"
        )
    changed_origin(record, server.static, options, allow_data=False)


def restored(server: Server, round: int, tree: Tree, options: ResumeOptions) -> RoundState:
    """The state after `round`, taken over by the server with the record of what has changed since."""
    check_can_resume(round, tree)
    static = server.static
    static["changes_json"] = tree.get("changes_json", "[]")
    keep_start(tree, static)
    settings = changed_settings(round, tree, static, options.allow_change)
    check_shapes(server.trainer.scheme, tree, settings)
    changes = changed_origin(tree, static, options, options.allow_change) | settings
    if tree["partition"]["sha256"] != static["partition"]["sha256"]:
        raise UsageError("--resume: the data are not those that the run began with (another partition comes of them)")
    if "image_shape" in tree and Inputs.of_record(tree) != Inputs.of_record(static):
        raise UsageError(
            "--resume: the data are not those that the run began with (of another form, mean or deviation)"
        )
    if changes:
        entry = {"after_round": round, **changes}
        static["changes_json"] = json.dumps([*json.loads(static["changes_json"]), entry])
    remember_sessions(server, tree, round)
    if settings:
        messages.say(f"settings changed {messages.changes_text(json.dumps([{'after_round': round, **settings}]))}")
    history = History.from_tree(tree, server.config.fed.clients)
    state = server.restore(history, tree, stored_evaluation(server.folder, history))
    if settings:
        server.folder.write_config(static["config_json"])
    messages.say(f"resuming after round {round}")
    return state


def keep_start(tree: Tree, static: Tree) -> None:
    """The weights that the run began with are those of then, whatever has become of their file since."""
    changed = identity.other_start(tree, config_module.from_json(static["config_json"]))
    if changed:
        messages.warn(f"the file of model.init is another one now ({changed}); the run continues from its own weights")
    had, now = (json.loads(part.get("identity_json", "{}")) for part in (tree, static))
    if START in had:
        static["identity_json"] = json.dumps(now | {START: had[START]})


def remember_sessions(server: Server, tree: Tree, round: int) -> None:
    """Put the processes that a checkpoint and metrics.h5 know before this one, which resumes after `round`."""
    static, earlier = server.static, [part.get("sessions_json", "[]") for part in (tree, server.folder.record())]
    static["sessions_json"] = sessions.resumed(static["sessions_json"], earlier, round)


def stored_evaluation(folder: RunFolder, history: History) -> dict[str, Any] | None:
    """What metrics.h5 has of the test of the last row; None where it has not that row, and the test is due again."""
    try:
        stored = History.from_tree(load_tree(folder.metrics_path, only=["rounds", "clients"]), 0).rounds
        row = stored["round"].index(history.rounds["round"][-1])
    except (BadFile, KeyError, ValueError):
        return None
    if stored["weights_sha256"][row] != history.rounds["weights_sha256"][-1]:
        return None
    if "global_test_nonfinite" not in stored:  # an older version took NaN for a prediction
        return None
    return {metric.name: stored[metric.name][row] for metric in SINGLE if metric.of_test and metric.name in stored}


def check_can_resume(round: int, tree: Tree) -> None:
    """UsageError for a checkpoint that has not all that a round starts from."""
    if "message" not in tree:
        raise UsageError(
            f"--resume: the checkpoint of round {round} holds the final weights of a complete run and nothing to "
            "resume from: a study keeps no more without --keep-state. Remove the folder to have it computed anew"
        )
    absent = [name for name in NEEDED if name not in tree]
    if absent:
        raise UsageError(
            f"--resume: the checkpoint of round {round} has no {', '.join(absent)}: the weights can be exported, but "
            "the run cannot be resumed from it"
        )


def changed_settings(round: int, tree: Tree, static: Tree, allow_change: bool) -> Changes:
    """Settings other than those of the checkpoint. UsageError unless that is allowed."""
    changes = config_module.changes(*map(config_module.from_json, (tree["config_json"], static["config_json"])))
    if changes and not allow_change:
        fixed = any(key.startswith(config_module.FIXED) for key in changes)
        raise UsageError(
            f"--resume: the checkpoint of round {round} was written with other settings than config.json has "
            f"({', '.join(changes)}); "
            + (
                "put back config.json: config_json in the checkpoint is the text"
                if fixed
                else "--allow-change resumes with these"
            )
        )
    check_promise(changes, config_module.from_json(static["config_json"]))
    return changes


def check_shapes(scheme: Scheme, tree: Tree, changes: Changes) -> None:
    """UsageError for changed settings with which what the scheme sent, or clients keep, would have another shape."""
    shapes = lambda arrays: {name: np.shape(array) for name, array in arrays.items() if name != "counters"}
    declared = scheme.client_state_shapes()
    kept = [pair for state in tree["client_states"].values() for pair in shapes(state).items()]
    fits = shapes(tree["message"]) == scheme.message_shapes() and all(
        declared.get(name, shape) == shape for name, shape in kept
    )
    if changes and not fits:
        own = [key for key in changes if key.startswith("scheme.")]
        raise UsageError(
            f"--allow-change: {', '.join(own or changes)} cannot change within a run: what scheme "
            f"{scheme.settings.name} sends or keeps would have another shape; start another one"
        )


def check_promise(changes: Changes, config: Config) -> None:
    """UsageError for other settings than those with which rounds may have been released, or a multiplier was found.

    A round that was begun and not saved is paid again as it comes again, so its noise has to be the same.
    """
    privacy = config.privacy
    released = [key for key in changes if key.startswith(("privacy.", "scheme.", "fed.")) and key not in EXTENDING]
    if privacy.mode == RELEASE and released:
        raise UsageError(f"--allow-change: {', '.join(released)} cannot change in a run with privacy.mode=release")
    found_for = [key for key in changes if key in (*released, "fed.rounds", "privacy.delta")]
    if privacy.epsilon and found_for:
        raise UsageError(
            f"--allow-change: {', '.join(found_for)} cannot change in a run with privacy.epsilon={privacy.epsilon:g}, "
            "whose noise was found for what it was"
        )


def changed_origin(before: Mapping[str, Any], static: Tree, options: ResumeOptions, allow_data: bool) -> Changes:
    """What else than settings has changed since a record was written, or is not known of it; a line tells it.

    UsageError for other data unless they are allowed, for other or unknown code with --strict-code.
    """
    had, now = provenance.from_record(before), provenance.from_record(static)
    changes, unknown = provenance.changes(had, now), provenance.unknown(before, now)
    text = provenance.text_of(changes)
    if provenance.CONTENT in changes and not allow_data:
        data = config_module.from_json(static["config_json"]).data
        advice = "" if options.allow_change else ", or --allow-change resumes with these"
        raise UsageError(
            f"--resume: {sources.place_of(data)}: the content of the data is not what the "
            f"run was trained on ({text}); put the data back{advice}"
        )
    if options.resume and options.strict_code:
        require_same_code(had, now, unknown)
    if changes:
        messages.warn(
            f"the rounds from here on come from something else than those before: {text}; recorded in the run"
            + "; --strict-code rejects it" * any(map(provenance.is_code, changes))
        )
    if unknown:
        messages.warn(
            "the rounds before were saved by a version that stored no hash of code and data: that they come from these "
            "cannot be checked; recorded in the run; --strict-code rejects it"
        )
    return {key: pair for key, pair in (changes | unknown).items() if key != provenance.THREADS}  # which is a setting


def require_same_code(had: provenance.Provenance, now: provenance.Provenance, unknown: Changes) -> None:
    """UsageError (--strict-code) unless all rounds before are known to have had the code that there is now."""
    if unknown:
        raise UsageError(
            "--strict-code: the rounds before were saved by a version that stored no hash of its code; leave out "
            "--strict-code"
        )
    if provenance.has_other_code(had, now):
        codes = {
            key: list(dict.fromkeys([*had[key], *now[key]])) for key in filter(provenance.is_code, now) if key in had
        }
        text = ", ".join(
            f"{key} {' -> '.join(map(provenance.short, values))}" for key, values in codes.items() if values[1:]
        )
        raise UsageError(
            f"--strict-code: the code is not that of the rounds before ({text}); put it back, or leave out "
            "--strict-code"
        )
