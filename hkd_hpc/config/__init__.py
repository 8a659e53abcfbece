"""The settings of a run: nested frozen dataclasses, filled from defaults < presets < file < section.key=value.

Checked completely before torch is imported. A scheme's own settings stand in its file (`schemes/`) and are section
`scheme` here.
"""

from hkd_hpc.config.files import load_toml, read_toml
from hkd_hpc.config.fit import check_fit
from hkd_hpc.config.help import help_text
from hkd_hpc.config.keys import NotOfThisScheme, all_keys, keys_of, parts_of
from hkd_hpc.config.precedence import collect, resolve, split_override
from hkd_hpc.config.resuming import FIXED, HOW, changed, changes, difference, is_location, moved
from hkd_hpc.config.sections import (
    SECTIONS,
    CommSettings,
    Config,
    FedSettings,
    RunSettings,
    TrainSettings,
    absolute_paths,
    as_values,
)
from hkd_hpc.config.values import DAMAGED, check_together, from_file, from_json, from_values, with_clients_of_data

__all__ = [
    "DAMAGED",
    "FIXED",
    "HOW",
    "SECTIONS",
    "CommSettings",
    "Config",
    "FedSettings",
    "NotOfThisScheme",
    "RunSettings",
    "TrainSettings",
    "absolute_paths",
    "all_keys",
    "as_values",
    "changed",
    "changes",
    "check_fit",
    "check_together",
    "collect",
    "difference",
    "from_file",
    "from_json",
    "from_values",
    "help_text",
    "is_location",
    "keys_of",
    "load_toml",
    "moved",
    "parts_of",
    "read_toml",
    "resolve",
    "split_override",
    "with_clients_of_data",
]
