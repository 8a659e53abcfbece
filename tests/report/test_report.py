"""The report: its numbers are those worked out by hand, nothing from files is markup, and bad input is one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import toy
from small_study import EVIL, PAPER, write_study

from hkd_hpc import schemes
from hkd_hpc.config import load_toml
from hkd_hpc.config.command_line import parse
from hkd_hpc.config.presets import PRESETS
from hkd_hpc.jobs import load_study
from hkd_hpc.report import origin, page, paper
from hkd_hpc.report.__main__ import main
from hkd_hpc.report.study_tables import difference_table, pairs_with
from hkd_hpc.report.trials import trials_of
from hkd_hpc.results import find_runs
from hkd_hpc.store.lock import RunLock
from tools.synthetic_runs import write_run


class Tables(HTMLParser):
    """rows: {caption: [[text of each cell]]} of all tables; elements: the names of all elements."""

    def __init__(self, path):
        super().__init__()
        self.rows: dict[str, list[list[str]]] = {}
        self.elements: list[str] = []
        self.text: list[str] | None = None
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        if tag == "tr":
            self.current.append([])
        elif tag == "table":
            self.current: list[list[str]] = []
        if tag in ("th", "td", "caption"):
            self.text = []

    def handle_endtag(self, tag):
        if tag == "caption":
            self.rows["".join(self.text or [])] = self.current
        elif tag in ("th", "td"):
            self.current[-1].append("".join(self.text or []))
        if tag in ("th", "td", "caption"):
            self.text = None

    def handle_data(self, data):
        if self.text is not None:
            self.text.append(data)


@pytest.fixture(scope="module")
def tables(report):
    return Tables(report)


def rows_of(tables, start):
    [rows] = [rows for caption, rows in tables.rows.items() if caption.startswith(start)]
    return rows


def test_accuracies_with_interval_seeds_and_the_papers_values(report, tables):
    # fedavg local: t(.975, 2) = 4.3027, times .1 / sqrt(3); global: the same of .01
    assert rows_of(tables, "Accuracy on cifar10") == [
        ["scheme", "local", "global", "parameters held (M)", "seconds per client and round", "public data"],
        ["fedavg", "0.600 ± 0.248 (3)paper 0.595", "0.310 ± 0.025 (3)paper 0.474 ↑", *costs_beside("8.71"), "no"],
        ["fedhkd", "0.660 ± 0.273 (3)paper 0.625", "0.340 ± 0.050 (3)paper 0.521 ↑", *costs_beside("12.83"), "no"],
    ]
    assert "(3) [paper 0.474 ↑] | 0.002 [paper 11.209] | 1.00 [paper 8.71] | no |" in report.read_text()
    assert "Its seconds are those of an AMD Vega20." in report.read_text()


def costs_beside(seconds):
    """The two cells: 2,000 parameters and 1 s beside the paper's."""
    return ["0.002paper 11.209", f"1.00paper {seconds}"]


def test_paired_differences(tables):
    assert rows_of(tables, "Paired differences from fedavg on cifar10") == [
        ["scheme", "local – fedavg", "global – fedavg"],
        ["fedhkd", "+0.060 ± 0.025, cannot be told with 3 seeds", "+0.030 ± 0.025, cannot be told with 3 seeds"],
    ]


def test_schemes_of_other_settings_are_not_compared(tmp_path):
    """fedavg at beta .5, fedprox at .2 and with other epochs: what .2 makes is not fedprox's."""
    for scheme, beta, epochs, local in (("fedavg", 0.5, 5, 0.5), ("fedprox", 0.2, 4, 0.7)):
        for seed in range(6):
            overrides = [f"scheme.name={scheme}", f"run.seed={seed}", f"data.beta={beta}", f"train.epochs={epochs}"]
            write_run(tmp_path / f"{scheme}-{seed}", overrides, [local], [local], summary={})
    (found,) = page.page_of(find_runs(tmp_path)).results
    assert found.title == "Accuracy on fmnist"
    assert found.table.titles()[:5] == ["scheme", "local β 0.2", "local β 0.5", "global β 0.2", "global β 0.5"]
    assert [list(map(str, row[:3])) for row in found.table.rows] == [
        ["fedavg", "–", "0.500 ± 0.000 (6)"],
        ["fedprox", "0.700 ± 0.000 (6)", "–"],
    ]


