import itertools

import pytest
import torch

from tsemon.errors import InvalidArgument, MissingPackage
from tsemon.lab.train.text import standard_library_text, text_batches, text_in_order, text_streams

COUNTED = torch.arange(10)


def take(count, batches):
    return list(itertools.islice(batches, count))


class TestTheStandardLibraryText:
    def test_is_python_source_and_the_same_each_time(self):
        text = standard_library_text(100_000)
        assert text.shape == (100_000,)
        assert text.dtype == torch.uint8
        assert b"\ndef " in bytes(text.tolist())
        assert torch.equal(text, standard_library_text(100_000))

    def test_starts_with_the_first_file_whatever_its_size(self):
        assert torch.equal(standard_library_text(1000), standard_library_text(5000)[:1000])

    def test_says_when_there_are_no_sources(self, monkeypatch, tmp_path):
        monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
        with pytest.raises(MissingPackage, match="no Python sources"):
            standard_library_text()

    def test_leaves_out_installed_packages(self, monkeypatch, tmp_path):
        for name in ("b.py", "a/c.py", "site-packages/a.py"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"# {name}\n")
        monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
        assert bytes(standard_library_text().tolist()) == b"# a/c.py\n# b.py\n"


class TestTextBatches:
    def test_ask_for_the_byte_that_follows(self):
        text = torch.arange(50, dtype=torch.uint8)
        for inputs, targets in take(5, text_batches(text, 8, 4, seed=0)):
            assert inputs.shape == targets.shape == (4, 8)
            assert torch.equal(inputs + 1, targets)

    def test_reach_the_last_byte(self):
        _, targets = next(text_batches(torch.arange(4, dtype=torch.uint8), 3, 1, seed=0))
        assert targets.tolist() == [[1, 2, 3]]

    def test_refuse_a_context_longer_than_the_text(self):
        with pytest.raises(InvalidArgument, match="from 1 to 9 for this text"):
            next(text_batches(COUNTED, 10, 1, seed=0))


class TestTextStreams:
    def test_go_on_in_each_row_where_it_ended(self):
        batches = take(2, text_streams(torch.arange(14), context=3, batch_size=2))
        assert [inputs.tolist() for inputs, _ in batches] == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]
        assert all(torch.equal(inputs + 1, targets) for inputs, targets in batches)

    def test_begin_anew_at_the_end(self):
        first, _, third = take(3, text_streams(torch.arange(14), context=3, batch_size=2))
        assert torch.equal(first[0], third[0])

    def test_say_how_much_text_they_need(self):
        with pytest.raises(InvalidArgument, match="2 streams of 5 tokens need 11 tokens, the text has 10"):
            text_streams(COUNTED, 5, 2)


class TestTextInOrder:
    def test_shows_every_target_once(self):
        batches = list(text_in_order(torch.arange(22), context=3, batch_size=4))
        assert torch.cat([targets.flatten() for _, targets in batches]).tolist() == list(range(1, 22))
        assert [len(inputs) for inputs, _ in batches] == [4, 3]
