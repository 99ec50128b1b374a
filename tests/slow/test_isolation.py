"""The suite does not depend on what a launcher, a job or a terminal has put into its caller's environment."""

from __future__ import annotations

import os

import pytest

from tests.processes import ROOT, run_python

# the environment; a fit in pytest's own process; a program with two ranks; a page without colours; a table as wide as the terminal
TESTS = (
    "tests/slow/test_isolation.py::test_nothing_of_the_caller_is_left",
    "tests/cli/test_configs_and_doctor.py::test_a_config_by_its_name_trains",
    "tests/cli/test_configs_and_doctor.py::test_the_doctor_finds_two_ranks_equal_to_one_process",
    "tests/cli/test_explain.py::test_the_command",
    "tests/callbacks/test_notes_and_files.py::test_one_table_says_what_was_found_and_seen",
)
PYTEST = ("-m", "pytest", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", *TESTS)
ENVIRONMENTS = {
    "a host that does not answer": {"MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "29500", "WORLD_SIZE": "7"},
    "a rank": {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0"},
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/no/file",
    },
    "SLURM": {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_NODELIST": "nowhere"},
    "a proxy": {
        "HTTP_PROXY": "http://10.255.255.1:1",
        "https_proxy": "http://10.255.255.1:1",
        "ALL_PROXY": "socks5://10.255.255.1:1",
    },
    "a narrow terminal with colours": {"COLUMNS": "20", "FORCE_COLOR": "1"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
}
# when tests are collected: later ones may set some
LEFT = {name for names in ENVIRONMENTS.values() for name in names if name in os.environ}


def test_nothing_of_the_caller_is_left() -> None:
    assert not LEFT


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_environment_of_the_caller_changes_nothing(name: str) -> None:
    done = run_python(*PYTEST, folder=ROOT, seconds=300, **ENVIRONMENTS[name])
    assert done.returncode == 0, done.stdout[-4000:]


def test_assertions_are_kept_without_debug_code() -> None:
    done = run_python("-O", *PYTEST, folder=ROOT, seconds=300)
    assert done.returncode == 0, done.stdout[-4000:]