def test_runs_of_other_images_under_the_same_name_are_no_pair(tmp_path):
    """Of data.npz of two folders: seed 1's two runs."""
    for scheme, gain in (("fedavg", 0.0), ("fedprox", 0.1)):
        for seed in (0, 1, 2):
            content = "ef" if (scheme, seed) == ("fedprox", 1) else "cd"
            write_run(
                tmp_path / f"{scheme}-{seed}",
                [f"scheme.name={scheme}", f"run.seed={seed}", "fed.rounds=1"],
                [0.5 + gain],
                [0.5],
                summary={},
                identity_json=json.dumps({"data.content": content * 32}),
            )
    trials = {trial.scheme: trial for trial in trials_of(find_runs(tmp_path))}
    assert pairs_with(trials["fedavg"], trials["fedprox"], [0, 1, 2]) == [0, None, 2]
    found = difference_table("name", "", trials).table.csv()
    assert found.splitlines()[1:] == ["fedprox,–,–"]


def test_runs_that_are_no_result_are_named_with_the_reason(report, tables):
    text = report.read_text()
    assert re.search(r"<b>broken</b>: .*broken/metrics.h5.*", text)
    assert "<b>restless</b>: stopped, 2 of 5 rounds" in text
    [row] = [row for row in rows_of(tables, "All runs") if row[0] == "restless"]
    head = rows_of(tables, "All runs")[0]
    assert dict(zip(head, row)) == {
        "run": "restless",
        "state": "stopped",
        "scheme": "fedhkd",
        "data": "cifar10",
        "seed": "7",
        "rounds": "2 of 5",
        "local": "0.200",
        "global": "0.200",
        **dict.fromkeys(("balanced", "macro F1", "macro AUC"), "1.000"),  # as in all other columns of a synthetic run
        "restarts": "1",
        "rejected": "2",
        "too few images": "1",
        "dropped out": "1",
        "stragglers": "1",
        "not sampled": "1",
    }


def test_events_warnings_and_starts(report, tables):
    assert rows_of(tables, "Rejected clients")[1:] == [
        ["restless", "1", "0", "weights", "conv1", "inf"],
        ["restless", "1", "4", EVIL, "count_C", "2.5"],
    ]
    assert "in 1 of 2 rounds: no class is shared" in report.read_text()
    starts = rows_of(tables, "Every start")
    assert starts[1] == [
        "restless",
        "2023-11-14 22:13:20",
        "0",
        "3",
        "node1",
        "cpu",
        "python -m hkd_hpc.train",
    ]
    assert starts[2][2] == "1"


SUBMITTED = '[{"after_round": 0, "command_line": "/bin/python -u -m submitit.core._submit /runs/study/submitit"}]'


def test_the_command_of_a_trial_is_one_that_repeats_it(tmp_path):
    """What its job started is gone; the settings that it had are in its folder."""
    write_run(tmp_path / "a trial", PAPER, [0.1], [0.1], summary={}, sessions_json=SUBMITTED)
    [run] = find_runs(tmp_path)
    command = f"python -m hkd_hpc.train --config '{tmp_path}/a trial/config.json' --out DIR"
    assert [row[-1] for row in origin.sessions_table({run: "a"}).rows] == [command]
    assert replace(parse(shlex.split(command)[3:]).config, data=run.config.data) == run.config  # whose paths are whole
    (tmp_path / "a trial/config.json").unlink()
    assert origin.sessions_table({run: "a"}).rows[0][-1].startswith("/bin/python -u -m submitit")


def test_how_to_reproduce(tables):
    settings = {row[0]: row[1:] for row in rows_of(tables, "Settings that differ")}
    assert settings["run.seed"] == ["0, 1, 2, 7", "0"]
    assert settings["data.name"] == ["cifar10", "fmnist"]
    assert "train.lr" not in settings
    facts = rows_of(tables, "Versions, hashes")
    assert ["SHA-256 of data.content", "cd" * 32, "7 of 8"] in facts
    assert ["hosts", "node2", "1 of 8"] in facts


def test_what_comes_from_files_is_text(report, tables):
    assert "img" not in tables.elements
    assert "<img src=x" not in report.read_text()


