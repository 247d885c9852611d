"""Packages that the tests need start nothing by themselves."""

import subprocess

import pytest

from scripts.system_parts import _nothing_started


class TestWhileAPackageIsInstalled:
    def test_no_service_is_started(self, tmp_path):
        policy = tmp_path / "policy-rc.d"
        with _nothing_started(policy):
            assert subprocess.run([policy, "prometheus", "start"], check=False).returncode == 101
        assert not policy.exists()

    def test_it_ends_with_a_failure_too(self, tmp_path):
        with pytest.raises(KeyError), _nothing_started(tmp_path / "policy-rc.d"):
            raise KeyError
        assert [*tmp_path.iterdir()] == []

    def test_what_the_machine_says_of_itself_stays(self, tmp_path):
        policy = tmp_path / "policy-rc.d"
        policy.write_text("#!/bin/sh\nexit 0\n")
        with _nothing_started(policy):
            pass
        assert policy.read_text() == "#!/bin/sh\nexit 0\n"
