import pytest

from tsemon.tools.scanning.memory import free_bytes

GIB = 2**30


class TestFreeBytes:
    @pytest.fixture
    def machine(self, tmp_path):
        """One with 8 GiB free, in which this process is in the group /a/b."""
        own = tmp_path / "groups" / "a" / "b"
        own.mkdir(parents=True)
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text("0::/a/b\n")
        (tmp_path / "proc" / "meminfo").write_text(
            "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"
        )
        return tmp_path

    def free(self, machine):
        return free_bytes(machine / "proc", machine / "groups")

    def limit(self, group, limit, current, files):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{current}\n")
        (group / "memory.stat").write_text(f"anon 1\nactive_file {files}\ninactive_file 0\n")

    def test_are_the_machines(self, machine):
        assert self.free(machine) == 8 * GIB

    def test_are_what_the_container_has_left_but_for_files(self, machine):
        self.limit(machine / "groups" / "a" / "b", 4 * GIB, 3 * GIB, GIB)
        assert self.free(machine) == 2 * GIB

    def test_are_what_any_container_around_it_has_left(self, machine):
        self.limit(machine / "groups" / "a" / "b", "max", 3 * GIB, 0)
        self.limit(machine / "groups" / "a", 5 * GIB, 4 * GIB, 0)
        assert self.free(machine) == GIB

    def test_are_known_of_this_machine(self, tmp_path):
        assert free_bytes() > 0
        assert free_bytes(tmp_path, tmp_path) > 2**20  # a system that does not tell