def test_names_that_are_not_utf_8_or_have_control_characters_are_escaped(tmp_path):
    for name, seed in ((b"bad\xff\xfe", 0), (b"\x1b[31mred", 1), (b"\xffbroken", 2)):
        folder = tmp_path / os.fsdecode(b"\xff study") / os.fsdecode(name)
        folder.parent.mkdir(exist_ok=True)
        write_run(folder, [*PAPER, f"run.seed={seed}"], [0.1, 0.5], [0.1, 0.3], summary={})
    (folder / "metrics.h5").write_bytes(b"no HDF5")
    out = tmp_path / "r.html"
    assert main([str(folder.parent), "--out", str(out)]) == 0
    names = [row[0] for row in rows_of(Tables(out), "All runs")[1:]]
    assert names == [r"\x1b[31mred", r"bad\udcff\udcfe", r"\udcffbroken"]
    assert r"\udcff study/\udcffbroken/metrics.h5" in out.read_text()
    assert "\x1b" not in out.read_text()
    assert str(load_study(folder.parent)).encode().count(rb"not in the table: ") == 1


def test_no_network_is_named(report):
    """But for XML's name spaces and what plotly.js says itself."""
    text = re.sub(r"<script>.*?</script>", "", report.read_text(), flags=re.DOTALL)
    assert re.findall(r"""(?:src|href)=["'](?!#|data:)[^"']*""", text) == []


def test_one_seed_has_no_interval(tmp_path):
    write_run(tmp_path / "one", [*PAPER, "scheme.name=fedavg"], [0.1, 0.5], [0.1, 0.3], summary={})
    assert main([str(tmp_path / "one"), "--out", str(tmp_path / "r.html")]) == 0
    assert "one seed, so there is no interval and nothing can be told from it" in (tmp_path / "r.html").read_text()


