"""The site file: what it may say, what sbatch and the launcher make of it, and the layout of ranks on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import slurm_cluster
import toy

from hkd_hpc.common.errors import UsageError
from hkd_hpc.jobs.__main__ import main, parse
from hkd_hpc.jobs.files import read_launches
from hkd_hpc.jobs.launcher import options_at
from hkd_hpc.jobs.options import Options, cores_of
from hkd_hpc.jobs.study import resubmit
from jobs import Sweep, launch

pytestmark = pytest.mark.slow

EXAMPLES = {"lumi": (9, 6), "frontier": (9, 6), "slingshot_nvidia": (5, 12), "plain": (1, 8)}  # ranks, cores of each
QUOTES = """account = "it's mine"
setup = ["export GREETING=\\"a  b\\""]
launcher = "mpirun"
srun = ["--comment=x y", "--quiet"]
mem_gb = 1.5
exclusive = true
[environment]
TEXT = "a 'b' \\"c\\" $HOME"
NUMBER = 1
[container]
command = "apptainer exec --nv"
image = "/my images/x.sif"
binds = ["/a b", "$PLACE/c"]
[sbatch]
mail-user = "me and you"
reservation = "r"
contiguous = true
"""


def write(folder, text):
    path = folder / "site.toml"
    path.write_text(text)
    return path


def trial(clients):
    [found], _ = Sweep(clients=[clients]).trials()
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_load_and_have_their_layout(name):
    options = options_at(toy.PROJECT / f"slurm/sites/{name}.toml", {})
    ranks, cores = EXAMPLES[name]
    assert (options.ranks_of(trial(10)), cores_of(options, ranks)) == (ranks, cores)


def test_every_example_is_tested():
    assert {path.stem for path in (toy.PROJECT / "slurm/sites").iterdir()} == set(EXAMPLES)


@pytest.mark.parametrize(
    "options, clients, ranks, cores",
    [
        ({}, 10, 1, 1),
        ({"cores_per_node": 64}, 10, 1, 1),  # without GPUs a trial is one process of one thread
        ({"cores_per_node": 64, "exclusive": True}, 10, 1, 64),
        ({"gpus_per_node": 1, "cores_per_node": 8}, 10, 1, 8),  # one process does all
        ({"gpus_per_node": 8, "cores_per_node": 64, "cores_free": 8}, 10, 9, 6),
        ({"gpus_per_node": 8, "cores_per_node": 64, "cores_free": 8}, 3, 4, 14),  # never more than clients + 1
        ({"gpus_per_node": 4, "nodes": 2, "cores_per_node": 64}, 10, 9, 12),  # 5 and 4 ranks on the nodes
        ({"gres": "gpu:a100:2", "cores_per_node": 64, "cpus_per_task": 3}, 10, 3, 3),
        ({"gres": "gpu:2,nvme:1", "ranks": 1, "cores_per_node": 4}, 10, 1, 4),
        ({"gpus_per_node": 8, "ranks": "clients"}, 10, 11, 1),
        ({"gpus_per_node": 8, "cores_per_node": 4}, 10, 9, 1),
    ],
)
def test_layout_of_a_node(options, clients, ranks, cores):
    options = Options(**options)
    assert options.ranks_of(trial(clients)) == ranks
    assert cores_of(options, ranks) == cores


@pytest.mark.parametrize(
    "gres, gpus",
    [
        (None, 0),
        ("gpu", 1),
        ("gpu:4", 4),
        ("gpu:mi250:8", 8),
        ("nvme:2", 0),
        ("gpu:a100", 1),
        ("nvme,gpu:a100:2,gpu:h100:1", 3),
    ],
)
def test_gpus_that_gres_asks_for(gres, gpus):
    assert Options(gres=gres).gpus_of_node() == gpus


@pytest.mark.parametrize(
    "text, part",
    [
        ('acount = "x"', "acount: no such setting; did you mean account?"),
        ('gpus_per_node = "8"', "gpus_per_node='8': not allowed; gpus_per_node must be a whole number >= 0"),
        ("exclusive = 1", "exclusive=1: not allowed; exclusive must be true or false"),
        ('setup = "module load x"', "setup must be a list of texts"),
        ("[environment]\nx-y = 1", "environment.x-y: is no name of a variable"),
        ("[environment]\nx = [1]", "environment must be a table of texts and numbers"),
        ("[sbatch]\nntasks = 2", "sbatch.ntasks: not allowed"),
        ('[container]\nbinds = ["/x"]', "container.image: is missing"),
        ('[container]\nimage = "x"\nbind = "y"', "container.bind: no such setting; did you mean container.binds?"),
        ('launcher = "aprun"', "launcher=aprun: not allowed; launcher must be srun or mpirun"),
        ("python = 'a \"b'", 'python=a "b: no command as a shell takes it'),
        ("cores_per_node = 8\ncores_free = 8", "cores_free=8: must be below cores_per_node=8"),
        ('gpus_per_node = 2\ngres = "gpu:2"', "gres=gpu:2: asks for GPUs as gpus_per_node=2 does"),
        ("account = ", "not valid TOML"),
    ],
)
def test_a_wrong_site_file_is_one_line(tmp_path, capsys, text, part):
    path = write(tmp_path, text)
    assert main(["site", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hkd_hpc: --site {path}: ")
    assert part in line


@pytest.mark.parametrize(
    "text, submitted", [('account = "a"\n', "--account is a slurm/fedhkd_cifar10.sh run.seed=1\n"), ("account = ", "")]
)
def test_the_line_of_the_readme_submits_nothing_with_a_wrong_site_file(tmp_path, text, submitted):
    readme = (toy.PROJECT / "slurm/README.md").read_text()
    [line] = [line for line in readme.splitlines() if "jobs site site.toml" in line and "sbatch" in line]
    (tmp_path / "site.toml").write_text(text)
    fake = 'sbatch() { echo "--account is $SBATCH_ACCOUNT $*"; }'
    env = {**os.environ, "PYTHONPATH": str(toy.PROJECT)}
    shell = subprocess.run(["bash", "-c", f"{fake}\n{line}"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (shell.stdout, shell.returncode == 0) == (submitted, bool(submitted))


def test_exports_reach_the_shell_as_they_were_meant(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PLACE", "/x")
    assert main(["site", str(write(tmp_path, QUOTES))]) == 0
    code = '''eval "$1"; eval "$SETUP_LINES"; eval "python=($PYTHON) srun=($SRUN_ARGS)"
printf '%s\\0' "$SBATCH_ACCOUNT|$SBATCH_RESERVATION|$SBATCH_EXCLUSIVE|$SBATCH_MEM_PER_NODE|$LAUNCHER|${VENV-unset}"
printf '%s\\0' "${SITE[@]}" "$GREETING" "$TEXT" "$NUMBER" "${srun[@]}" "${python[@]}"'''
    shell = subprocess.run(["bash", "-euc", code, "bash", capsys.readouterr().out], capture_output=True, text=True)
    assert shell.stdout.split("\0")[:-1] == [
        "it's mine|r|exclusive|1536M|mpirun|",
        "--mail-user=me and you",
        "--contiguous",
        "a  b",
        "a 'b' \"c\" $HOME",
        "1",
        "--comment=x y",
        "--quiet",
        "apptainer",
        "exec",
        "--nv",
        "--bind",
        "/a b,/x/c",
        "/my images/x.sif",
        "python3",
    ]


def test_options_win_over_the_site_and_lists_are_joined(tmp_path):
    site = write(
        tmp_path,
        'partition = "a"\nqos = "q"\ngres = "gpu:8"\nsetup = ["one"]\nsrun = ["-v"]\n[environment]\nX = 1\nY = 1\n',
    )
    options = options_at(
        site, {"partition": "b", "gpus_per_node": 2, "setup": ["two"], "environment": {"X": "2"}, "exclude": "n1"}
    )
    assert (options.partition, options.qos, options.gpus_per_node, options.gres) == ("b", "q", 2, None)
    assert (options.setup, options.srun_args, options.environment) == (["one", "two"], ["-v"], {"X": "2", "Y": "1"})
    assert options.slurm == {"exclude": "n1"}
    assert options.time_min == Options().time_min


def test_what_the_command_line_does_not_say_is_left_to_the_site():
    given = vars(parse(["launch", "spec.toml", "--root", "r", "--partition", "b"]))
    assert {name for name in Options.__dataclass_fields__ if name in given} == {"partition"}


def test_a_site_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"^--site .*none.toml: cannot be read \(No such file"):
        launch(Sweep(), root=tmp_path / "root", site=tmp_path / "none.toml")


# ---- on a real SLURM


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    slurm_cluster.need(slurm_cluster.why_not())
    with slurm_cluster.running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


SITE = """gres = "gpu:2"
cores_per_node = 8
cores_free = 2
setup = ["export FOUND=$SLURM_JOB_NUM_NODES"]
python = "'{python}'"
srun = ["--quiet"]
launcher = "srun"
[environment]
TEXT = "a 'b'"
[container]
command = "'{command}' exec --rocm"
image = "my image.sif"
binds = ["/a b", "/c"]
[sbatch]
comment = "study"
"""
SEEN = "1 a 'b' exec --rocm --bind /a b,/c my image.sif\n"  # of one process


def site_of(cluster, folder):
    """A site file with a container that notes what it was given in `seen`; its path has a blank."""
    slurm_cluster.need(None if cluster.gpus_per_node else "no make-believe GPUs here: devices may not be made")
    command = folder / "my container"
    command.write_text(f'#!/bin/bash\necho "$FOUND $TEXT ${{*:1:5}}" >> "{folder}/seen"\nexec "${{@:6}}"\n')
    command.chmod(0o755)
    return write(folder, SITE.format(command=command, python=sys.executable))


def test_a_sweep_and_its_checks_use_the_site_file(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    monkeypatch.setenv("TMPDIR", cluster.env["TMPDIR"])
    site, root = site_of(cluster, tmp_path), tmp_path / "root"
    data = toy.save_data(tmp_path / "data.npz")
    settings = dict(text.split("=", 1) for text in toy.settings(data, "model.name=small"))
    sweep = Sweep(settings=settings, scheme=["fedavg"])
    with pytest.raises(UsageError, match=r"SLURM rejects a job of 3 rank\(s\)"):
        launch(sweep, root=root, site=site, gres="gpu:a100:2")
    study = launch(sweep, root=root, site=site)
    [job] = read_launches(root)[0].jobs
    asked = cluster.job(job)
    assert study.wait(), study.status()
    shown = ("NumTasks", "CPUs/Task", "TresPerNode", "Comment")
    assert [asked[name] for name in shown] == ["3", "2", "gres:gpu:2", "study"]
    log = (root / study.trials[0].name / "log.txt").read_text()
    assert "3 ranks on 1 host" in log
    assert log.count(" rank 0: cores: ranks 0-2 ") == 1
    assert (tmp_path / "seen").read_text() == SEEN * 3
    two = launch(Sweep(settings=settings, scheme=["fedprox"]), root=root, site=site, nodes=2)
    [job] = read_launches(root)[1].jobs
    assert two.wait()
    assert [cluster.job(job)[name] for name in ("NumNodes", "NumTasks", "CPUs/Task")] == ["2", "4", "3"]
    site.unlink()
    resubmit(root)  # needs no site file: the options are stored
    assert len(read_launches(root)) == 2, "nothing was left to submit"


def test_a_job_that_cannot_have_its_environment_ends_before_it_begins(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    monkeypatch.setenv("TMPDIR", cluster.env["TMPDIR"])
    line = f"source '{toy.PROJECT}/slurm/stage_env.sh' use /none/env.tar"
    site = write(tmp_path, f'python = "python"\nsetup = ["{line}"]\n')
    study = launch(Sweep(scheme=["fedavg"]), root=tmp_path / "root", site=site)
    [job] = read_launches(study.root)[0].jobs
    assert cluster.wait_for(job)["ExitCode"] == "1:0"
    assert not study.wait()
    assert [state.state for state in study.status()] == ["lost"]
    [log] = (study.root / "submitit").glob(f"{job}*.err")
    assert "stage_env: " in log.read_text()
    assert "/none/env.tar is missing: " in log.read_text()


def test_the_sbatch_scripts_use_the_site_file(cluster, tmp_path):
    data = toy.save_data(tmp_path / "data.npz")
    code = 'set -eu; eval "$("$0" -m jobs site "$1")"; sbatch --parsable "${SITE[@]}" "${@:2}"'
    env = {**cluster.env, "PYTHONPATH": str(toy.PROJECT), "OMP_NUM_THREADS": "1"}
    site = site_of(cluster, tmp_path)
    job = cluster.run(
        "bash",
        "-c",
        code,
        sys.executable,
        site,
        toy.PROJECT / "slurm/train.sh",
        "--dry-run",
        *toy.settings(data, "model.name=small"),
        cwd=tmp_path,
        env=env,
    )
    number = job.stdout.strip()
    asked = cluster.wait_for(number)
    text = (tmp_path / f"train-{number}.log").read_text()
    assert asked["JobState"] == "COMPLETED", text
    assert (asked["NumTasks"], asked["CPUs/Task"], asked["TresPerNode"]) == ("3", "2", "gres:gpu:2")
    host = os.uname().nodename
    assert [line.partition(": cores ")[0] for line in text.splitlines() if line.startswith("rank ")] == [
        f"rank {rank} on {host}" for rank in range(3)
    ], "rank 0 alone says it"
    assert (tmp_path / "seen").read_text().endswith(SEEN * 3)