def test_two_runs_of_one_seed_are_one_seed(tmp_path):
    """The first complete one counts; t(.975, 1) = 12.706, times the standard deviation of .4 .5 by sqrt(2)."""
    for name, local, seed, more in (("a", 0.1, 0, None), ("b", 0.4, 0, {}), ("c", 0.9, 0, {}), ("d", 0.5, 1, {})):
        overrides = [*PAPER, "scheme.name=fedavg", f"run.seed={seed}"]
        write_run(tmp_path / name, overrides, [0.1, local], [0.1, 0.3], summary=more)
    assert main([str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    assert rows_of(Tables(tmp_path / "r.html"), "Accuracy on cifar10")[1][1] == "0.450 ± 0.635 (2)paper 0.595"
    left_out = f"{tmp_path}/c: has the settings and the seed 0 of {tmp_path}/b, which is counted"
    text = (tmp_path / "r.html").read_text()
    assert text.count(f"Not in the table: {left_out}.") == 1
    assert '"Run a"' not in text
    assert "Run b" in text


def test_a_run_that_is_running_is_told_so_and_is_in_no_table(tmp_path):
    overrides = [*PAPER, "fed.rounds=5"]
    write_run(tmp_path / "one", overrides, [0.1, 0.5], [0.1, 0.3])
    with RunLock(tmp_path / "one"):
        assert main([str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    assert "<b>one</b>: running, 2 of 5 rounds" in (tmp_path / "r.html").read_text()
    assert not [caption for caption in Tables(tmp_path / "r.html").rows if caption.startswith("Accuracy on")]


def test_clients_and_beta_stand_across(tmp_path):
    for beta, clients, local in ((0.5, 10, 0.5), (0.5, 20, 0.6), (0.2, 10, 0.7)):
        overrides = [*PAPER, "scheme.name=moon", f"data.beta={beta}", f"fed.clients={clients}"]
        write_run(tmp_path / f"{beta}-{clients}", overrides, [0.1, local], [0.1, 0.3], summary={})
    assert main([str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    upper, lower, row = rows_of(Tables(tmp_path / "r.html"), "Accuracy on cifar10")
    assert upper == ["", "local", "global", ""]
    assert lower[:4] == ["scheme", "10 clients, β 0.2", "10 clients, β 0.5", "20 clients, β 0.5"]
    assert row[:4] == ["moon", "0.700 (1)paper 0.576", "0.500 (1)paper 0.590", "0.600 (1)paper 0.648"]
    assert row[-3:-1] == ["0.002paper 33.627", "1.00paper 20.52"]  # Table 2 (beta .2) has none, Table 1 (beta .5) has


def test_figures_of_a_trial_are_those_of_its_first_run_with_a_round(tmp_path):
    """Of fedavg's the first has just begun; none of fedprox's has ended a round."""
    for name, scheme, seed, local in (("a", "fedavg", 0, []), ("b", "fedavg", 1, [0.5]), ("c", "fedprox", 0, [])):
        write_run(tmp_path / name, [*PAPER, f"scheme.name={scheme}", f"run.seed={seed}"], local, local)
    drawn = page.page_of(find_runs(tmp_path)).drawn
    assert [part.title for part in drawn] == ["Figures over seeds", "Run b"]


def test_runs_of_like_names_have_pictures_of_their_own(tmp_path):
    """Letters and digits alone are in a picture's name, and some names have none."""
    for place, name in enumerate(("run-1", "run_1", "β", "γ")):
        write_run(tmp_path / name, [*PAPER, f"train.lr={0.1 + place / 10}"], [place / 10], [0.1], summary={})
    found = page.page_of(find_runs(tmp_path))
    pictures = list(page.all_figures(found.drawn))
    assert len({picture.name for picture in pictures}) == len(pictures)
    own = {part.title: part.figures[0] for part in found.drawn[1:]}
    assert {title: (figure.name, figure.series[0].y.tolist()) for title, figure in own.items()} == {
        "Run run-1": ("accuracy_rounds_run_1", [0.0]),
        "Run run_1": ("accuracy_rounds_run_1_2", [0.1]),
        "Run β": ("accuracy_rounds", [0.2]),
        "Run γ": ("accuracy_rounds_2", [0.3]),
    }


def test_counts_in_the_head_stand_in_their_order(tmp_path):
    for clients in (10, 4, 6):
        write_run(tmp_path / f"c{clients}", [*PAPER, f"fed.clients={clients}"], [0.1], [0.1], summary={})
    assert dict(page.page_of(find_runs(tmp_path)).facts)["clients"] == "4, 6, 10"


def test_the_processes_that_read_end_with_one_that_is_killed():
    """They hold its standard output, which ends with the last of them."""
    code = (
        "import os, signal, time; from hkd_hpc.report.__main__ import readers; pool = readers(); "
        "pool.submit(os.getpid).result(); pool.submit(time.sleep, 300); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=120)
    assert (ended.returncode, ended.stdout) == (-9, b"")


# ---- the paper


def test_every_cell_of_the_papers_tables_is_there():
    tables = load_toml(str(paper.TABLES), "")["table"]
    assert [(table["name"], table["preset"], len(table["columns"])) for table in tables] == [
        ("Table 1", "svhn", 3),
        ("Table 1", "cifar10", 3),
        ("Table 1", "cifar100", 3),
        ("Table 2", "cifar10", 2),
        ("Table 2", "svhn", 2),
    ]
    for table in tables:
        assert table["preset"] in PRESETS
        for goal in ("local", "global"):
            assert set(table[goal]) == set(schemes.PAPER)
            assert {len(cells) for cells in table[goal].values()} == {len(table["columns"])}
    # row sums of the paper's CIFAR10, by hand: FedHKD local, FedMD global
    assert sum(tables[1]["local"]["fedhkd"]) == pytest.approx(0.6254 + 0.6816 + 0.6671)
    assert sum(tables[1]["global"]["fedmd"]) == pytest.approx(0.5088 + 0.5575 + 0.5714)


def test_what_is_not_the_papers_setting_is_said(study):
    [trial, *_] = trials_of(run for run in find_runs(study) if run.state == "complete")
    found = paper.published(trial)
    assert (found.table, found.accuracy) == ("Table 1", {"local": 0.5950, "global": 0.4741})
    assert paper.other_settings_text(found) == "fed.rounds 2 (paper 50)"


# ---- bad input


def line_of(capsys) -> str:
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    "make, part",
    [
        (lambda folder: folder, "holds no run (neither config.json nor metrics.h5 nor a checkpoint)"),
        (lambda folder: folder / "nope", "nope: cannot be read (No such file or directory)"),
    ],
)
def test_no_run_is_one_line(tmp_path, capsys, make, part):
    assert main([str(make(tmp_path)), "--out", str(tmp_path / "r.html")]) == 2
    assert part in line_of(capsys)
    assert not (tmp_path / "r.html").exists()


def test_a_name_of_another_format_is_one_line(study, tmp_path, capsys):
    assert main([str(study), "--out", str(tmp_path / "r.pdf")]) == 2
    assert line_of(capsys) == (
        f"hkd_hpc: --out {tmp_path}/r.pdf: a report is HTML; name a file that ends in .html (figures: --figures DIR)"
    )
    assert not (tmp_path / "r.pdf").exists()


def test_half_a_file_alone_is_one_line(study, tmp_path, capsys):
    assert main([str(study / "broken"), "--out", str(tmp_path / "r.html")]) == 2
    assert line_of(capsys).startswith(f"hkd_hpc: nothing to report: {study / 'broken/metrics.h5'}: ")


def test_a_layout_of_the_future_is_one_line(tmp_path, capsys):
    from hkd_hpc.store.tree import load_tree, save_tree

    write_run(tmp_path / "one", PAPER, [0.1], [0.1])
    metrics = tmp_path / "one/metrics.h5"
    save_tree(metrics, load_tree(metrics), {"layout_version": 1000})
    assert main([str(tmp_path / "one"), "--out", str(tmp_path / "r.html")]) == 2
    assert "newer version of hkd_hpc" in line_of(capsys)


def test_out_replaces_a_report_and_nothing_else(tmp_path, capsys):
    run, out = write_study(tmp_path) / "fedavg-s0", tmp_path / "r.html"
    assert main([str(run), "--out", str(out)]) == 0
    assert main([str(run), "--out", str(out)]) == 0
    capsys.readouterr()
    thesis = tmp_path / "thesis.html"
    thesis.write_text("four years")
    assert main([str(run), "--out", str(thesis)]) == 2
    assert line_of(capsys) == f"hkd_hpc: --out {thesis}: is there, and is no report; name another file, or remove it"
    assert thesis.read_text() == "four years"
    assert main([str(run), "--out", str(tmp_path / "nope/r.html")]) == 2
    assert f"there is no folder {tmp_path / 'nope'}; make it" in line_of(capsys)


def test_where_nothing_can_be_written_is_found_before_any_work(tmp_path, capsys):
    run, out = str(tmp_path / "no run"), tmp_path / "r.html"
    (tmp_path / "file").touch()
    with toy.small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert main([run, "--out", f"{disk}/r.html"]) == 2
        assert line_of(capsys) == f"hkd_hpc: --out {disk}/r.html: {disk} cannot be written to; name another folder"
        assert main([run, "--out", str(out), "--figures", f"{disk}/new"]) == 2
        assert line_of(capsys).startswith(f"hkd_hpc: --figures {disk}/new: {disk} cannot be written to; name a folder")
    for place in (tmp_path / "file", tmp_path / "file/new"):
        assert main([run, "--out", str(out), "--figures", str(place)]) == 2
        assert line_of(capsys).startswith(f"hkd_hpc: --figures {place}: {tmp_path / 'file'} is a file; name a folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "file"]


def test_without_the_extra_one_line_says_what_to_install(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main([str(study), "--out", str(tmp_path / "r.html")]) == 2
    assert line_of(capsys) == (
        "hkd_hpc: jinja2 is not installed, and the report needs it: pip install 'hkd_hpc[report]'"
    )


def test_figures_on_paper_are_those_of_the_study_and_of_single_runs_where_asked_for(study):
    found = page.page_of(find_runs(study))
    over_seeds, every = (
        [figure.name for figure in page.figures_for_paper(found, each_run)] for each_run in (False, True)
    )
    assert "accuracy_rounds" in over_seeds[0]
    assert not [name for name in over_seeds if name.endswith("_s0")]
    assert every[: len(over_seeds)] == over_seeds
    assert {name.rpartition("_")[2] for name in every[len(over_seeds) :]} == {"s0", "restless"}
    alone = page.page_of(find_runs(study / "fedavg-s0"))
    assert len(page.figures_for_paper(alone, False)) == len(list(page.all_figures(alone.drawn))) > 10
